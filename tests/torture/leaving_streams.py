"""Clients stream from `tensorrt_llm_bls` or `ensemble` and leave at random: those that stay get their whole answer.

The nested calls of `tensorrt_llm_bls` can deadlock Triton's python backend when more than one thread of a process is in
one (decision 19); then the model answers nobody any more. It takes responses that come faster than the interpreter
takes them, so the engine is a stand-in that counts. Through `ensemble` the real engine answers, which frees the slots
of those that leave; one way to do that corrupted the server's heap (decision 19).
"""

import queue
import random
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tritonclient.utils import InferenceServerException

from pipelines.serving.config import ServingSettings
from pipelines.serving.logs import ServerFailedError, useful_lines
from pipelines.serving.process import TritonServer
from tests.support.served_gemma import LIMITS, Client, write_gemma
from tests.torture.row import Row

CLIENTS, INSTANCES = 16, 4
TOKENS = 300
ENGINE = """
import threading

import numpy as np
import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def value(request, name, default):
    tensor = pb.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


class TritonPythonModel:
    def initialize(self, args):
        self.stopped = set()

    def execute(self, requests):
        for request in requests:
            if value(request, "stop", False):
                self.stopped.add(request.request_id())
                request.get_response_sender().send(flags=FINAL)
            else:
                threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        tokens = list(range(100, 100 + int(value(request, "request_output_len", 1))))
        pieces = [[token] for token in tokens] if value(request, "streaming", False) else [tokens]
        for piece in pieces:
            last = piece is pieces[-1] or request.request_id() in self.stopped
            tensors = [pb.Tensor("output_ids", np.array([[piece]], np.int32)),
                pb.Tensor("sequence_length", np.array([[len(piece)]], np.int32))]
            sender.send(pb.InferenceResponse(tensors), FINAL if last else 0)
            if last:
                break
"""
MODELS = {"tensorrt_llm_bls": ENGINE, "ensemble": ""}
"""Those asked, and a stand-in for the engine; empty for the real one."""
STAYS = 0.1
"""Share of the clients that stay to the end."""
ASKED = {"text_input": "The capital of", "max_tokens": TOKENS, "end_id": -1}
BEGINS = 24
"""Characters that must be equal: the last bits of a real engine's logits depend on who else is in the batch."""


@dataclass
class Outcome:
    """What became of the streams, filled by the threads of the clients."""

    begun: int = 0
    ended: int = 0
    worst_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(seed: int, seconds: float) -> list[Row]:
    """Let clients come and go for about so many seconds."""
    return [_leave(model, seed, seconds / len(MODELS)) for model in MODELS]


def _leave(model: str, seed: int, seconds: float) -> Row:
    settings = ServingSettings(drain_timeout_s=5, startup_timeout_s=300)
    with tempfile.TemporaryDirectory(prefix="leaving-streams-") as root:
        limits = replace(LIMITS, max_batch_size=CLIENTS)
        repository = write_gemma(Path(root), limits=limits, bls_instance_count=INSTANCES)
        if engine := MODELS[model]:
            (repository / "tensorrt_llm" / "1" / "model.py").write_text(engine)
        with TritonServer(repository, settings) as server:
            expected = {stream: _ask(server.grpc_url, model, stream=stream) for stream in (True, False)}
            outcome, until = Outcome(), time.monotonic() + seconds
            threads = [
                threading.Thread(
                    target=_visit,
                    args=(server.grpc_url, model, random.Random(f"{seed}-{number}"), until, expected, outcome),
                )
                for number in range(CLIENTS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            faults = outcome.faults and [*_of_server(server), *outcome.faults]
    what = f"streams of {model} whose clients leave at random: whoever stays is answered"
    return Row(what, outcome.begun, outcome.ended, outcome.worst_s, "; ".join(faults[:3]))


def _of_server(server: TritonServer) -> list[str]:
    """Return why the server ended, or the last that it complained of; empty if it did neither."""
    try:
        server.check()
    except ServerFailedError as error:
        return [str(error)]
    return [f"its log: {line}" for line in useful_lines(server.log_lines())[-1:]]


def _visit(
    url: str, model: str, rng: random.Random, until: float, expected: Mapping[bool, str], outcome: Outcome
) -> None:
    """Come again and again until the time is over, or nobody answers."""
    while time.monotonic() < until and not outcome.faults:
        stays, streams = rng.random() < STAYS, rng.random() < 0.8
        begun, fault = time.monotonic(), ""
        if stays:
            try:
                answer = _ask(url, model, stream=streams)
                same = answer[:BEGINS] == expected[streams][:BEGINS] and len(answer) > 0.7 * len(expected[streams])
                fault = "" if same else f"another answer: {answer!r}"
            except queue.Empty:
                fault = "nothing came for 30 s"
            except InferenceServerException as error:
                fault = f"the answer was an error: {error}"
        else:
            client = Client(url)
            try:
                client.send(model, "one", stream=streams, **ASKED)
            except InferenceServerException as error:
                fault = f"the stream broke: {error}"
            time.sleep(rng.uniform(0, 0.5))
            client.close(cancel=True)
        with outcome.lock:
            outcome.begun += 1
            outcome.ended += not fault
            outcome.worst_s = max(outcome.worst_s, time.monotonic() - begun)
            if fault:
                outcome.faults.append(fault)


def _ask(url: str, model: str, *, stream: bool) -> str:
    """Ask and wait for the whole answer.

    Raises:
        queue.Empty: nothing came for 30 s.
        InferenceServerException: the answer was an error.
    """
    client = Client(url)
    try:
        answer = client.ask(model, stream=stream, **ASKED)
        if answer.error:
            raise InferenceServerException(answer.error)
        return answer.text
    finally:
        client.close(cancel=True)
