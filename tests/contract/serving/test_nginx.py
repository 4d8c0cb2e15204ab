"""The real nginx with the generated configuration: before a stub, and before the real service."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer

import psutil
import pytest

from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.logs import ServerFailedError
from pipelines.serving.openai import nginx
from pipelines.serving.openai.bodies import Limits
from pipelines.serving.openai.nginx import Nginx
from pipelines.serving.ports import answers_200, free_port
from pipelines.serving.process import TritonServer
from tests.contract.serving.test_front_limits import COMPLETIONS, JSON, another_front, ask, p99_beside_attackers, post
from tests.support.eventually import eventually

pytestmark = pytest.mark.thorough
if nginx.find() is None:
    pytest.skip("nginx is not installed: apt-get install nginx", allow_module_level=True)
LIMITS = Limits(body_bytes=100_000, request_timeout_s=30)
OF_ONE_CLIENT = 4


class Stub(BaseHTTPRequestHandler):
    """Answers with the size of the body, or with a stream of three events, half a second apart."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        text = b"%d" % len(self.rfile.read(size))
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(3):
            self.wfile.write(b"9\r\ndata: %d\n\n\r\n" % number)
            time.sleep(0.5)
        self.wfile.write(b"0\r\n\r\n")

    def address_string(self) -> str:
        return "nginx"

    def log_message(self, form: str, *args: object) -> None:
        pass


class StubServer(ThreadingMixIn, UnixStreamServer):
    """Listens where the service would."""

    daemon_threads = True


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """An nginx with short times before the stub."""
    monkeypatch.setattr(nginx, "HEAD_TIMEOUT_S", 1)
    monkeypatch.setattr(nginx, "BODY_TIMEOUT_S", 1)
    monkeypatch.setattr(nginx, "IDLE_TIMEOUT_S", 2)
    monkeypatch.setattr(nginx, "MOST_OF_ONE_CLIENT", OF_ONE_CLIENT)
    found = free_port("127.0.0.1", {})
    program = nginx.find()
    assert program is not None
    one = Nginx(program, "127.0.0.1", found, LIMITS, drain_s=5)
    with StubServer(str(one.upstream), Stub) as stub:
        Path(one.upstream).chmod(0o666)
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        one.start()
        yield found
        one.drain()
        one.close()
        stub.shutdown()


def talk(port: int, *parts: bytes, pause_s: float = 0.0) -> tuple[bytes, float]:
    """Send bytes with pauses; return all that is answered until the connection is closed, and the seconds."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionError:
            answer = b""
    return answer, time.monotonic() - begun


def error_of(answer: bytes) -> dict[str, object]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return dict(json.loads(body)["error"])


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


def test_bodies_up_to_the_bound_are_passed_on(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for size in (0, 1, 70_000, LIMITS.body_bytes):
        connection.request("POST", "/", b"a" * size)
        assert connection.getresponse().read() == b"%d" % size


@pytest.mark.parametrize(
    "body",
    [b"Content-Length: 100001\r\n\r\n", b"Content-Length: 209715200\r\nExpect: 100-continue\r\n\r\n"],
    ids=["one byte", "200 MB, asked first"],
)
def test_a_longer_body_is_refused_before_it_is_sent(port: int, body: bytes) -> None:
    answer, _ = talk(port, HEAD + body)
    assert answer.startswith(b"HTTP/1.1 413")
    assert error_of(answer) == {
        "message": "A body has at most 100,000 bytes (serving.max_body_bytes).",
        "type": "invalid_request_error",
        "param": None,
        "code": "body_too_large",
    }


@pytest.mark.parametrize(
    "head",
    [b"a: " + b"b" * 40_000 + b"\r\n\r\n", b"a: b\r\n" * 20_000 + b"\r\n", b"a: b\r\n" * 200_000],
    ids=["one line", "many lines", "no end"],
)
def test_a_long_head_is_refused(port: int, head: bytes) -> None:
    answer, seconds = talk(port, b"GET / HTTP/1.1\r\nHost: x\r\n" + head)
    assert seconds < 5
    assert not answer or "at most 32768 bytes" in str(error_of(answer)["message"])  # or reset while it was sent


@pytest.mark.parametrize("sent", [b"\x16\x03\x01", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"])
def test_broken_http_gets_a_reason(port: int, sent: bytes) -> None:
    answer, _ = talk(port, sent + b"\r\n\r\n")
    assert b"This is not a valid HTTP request." in answer


HALF = HEAD + b"Content-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("sent", [b"", b"POST / HT", HALF], ids=["none", "head", "body"])
def test_who_stops_sending_is_closed(port: int, sent: bytes) -> None:
    answer, seconds = talk(port, sent)
    assert not answer or answer.startswith(b"HTTP/1.1 408")
    assert 0.5 < seconds < 10


def test_a_head_has_one_time_however_slowly_it_comes(port: int) -> None:
    """Bytes that trickle in do not prolong it."""
    _, seconds = talk(port, *(b"GET / HTTP/1.1\r\nHost: " + b"x" * 20)[:40].split(b"T"), pause_s=0.4)
    assert seconds < 5


def test_a_connection_that_is_kept_open_is_closed_after_a_while(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        begun = time.monotonic()
        assert connection.recv(4096) == b""
        assert time.monotonic() - begun < 10


def test_one_client_has_so_many_requests_at_a_time(port: int) -> None:
    held = [http.client.HTTPConnection("127.0.0.1", port, timeout=20) for _ in range(OF_ONE_CLIENT)]
    for one in held:
        one.request("GET", "/")
        one.getresponse()  # its head is here, its events come
    status, _, _ = talk(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[0].partition(b"\r\n")
    assert status == b"HTTP/1.1 429 Too Many Requests"
    for one in held:
        one.close()


def test_events_leave_as_they_come(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    begun = time.monotonic()
    connection.request("GET", "/")
    answer = connection.getresponse()
    times = []
    for number in range(3):
        assert answer.readline() == b"data: %d\n" % number
        times.append(time.monotonic() - begun)
        answer.readline()
    assert times[0] < 0.45
    assert times[2] - times[0] > 0.8


def test_without_a_service_behind_the_answer_is_unavailable() -> None:
    program = nginx.find()
    assert program is not None
    found = free_port("127.0.0.1", {})
    one = Nginx(program, "127.0.0.1", found, LIMITS, drain_s=1)
    try:
        one.start()
        answer, _ = talk(found, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    finally:
        one.drain()
        one.close()
    assert (answer[:12], error_of(answer)["code"]) == (b"HTTP/1.1 503", "unavailable")


@pytest.fixture
def front(echo_server: TritonServer) -> Iterator[tuple[OpenAiFrontend, int]]:
    """The real service behind nginx."""
    with another_front(echo_server, host="0.0.0.0") as found:
        yield found


def processes(front: OpenAiFrontend) -> list[psutil.Process]:
    assert front._process is not None
    return psutil.Process(front._process.pid).children(recursive=True)


def masters(front: OpenAiFrontend) -> list[psutil.Process]:
    return [each for each in processes(front) if "nginx: master" in " ".join(each.cmdline())]


def test_the_service_answers_through_nginx(front: tuple[OpenAiFrontend, int]) -> None:
    """A stream too; the reasons of what the service refuses stay its own."""
    service, port = front
    assert len(masters(service)) == 1
    status, answer = post(port, COMPLETIONS, ask())
    assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
    status, answer = post(port, COMPLETIONS, ask(prompt=["a"] * 5000))
    assert (status, "5000 prompts with n=1 are 5000 answers" in answer["error"]["message"]) == (400, True)
    status, answer = post(port, COMPLETIONS, ask(prompt="a " * 2_500_000))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", COMPLETIONS, json.dumps(ask(prompt="sleep", max_tokens=5, stream=True)), JSON)
    answered = connection.getresponse()
    begun = time.monotonic()
    assert answered.readline().startswith(b"data: {")
    answered.read()
    assert time.monotonic() - begun > 0.2  # four more words of 100 ms each


def test_a_client_that_leaves_stops_its_request(front: tuple[OpenAiFrontend, int], echo_server: TritonServer) -> None:
    seen = echo_server.repository.path / "seen.txt"
    seen.unlink(missing_ok=True)
    connection = http.client.HTTPConnection("127.0.0.1", front[1], timeout=20)
    connection.request("POST", COMPLETIONS, json.dumps(ask(prompt="sleep", max_tokens=200, stream=True)), JSON)
    connection.getresponse().readline()
    connection.close()
    assert eventually(seen.exists)


def test_a_running_request_gets_its_drain_time_and_nothing_else_does(front: tuple[OpenAiFrontend, int]) -> None:
    service, port = front
    half = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    half[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
    half[1].sendall(HALF)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", COMPLETIONS, json.dumps(ask(prompt="sleep", max_tokens=15)), JSON)
    time.sleep(0.5)
    assert service._process is not None
    service._process.terminate()
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 15)
    assert service._process.wait(4) == -signal.SIGTERM  # obeyed, then raised again


def test_nginx_ends_with_the_service_and_the_service_with_nginx(front: tuple[OpenAiFrontend, int]) -> None:
    """However either ends; then the service is started again."""
    service, port = front
    (master,) = masters(service)
    os.kill(master.pid, signal.SIGKILL)
    assert eventually(lambda: service.poll() is not None)
    with pytest.raises(ServerFailedError, match="nginx ended"):
        service.check()
    service.start()
    assert answers_200("127.0.0.1", port, "/health")
    (master,) = masters(service)
    assert service._process is not None
    os.kill(service._process.pid, signal.SIGKILL)
    assert eventually(lambda: not master.is_running())


def test_a_port_in_use_is_said(echo_server: TritonServer) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        refused = pytest.raises(ServerFailedError, match=f"port {taken} ended: .*ddress already in use")
        with refused, another_front(echo_server, port=taken, openai_port=taken, host="0.0.0.0"):
            pass


def test_others_get_their_first_token_in_time_behind_nginx(
    front: tuple[OpenAiFrontend, int], echo_server: TritonServer
) -> None:
    """As the test of the service alone: attackers are at work on this service, or on another one of this machine."""
    with another_front(echo_server, host="0.0.0.0") as (_, elsewhere):
        ratios: list[float] = []
        while not ratios or ratios[-1] >= 2:
            assert len(ratios) < 8, f"p99 with attackers over p99 without: {[f'{ratio:.1f}' for ratio in ratios]}"
            without = p99_beside_attackers(front[1], elsewhere)
            ratios.append(p99_beside_attackers(front[1], front[1]) / without)
