"""Every kind of request at once, some stopped and some cancelled: right answers, no hang, nothing left behind."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.serving.process import TritonServer
from tests.contract.faults.well_behaved import KINDS, References, is_idle
from tests.support.eventually import eventually
from tests.support.served_gemma import Client

pytestmark = pytest.mark.thorough

THREADS = 32
SECONDS = 6
STOPPABLE = ("whole", "streamed", "bad words")
STOP = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1, "stop": True}


def one_after_the_other(server: TritonServer, references: References, seed: int, until: float) -> list[str]:
    """Ask at random until it is time; return what was wrong."""
    chance, wrong = random.Random(seed), []
    while time.monotonic() < until:
        kind = chance.choice(list(KINDS))
        model, inputs = KINDS[kind]
        client = Client(server.grpc_url)
        fate = chance.choice(["", "", "stop", "cancel"])
        name = f"{seed}-{chance.random()}"
        client.send(model, name, **inputs)
        if fate == "cancel":
            time.sleep(chance.random() / 50)
            client.close(cancel=True)
            continue
        if fate == "stop" and kind in STOPPABLE:
            time.sleep(chance.random() / 50)
            other = Client(server.grpc_url)
            other.send("tensorrt_llm", name, **STOP)
            answer = client.take(name)[name]
            other.close()
            right = answer.error == "" and references.begins(kind, answer)
        else:
            right = references.same(kind, client.take(name)[name])
        if not right:
            wrong.append(f"{kind} {fate}")
        client.close()
    return wrong


def test_mixed_requests_keep_their_answers(served: TritonServer, references: References) -> None:
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(THREADS) as pool:
        runs = [pool.submit(one_after_the_other, served, references, seed, until) for seed in range(THREADS)]
        wrong = [fault for run in runs for fault in run.result(timeout=SECONDS + 40)]
    assert not wrong
    assert eventually(lambda: is_idle(served))
    references.check()
