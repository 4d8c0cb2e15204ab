"""Clients that go without a word: slots and memory come back, and the others get their tokens meanwhile."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from pipelines.serving.process import TritonServer
from tests.conftest import ROOT
from tests.contract.faults.conftest import QUEUE
from tests.contract.faults.well_behaved import PROMPT, References, core, gauge, is_idle, resident_bytes
from tests.support.eventually import eventually
from tests.support.served_gemma import Client

MIB = 1 << 20
CLIENTS = 200
SHORT = {"text_input": PROMPT, "max_tokens": 20, "end_id": -1, "stream": True}
Abuse = Callable[[TritonServer], None]

STREAMS = """
import sys, time
from tests.contract.faults.well_behaved import core
from tests.support.served_gemma import Client
clients = [Client(sys.argv[1]) for _ in range(10)]
for client in clients:
    client.send("tensorrt_llm", "long", **core(tokens=1000, streaming=True))
for client in clients[:2]:
    client.first()
print("streaming", flush=True)
time.sleep(60)
"""


def http_request(path: str, body: bytes, *, length: int | None = None, kind: str = "text/plain") -> bytes:
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + body


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)  # 200 streams on a busy machine


def ask_and_vanish(server: TritonServer) -> None:
    """200 streams: all clients reset their connections when the last one has got something.

    Of 20 tokens each, because tritonserver does not cancel what came over HTTP (its issue 7077): they are generated.
    """
    body = json.dumps(SHORT).encode()
    path = "/v2/models/ensemble/generate_stream"
    clients = [connect(server.ports["http_port"]) for _ in range(CLIENTS)]
    for one in clients:
        one.sendall(http_request(path, body))
    clients[-1].recv(1)
    for one in clients:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.close()


def half_a_request(server: TritonServer) -> None:
    """Half a body, half a header, nothing at all, and no HTTP."""
    for index in range(CLIENTS):
        with connect(server.ports["http_port"]) as one:
            parts = [
                http_request("/v2/models/ensemble/generate", b'{"text_in', length=5_000),
                b"POST /v2/models/ensemble/generate HTT",
                b"",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\xff\xfe",
            ]
            one.sendall(parts[index % 4])


def no_grpc(server: TritonServer) -> None:
    """Half a preface, nonsense, and a frame that says it is 16 MB long."""
    for index in range(CLIENTS):
        with connect(server.ports["grpc_port"]) as one:
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            one.sendall([preface[:10], b"\xff" * 100, preface + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"][index % 3])


def killed_processes(server: TritonServer) -> None:
    """Ten gRPC streams of a process that is killed while tokens arrive."""
    command = [sys.executable, "-c", STREAMS, server.grpc_url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"streaming\n"
        client.kill()


def leave_the_openai_service(server: TritonServer) -> None:
    """Streamed and not, half of them while the first is answered."""
    for number in range(4):
        clients = [connect(server.ports["openai_port"]) for _ in range(8)]
        for index, one in enumerate(clients):
            asked = {"model": "tiny_gemma", "prompt": PROMPT, "max_tokens": 1000, "stream": index % 2 == 0}
            one.sendall(http_request("/v1/completions", json.dumps(asked).encode(), kind="application/json"))
        if number % 2:
            clients[0].recv(1)
        for one in clients:
            one.close()


def fail_at_the_openai_service(server: TritonServer) -> None:
    """Streams that end with an error, 8 at a time: what a header of Triton's makes tritonserver 2.51 die of."""
    body = json.dumps({"model": "tiny_gemma", "prompt": "", "stream": True}).encode()
    for _ in range(12):
        clients = [connect(server.ports["openai_port"]) for _ in range(8)]
        for one in clients:
            one.sendall(http_request("/v1/completions", body, kind="application/json"))
        for one in clients:
            assert b" 400 " in one.recv(100)
            one.close()


def overflow_the_queue(server: TritonServer) -> None:
    """More requests than 8 slots and all waiting places, and the client gone."""
    gone = Client(server.grpc_url)
    for index in range(QUEUE + 50):
        gone.send("tensorrt_llm", f"r{index}", **core(tokens=1000, streaming=True))
    gone.first_or_error()
    gone.close(cancel=True)


ABUSES: list[Abuse] = [
    ask_and_vanish,
    half_a_request,
    no_grpc,
    killed_processes,
    leave_the_openai_service,
    fail_at_the_openai_service,
]


@pytest.mark.parametrize("abuse", ABUSES, ids=lambda abuse: abuse.__name__)
def test_others_get_their_tokens(
    served: TritonServer, openai_service: object, references: References, abuse: Abuse
) -> None:
    """Before, meanwhile and afterwards, token for token; then nothing runs and no KV block is held."""
    with references.meanwhile():
        abuse(served)
    assert eventually(lambda: is_idle(served))
    served.check()


def test_a_queue_that_overflowed_is_empty_again(served: TritonServer, references: References) -> None:
    overflow_the_queue(served)
    assert eventually(lambda: is_idle(served))
    references.check()


def test_a_slot_is_free_at_once(served: TritonServer, client: Client) -> None:
    """All 8 slots generate 1,000 tokens each; a waiting request runs as soon as they are gone, not when they end."""

    def leave() -> float:
        gone = Client(served.grpc_url)
        for index in range(8):
            gone.send("tensorrt_llm", f"r{index}", **core(tokens=1000, streaming=True))
        for _ in range(8):
            gone.first()
        client.send("tensorrt_llm", "waits", **core(tokens=2))
        before = iterations(served)
        gone.close(cancel=True)
        assert len(client.take("waits")["waits"].tokens) == 2
        return before

    assert fewest_iterations(served, leave) < 500


@pytest.mark.parametrize("way", ["generate", "generate_stream"])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_slot_of_a_client_of_the_front_is_free_at_once(
    served: TritonServer, openai_service: object, model: str, way: str
) -> None:
    """Also an ensemble's, which Triton itself tells of a cancellation only between its steps."""
    streams = way == "generate_stream"
    body = json.dumps({**SHORT, "max_tokens": 1000, "exclude_input_in_output": True, "stream": streams}).encode()

    def leave() -> float:
        clients = [connect(served.ports["openai_port"]) for _ in range(4)]
        for one in clients:
            one.sendall(http_request(f"/v2/models/{model}/{way}", body, kind="application/json"))
        assert eventually(lambda: gauge(served, "nv_trt_llm_request_metrics", "active") > 0)
        before = iterations(served)
        for one in clients:
            one.close()
        return before

    assert fewest_iterations(served, leave) < 700


@pytest.mark.parametrize("answers", [1, 2])
def test_the_slot_of_a_streams_client_is_free_though_it_asked_the_ensemble(served: TritonServer, answers: int) -> None:
    """Triton tells only postprocessing, with the next response; without request ids, or with the same one."""

    def leave() -> float:
        gone = Client(served.grpc_url)
        asked = {"text_input": PROMPT, "max_tokens": 1000, "end_id": -1, "num_return_sequences": answers}
        for index in range(4):
            gone.send("ensemble", "" if index < 2 else "same", **asked, stream=True)
        gone.first()
        before = iterations(served)
        gone.close(cancel=True)
        return before

    assert fewest_iterations(served, leave) < 700


def iterations(server: TritonServer) -> float:
    return gauge(server, "nv_trt_llm_general_metrics", "iteration_counter")


def fewest_iterations(server: TritonServer, leave: Callable[[], float]) -> float:
    """Iterations that the engine ran after clients had left, in the best of five rounds.

    A request that nobody stops takes its 1,000 in every round; one that is stopped may take most of them where other
    processes delay the message by half a second.
    """
    ran = []
    for _ in range(5):
        before = leave()
        assert eventually(lambda: is_idle(server))
        time.sleep(0.05)  # the page is renewed every 20 ms
        ran.append(iterations(server) - before)
        if ran[-1] < 500:
            break
    return min(ran)


@pytest.mark.thorough
def test_memory_returns(served: TritonServer, openai_service: object, references: References) -> None:
    """Whatever the first rounds take (pools, threads, caches of the allocator) is there; then three rounds add nothing.

    The bound: one million-token prompt is 6 MB and 200 connections with their buffers are more; a leak of one of them
    per round would show as several MiB in each of the three rounds, every time, so 8 MiB over three rounds is no leak.
    """
    grown = []
    for _ in range(4):
        before = resident_bytes(served)
        for _ in range(3):
            _all_at_once(served)
        references.check()
        if eventually(lambda start=before: resident_bytes(served) - start < 8 * MIB, 5):
            return
        grown.append((resident_bytes(served) - before) / MIB)
    raise AssertionError(f"MiB more after each three rounds: {grown}")


def _all_at_once(server: TritonServer) -> None:
    huge = http_request("/v2/models/ensemble/generate", json.dumps({"text_input": "a" * 6_000_000}).encode())
    for abuse in (ask_and_vanish, half_a_request, no_grpc, leave_the_openai_service, overflow_the_queue):
        abuse(server)
    with connect(server.ports["http_port"]) as one, suppress(ConnectionError):
        one.sendall(huge)
        one.recv(100)
    assert eventually(lambda: is_idle(server) and stays_idle(server))


def stays_idle(server: TritonServer) -> bool:
    """On a busy machine what the abusers sent is still on its way while nothing runs."""
    time.sleep(0.5)
    return is_idle(server)
