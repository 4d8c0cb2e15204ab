"""The service in front of tritonserver: what it lets through, what it refuses, and that nobody is kept waiting."""

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import openai
import psutil
import pytest

from pipelines.domain.benchmark import NO_SLO, Slo
from pipelines.serving.config import API_KEY, ServingSettings
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.locate import why_no_key
from pipelines.serving.logs import ServerFailedError
from pipelines.serving.openai.__main__ import LONG_HEAD
from pipelines.serving.ports import answers_200, free_port
from pipelines.serving.process import TritonServer
from tests.conftest import ROOT

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATE = "/v2/models/ensemble/generate"
JSON = {"Content-Type": "application/json"}
MIB = 2**20
SETTINGS_WITH_KEY = ServingSettings(openai=True, api_key=True, drain_timeout_s=5, startup_timeout_s=60)
DRAIN_S = 30


@pytest.fixture(scope="module")
def port(frontend: OpenAiFrontend, echo_server: TritonServer) -> int:
    return echo_server.ports["openai_port"]


def post(port: int, path: str, body: object, kind: str = "application/json") -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", path, content, {"Content-Type": kind})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def ask(**given: object) -> dict[str, object]:
    return {"model": "echo", "prompt": "a b", "max_tokens": 2, "temperature": 0} | given


def message(content: str) -> dict[str, object]:
    return {"model": "echo", "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (COMPLETIONS, ask(prompt="a " * 2_500_000), 413, "5,000,"),
        (COMPLETIONS, ask(prompt=["a"] * 5000), 400, "5000 prompts with n=1 are 5000 answers"),
        (COMPLETIONS, ask(prompt=["a", "b"], n=128), 400, "2 prompts with n=128 are 256 answers"),
        (COMPLETIONS, ask(prompt="a " * 1000), 400, "'prompt' has 2,000 characters, which are more than 64 tokens"),
        (CHAT, message("a " * 1_900_000), 400, "characters, which are more than 64 tokens"),
        (CHAT, {"model": "echo", "messages": [1] * 400_000}, 400, "messages.0: "),
        (COMPLETIONS, ask(stop="a" * 1001), 400, "longer than 1000 characters"),
        (COMPLETIONS, b" " * 20_000 + b"[" * 2_000, 400, "nested too deeply"),
        (GENERATE, b" " * 20_000 + b'{"a":' * 2_000, 400, "nested too deeply"),
        (GENERATE, {"text_input": "a " * 1000, "max_tokens": 1}, 400, "more than 64 tokens"),
        (GENERATE, {"text_input": "a", "max_tokens": [[1]]}, 400, "'max_tokens' = [1] is not an integer of type INT32"),
        (GENERATE, {"text_input": "a", "max_tokens": 2**31}, 400, "'max_tokens' = 2147483648 is not an integer"),
        (GENERATE, {"text_input": "a", "max_tokens": [1, 2]}, 400, "'max_tokens' has 2 values; it takes 1 value"),
        (GENERATE, {"text_input": "a", "shape": [2, 2]}, 400, "'shape' is not a field that can be set here"),
        (GENERATE, {"text_input": "a", "parameters": {"shape": [1]}}, 400, "'shape' is not a field that can be"),
        (GENERATE, {"text_input": "a", "parameters": [1]}, 400, "'parameters' = [1] is not an object"),
        (GENERATE, {"text_input": "a", "parameters": {"text_input": "a"}}, 400, "'text_input' is given twice"),
        (GENERATE, {"text_input": "\ud800", "max_tokens": 1}, 400, "half of a surrogate pair"),
        (GENERATE, {"text_input": "a", "max_tokens": 1, "stop_words": ["a" * 15_000] * 5}, 400, "more than 65,536"),
        (GENERATE, {"text_input": "a", "max_tokens": 1, "stop_words": ["a"] * 1025}, 400, "has 1025 values"),
        ("/v2/models/preprocessing/generate", {"text_input": "a"}, 404, "cannot be asked here; these can: ensemble"),
        ("/v2/models/ensemble/infer", {"inputs": []}, 404, "is not answered. This service answers POST /v1/"),
        ("/v2/repository/index", {}, 404, "is not answered. This service answers POST /v1/"),
    ],
)
def test_what_could_hurt_is_refused_with_the_reason(port: int, path: str, body: object, status: int, said: str) -> None:
    found, answer = post(port, path, body)
    text = answer["error"] if path.startswith("/v2/") else answer["error"]["message"]
    assert (found, said in text) == (status, True), text[:300]
    assert len(text) <= 2000


def test_a_web_page_cannot_send_requests_unasked(port: int) -> None:
    """A browser asks for permission before it sends JSON elsewhere, but not before it sends plain text."""
    status, answer = post(port, COMPLETIONS, json.dumps(ask()).encode(), "text/plain")
    assert (status, "'text/plain'; it must be application/json" in answer["error"]["message"]) == (400, True)


def raw(port: int, request: bytes) -> bytes:
    """Send bytes and return everything that is answered until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_chunked_body_is_read_within_the_same_bounds(port: int) -> None:
    body = json.dumps(ask()).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    assert b'"completion_tokens":2' in raw(port, head + chunks)
    megabytes = (b"f4240\r\n" + b" " * 1_000_000 + b"\r\n") * 5
    assert raw(port, head + megabytes + b"0\r\n\r\n").startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("line", [b"a: b\r\n", b"b" * 1000], ids=["lines", "bytes"])
def test_a_head_without_end_is_refused(port: int, line: bytes) -> None:
    """The HTTP parser alone would collect it for ever."""
    answer = raw(port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\na: " + line * (40_000 // len(line)))
    assert answer.startswith(b"HTTP/1.1 400")
    assert LONG_HEAD.encode() in answer


FIELDS = {"temperature": 0.5, "seed": 3}


@pytest.mark.parametrize("given", [{}, FIELDS, {"stream": True}, {"parameters": FIELDS}, {"parameters": {}}], ids=str)
@pytest.mark.parametrize("stream", ["", "_stream"])
def test_generate_answers_as_triton_does(port: int, echo_server: TritonServer, given: dict, stream: str) -> None:
    """Same JSON, whether it comes through the service in front or from tritonserver itself."""
    body = {"text_input": "a b", "max_tokens": 1 if given.get("stream") else 3, **given}
    texts = []
    for where in (port, echo_server.ports["http_port"]):
        connection = http.client.HTTPConnection("127.0.0.1", where, timeout=20)
        connection.request("POST", f"{GENERATE}{stream}", json.dumps(body), JSON)
        answer = connection.getresponse()
        texts.append((answer.status, [json.loads(part) for part in answer.read().decode().split("data: ") if part]))
    assert texts[0] == texts[1]


def test_a_port_that_was_taken_meanwhile_is_replaced(echo_server: TritonServer) -> None:
    """It was chosen before the models were loaded; one that was asked for is not replaced."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with another_front(echo_server, port=taken) as (_, found):
            assert found != taken
            assert answers_200("127.0.0.1", found, "/health")
        refused = pytest.raises(ServerFailedError, match=f"port {taken} ended: .*address already in use")
        with refused, another_front(echo_server, port=taken, openai_port=taken):
            pass


def test_another_service_on_the_port_is_not_taken_for_ours(echo_server: TritonServer, port: int) -> None:
    """It answers all that ours would, and long before ours has tried to listen."""
    assert answers_200("127.0.0.1", port, "/health")
    with another_front(echo_server, port=port) as (_, found):
        assert found != port
        assert answers_200("127.0.0.1", found, "/health")


def test_ctrl_c_ends_the_service_without_a_word(own_front: tuple[OpenAiFrontend, int]) -> None:
    """Scripts for clusters start it by itself."""
    service, _ = own_front
    assert service._process is not None
    before = service.log_file.stat().st_size
    os.kill(service._process.pid, signal.SIGINT)
    assert service._process.wait(60) == 0
    assert service.log_file.read_bytes()[before:] == b""


def test_health_is_triton_s(port: int) -> None:
    for path in ("/v2/health/live", "/v2/health/ready"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", path)
        assert connection.getresponse().status == 200


def test_other_machines_reach_the_front_alone(echo_repository: Path) -> None:
    """With serving.host=0.0.0.0 one socket of all processes listens there, and the rest on 127.0.0.1."""
    settings = ServingSettings(host="0.0.0.0", drain_timeout_s=DRAIN_S, startup_timeout_s=60)
    with TritonServer(echo_repository, settings) as server, OpenAiFrontend(server):
        listening = {
            (found.laddr.ip.removeprefix("::ffff:"), found.laddr.port)
            for child in psutil.Process().children(recursive=True)
            for found in child.net_connections("tcp")
            if found.status == psutil.CONN_LISTEN
        }
        port = server.ports["openai_port"]
        own = {("127.0.0.1", server.ports[name]) for name in ("http_port", "grpc_port", "metrics_port")}
        assert {place for place in listening if place[0] != "127.0.0.1"} == {("0.0.0.0", port)}
        assert own <= listening
        assert post(port, GENERATE, {"text_input": "a b", "max_tokens": 1})[1]["text_output"] == "a b a"


@contextmanager
def another_front(
    echo_server: TritonServer, *, port: int | None = None, slo: Slo = NO_SLO, **settings: object
) -> Iterator[tuple[OpenAiFrontend, int]]:
    """Start a service of its own beside the shared one, before the same server; on a free port unless one is chosen."""
    beside = copy(echo_server)
    beside.ports = echo_server.ports | {"openai_port": port or free_port("127.0.0.1", echo_server.ports)}
    beside.settings = echo_server.settings.model_copy(update=settings)
    beside.log_file = echo_server.log_file.with_suffix(".beside.log")
    with OpenAiFrontend(beside, slo) as service:
        yield service, beside.ports["openai_port"]


@pytest.fixture
def own_front(echo_server: TritonServer) -> Iterator[tuple[OpenAiFrontend, int]]:
    """A service that the test may attack and end."""
    with another_front(echo_server) as found:
        yield found


@pytest.mark.thorough
def test_a_large_chat_is_answered_on_a_busy_machine(echo_server: TritonServer) -> None:
    """200 kB: only its own processor time counts against a body, however long it takes."""
    words = [{"role": "user", "content": "words of a long chat " * 100} for _ in range(100)]
    body = {"model": "echo", "messages": [*words, {"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0,
            "truncate_prompt_tokens": 5}  # fmt: skip
    assert len(json.dumps(body)) > 200_000
    spin = [sys.executable, "-c", "while True: pass"]
    with another_front(echo_server) as (front, port):
        busy = [subprocess.Popen(spin, start_new_session=True) for _ in range(5 * len(os.sched_getaffinity(0)))]
        try:
            for _ in range(2):
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
                answer = connection.getresponse()
                found = json.loads(answer.read())
                assert answer.status == 200, found
                assert found["choices"][0]["message"]["content"].split() == ["user", ":", "hi", "assistant", ":"]
        finally:
            for process in busy:
                process.kill()
                process.wait()
        front.check()


def test_a_request_that_takes_too_long_is_given_up(echo_server: TritonServer) -> None:
    """After a second, of 50 words of 100 ms each; a stream says so at its end."""
    slow = ask(prompt="sleep", max_tokens=50)
    with another_front(echo_server, request_timeout_s=1) as (_, port):
        status, answer = post(port, COMPLETIONS, slow)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        status, answer = post(port, GENERATE, {"text_input": "sleep", "max_tokens": 50})
        assert (status, "longer than this server allows" in answer["error"]) == (504, True)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", COMPLETIONS, json.dumps(slow | {"stream": True}), JSON)
        events = [part for part in connection.getresponse().read().decode().split("data: ") if part]
        assert json.loads(events[0])["choices"]
        assert json.loads(events[-1])["error"]["code"] == "timeout"


def test_idle_and_half_sent_requests_do_not_delay_the_end(own_front: tuple[OpenAiFrontend, int]) -> None:
    """Connections kept open, half a head and half a body: none of them is a running request."""
    service, port = own_front
    idle = http.client.HTTPConnection("127.0.0.1", port)
    idle.request("GET", "/v1/models")
    idle.getresponse().read()
    half = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    half[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
    half[1].sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
    time.sleep(0.3)
    begun = time.monotonic()
    service.__exit__(None, None, None)
    assert time.monotonic() - begun < DRAIN_S


def test_a_running_request_gets_its_drain_time(own_front: tuple[OpenAiFrontend, int]) -> None:
    """15 words of 100 ms each, of which most come after the end was asked for."""
    service, port = own_front
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", COMPLETIONS, json.dumps(ask(prompt="sleep", max_tokens=15)), JSON)
    time.sleep(0.5)
    service._process.terminate()
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 15)


ATTACKER = Path(__file__).with_name("attacker.py")
ATTEMPTS, SAMPLES = 8, 120


def ttft_ms(port: int) -> float:
    """Time to the first token of a short streamed completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    begun = time.monotonic()
    connection.request("POST", COMPLETIONS, json.dumps(ask(stream=True)), JSON)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    found = (time.monotonic() - begun) * 1000
    answer.read()
    connection.close()
    return found


def p99_beside_attackers(port: int, attacked: int) -> float:
    """Time to the first token of a good client while attackers are at work on one port or another."""
    with subprocess.Popen([sys.executable, ATTACKER, str(attacked)], cwd=ROOT, stdout=subprocess.PIPE) as attacker:
        try:
            assert attacker.stdout is not None
            attacker.stdout.readline()  # it has been answered once
            return statistics.quantiles([ttft_ms(port) for _ in range(SAMPLES)], n=100)[98]
        finally:
            attacker.kill()


@pytest.mark.thorough
def test_others_get_their_first_token_in_time_whatever_attackers_send(
    port: int, own_front: tuple[OpenAiFrontend, int]
) -> None:
    """With attackers p99 stays below twice the value without them.

    What they send takes processor time wherever it is read, of which a test machine has little. So the value without
    them is taken while the same attackers are at work on another service of this machine: what differs is that they are
    in this one's way. Several attempts may try on a busy machine; a service that parses, renders and tokenizes on its
    event loop fails every one, with ratios above 50.
    """
    _, elsewhere = own_front
    ratios: list[float] = []
    while not ratios or ratios[-1] >= 2:
        assert len(ratios) < ATTEMPTS, f"p99 with attackers over p99 without: {[f'{ratio:.1f}' for ratio in ratios]}"
        without = p99_beside_attackers(port, elsewhere)
        ratios.append(p99_beside_attackers(port, port) / without)


@pytest.mark.thorough
def test_memory_returns_after_an_attack(own_front: tuple[OpenAiFrontend, int]) -> None:
    """Bodies of 200 MB, 5,000 prompts, and many at the bound at once: within 20 % after at most a minute."""
    service, port = own_front
    process = psutil.Process(service._process.pid)

    def memory() -> int:
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))

    ttft_ms(port)
    assert (
        post(port, CHAT, message("a " * 10_000))[0] == 400
    )  # too long; the process that reads large bodies is loaded now
    before = memory()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (200 * MIB))
            try:
                for _ in range(200):
                    connection.sendall(bytes(MIB))
            except OSError:
                pass
        assert post(port, COMPLETIONS, ask(prompt=["a b"] * 5000))[0] == 400
        assert post(port, CHAT, message("a " * 1_900_000))[0] == 400
    held = []
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 3900000\r\n\r\n"
    for _ in range(20):
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        connection.setblocking(False)
        held.append(connection)
        for part in (head, bytes(3_800_000)):
            try:
                connection.send(part)
            except OSError:
                break
    time.sleep(0.5)
    assert memory() < before + 200 * MIB  # the service holds 16 of the longest bodies at most, and takes them in slowly
    for connection in held:
        connection.close()
    until = time.monotonic() + 60
    while (after := memory()) > 1.2 * before and time.monotonic() < until:
        time.sleep(0.5)
    assert after <= 1.2 * before, f"{before / MIB:.0f} MiB before, {after / MIB:.0f} MiB after"


def test_a_service_with_a_key_answers_only_those_who_send_it(echo_server, monkeypatch):
    keyed = copy(echo_server)
    keyed.settings = SETTINGS_WITH_KEY
    keyed.ports = {**echo_server.ports, "openai_port": free_port("127.0.0.1", echo_server.ports)}
    port, body = keyed.ports["openai_port"], {"model": "echo", "prompt": "a", "max_tokens": 2}
    monkeypatch.setenv(API_KEY, "k-1")
    with OpenAiFrontend(keyed):
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer k-2"}, 401),
            ({"Authorization": "k-1"}, 401),
            ({"Authorization": "Bearer k-1"}, 200),
            ({"Authorization": "bearer k-1"}, 200),  # RFC 9110, 11.1: a scheme in any case
        ):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", COMPLETIONS, json.dumps(body), {**JSON, **headers})
            answer = connection.getresponse()
            content = json.loads(answer.read())
            connection.close()
            assert answer.status == status, headers
            if status == 401:
                assert content["error"]["code"] == "invalid_api_key"
                assert "k-" not in content["error"]["message"].replace("API k", "")
        assert post(port, GENERATE, {"text_input": "a"})[0] == 401
        for path in ("/health", "/v2/health/live", "/metrics", "/version"):
            assert answers_200("127.0.0.1", port, path), path
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k-1")
        assert client.completions.create(model="echo", prompt="a", max_tokens=2).choices
        with pytest.raises(openai.AuthenticationError, match="asks for an API key"):
            client.with_options(api_key="k-2").models.list()


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"openai": True}, "", f"{API_KEY}, which is not set"),
        ({"openai": True}, "a b", "characters that HTTP headers do not allow"),
        ({}, "k-1", "only the OpenAI-compatible service asks for a key"),
    ],
    ids=["unset", "blank", "no service"],
)
def test_a_key_that_cannot_be_asked_for_is_refused(settings, key, message, monkeypatch):
    monkeypatch.setenv(API_KEY, key)
    fault = why_no_key(ServingSettings(api_key=True, **settings))
    assert fault is not None
    assert message in str(fault)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server": "trtllm_serve"}, "server=trtllm_serve"),
        ({"host": "0.0.0.0", "expose_triton": True}, "ask for no key"),
    ],
)
def test_a_key_that_clients_can_pass_by_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ServingSettings(api_key=True, **settings)
