"""The load generator with all its processes against an OpenAI endpoint whose behaviour is known exactly."""

import asyncio
import json
import re
import socket
import ssl
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trustme

from pipelines.domain.errors import UserError
from pipelines.loadgen.health import MachineLoad
from pipelines.loadgen.http_stream import HttpReply, HttpRequest, _Protocol, transport
from pipelines.loadgen.openai_endpoint import OpenAiEndpoint
from pipelines.loadgen.request_stream import Row
from pipelines.loadgen.run import benchmark_table
from tests.contract.loadgen.test_load_against_stub import measure, records
from tests.support.load_settings import TINY_LLAMA
from tests.support.stub_openai import StubOpenAi, serving
from tests.support.stub_triton import running
from tests.support.yardstick import oversleeping


def once(stub: StubOpenAi, folder: Path, work: dict[str, Any] | None = None, **how: Any) -> Any:
    """The only level of a short benchmark."""
    with serving(stub) as url:
        (level,) = measure(url, folder, work, concurrency=2, **how).levels
    return level


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_every_token_is_stamped_as_it_arrives(tmp_path: Path, api: str) -> None:
    """First token after 40 ms, then 7 x 10 ms. Lengths are exact, whatever a chat template adds."""
    stub = StubOpenAi(ttft_s=0.04, itl_s=0.01, overhead=9)
    with oversleeping() as overslept_s:
        level = once(stub, tmp_path, {"osl": 8}, api=api)
    summary = level.summary
    assert not summary.errors
    late = 0.004 + 2 * max(overslept_s)
    assert 0.0395 <= summary.ttft_s.min < 0.04 + late
    assert summary.itl_s.max >= 0.0095
    assert summary.itl_s.min < 0.01 + late
    assert summary.isl.min == summary.isl.max == 16
    assert summary.osl.min == summary.osl.max == 8
    assert {len(record.chunk_ns) for record in records(tmp_path)} == {8}
    assert stub.connections < 12  # one for each of the first questions and of the users: they are kept
    assert all(body["temperature"] == 0 and body["ignore_eos"] and body["min_tokens"] == 8 for body in stub.sent[-3:])


def test_a_server_that_closes_connections_silently_is_measured(tmp_path: Path) -> None:
    """Its next request is sent on a new connection: it was never read, so nothing is asked twice."""
    stub = StubOpenAi(closes=True)
    level = once(stub, tmp_path)
    assert not level.summary.errors
    assert len(stub.sent) == len(records(tmp_path)) + 2  # and the first questions


def test_a_request_on_a_new_connection_is_never_sent_again(tmp_path: Path) -> None:
    """A server that closes connections without an answer: one request of each user was on a kept one."""
    stub = StubOpenAi(fault="mute", faults_after=20, ttft_s=0.05)
    level = once(stub, tmp_path)
    assert set(level.summary.errors) == {"connection"}
    assert any("the server closed the connection without an answer" in note for note in level.notes)
    assert len(stub.sent) <= len(records(tmp_path)) + 2 + (level.concurrency or 0)


def test_tokens_without_text_at_the_end_count_for_itl(tmp_path: Path) -> None:
    """8 tokens in 70 ms, of which five are unseen: 10 ms each, not 3."""
    level = once(StubOpenAi(itl_s=0.01, hidden=5), tmp_path, {"osl": 8})
    assert level.summary.itl_s.min >= 0.0095
    assert any("2.67 tokens in each response" in note for note in level.notes)


def test_several_tokens_in_an_event_are_counted_and_said(tmp_path: Path) -> None:
    """Events of 3, 3 and 2 tokens: the server counts them, and the gaps are not between tokens."""
    level = once(StubOpenAi(per_event=3, itl_s=0.005), tmp_path, {"osl": 8})
    assert level.summary.osl.min == 8
    assert level.server["tokens_per_response"] == pytest.approx(8 / 3)
    assert any("2.67 tokens in each response" in note for note in level.notes)


def test_a_server_that_counts_nothing_is_counted_by_the_tokenizer(tmp_path: Path) -> None:
    """Of 8 words of one token each."""
    with serving(StubOpenAi(usage=False)) as url:
        result = measure(url, tmp_path, {"osl": 8}, concurrency=2)
    (level,) = result.levels
    assert level.summary.osl.min == level.summary.osl.max == 8
    assert result.protocol["osl_counted_by"] == result.protocol["isl_counted_by"] == "tokenizer"
    assert any("The server counts no tokens: input and output tokens are as the tokenizer" in n for n in level.notes)


def test_answers_without_text_are_said(tmp_path: Path) -> None:
    """Tokens that stand for no text come without an event: there is nothing to stamp."""
    level = once(StubOpenAi(silent=True), tmp_path)
    assert level.summary.ttft_s.count == 0
    assert level.summary.osl.min == 4
    assert any("answers had no text, so they have no TTFT" in note for note in level.notes)


def test_without_streaming_an_endpoint_has_no_ttft(tmp_path: Path) -> None:
    """One JSON object."""
    level = once(StubOpenAi(ttft_s=0.01), tmp_path, streaming=False)
    assert (level.summary.ttft_s.count, level.summary.osl.max) == (0, 4)
    assert level.summary.e2e_s.min >= 0.01


@pytest.mark.parametrize(
    ("refuses", "endless"), [(("min_tokens",), "ignore_eos"), (("min_tokens", "ignore_eos"), None)]
)
def test_a_strict_server_gets_only_parameters_that_it_knows(
    tmp_path: Path, refuses: tuple[str, ...], endless: str | None
) -> None:
    """And the result says whether output lengths are exact."""
    with serving(StubOpenAi(refuses=refuses)) as url:
        result = measure(url, tmp_path, concurrency=2)
    assert not result.levels[0].summary.errors
    assert ("forbids" in result.protocol["osl"]) == (endless is not None)


def test_a_server_that_takes_parameters_and_does_not_keep_to_them_is_named(tmp_path: Path) -> None:
    """As those of TGI and Ollama, which take every name."""
    level = once(StubOpenAi(most=6), tmp_path, {"osl": 8})
    words = r"(\S+) of \1 answers are shorter than asked for, though the server takes ignore_eos, min_tokens"
    assert any(re.match(words, note) for note in level.notes), level.notes
    assert not any("shorter" in note for note in once(StubOpenAi(), tmp_path / "kept", {"osl": 8}).notes)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("early", "connection", "before the answer's end"),
        ("busy", "rejected", "HTTP 429, Retry-After 7: queue is full"),
        ("gone", "unavailable", "HTTP 503: no worker"),
        ("broken", "server_error", "no memory"),
    ],
)
def test_what_goes_wrong_is_counted_apart(tmp_path: Path, fault: str, kind: str, words: str) -> None:
    """After 20 good ones; what was measured is kept, and nothing is sent again."""
    stub = StubOpenAi(fault=fault, faults_after=20, ttft_s=0.05)
    level = once(stub, tmp_path, timeout_s=5)
    assert set(level.summary.errors) == {kind}
    assert any(words in note for note in level.notes)
    assert len(stub.sent) == len(records(tmp_path)) + 2  # and the first questions


@pytest.mark.parametrize(("cached", "work", "marked"), [(8, {}, True), (8, {"shared_prefix_share": 0.5}, False)])
def test_input_tokens_from_the_cache_are_marked_unless_planned(
    tmp_path: Path, cached: int, work: dict[str, Any], marked: bool
) -> None:
    """8 of 16 in every answer; a chat template of 3 tokens is the same for all, whatever is sent."""
    level = once(StubOpenAi(cached=cached, overhead=3), tmp_path, work)
    requests = len(records(tmp_path))
    assert level.server["cached_tokens"] == 8 * requests
    assert any("31% of the input tokens came from the server's KV cache" in note for note in level.notes) is marked


def test_metrics_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    """A page that nobody serves."""
    with serving(StubOpenAi()) as url:
        result = measure(url, tmp_path, metrics_url="http://127.0.0.1:9/metrics", concurrency=2)
    assert any("metrics could not be read: http://127.0.0.1:9/metrics: " in note for note in result.levels[0].notes)


def test_no_prompt_is_sent_twice_even_if_the_pool_is_small(tmp_path: Path) -> None:
    """64 prompts, and hundreds of requests."""
    stub = StubOpenAi()
    once(stub, tmp_path, {"prompts": 1})
    prompts = [body["prompt"] for body in stub.sent[2:]]
    assert len(prompts) > 200
    assert len(set(prompts)) == len(prompts)


def test_a_repeated_load_sends_other_prompts(tmp_path: Path) -> None:
    """The second run of a load would otherwise find the first one's in the server's KV cache."""
    stub = StubOpenAi(ttft_s=0.02)
    once(stub, tmp_path, repeats=2, duration_s=0.3, warmup_s=0.1)
    prompts = [body["prompt"] for body in stub.sent[2:]]
    assert len(prompts) > 20
    assert len(set(prompts)) == len(prompts)


def test_loads_are_repeated_in_turns_and_have_intervals(tmp_path: Path) -> None:
    """Every run's records stay; the figures are those of the median run."""
    with serving(StubOpenAi(ttft_s=0.01)) as url:
        result = measure(url, tmp_path, concurrency=[1, 2], repeats=3, duration_s=0.3, warmup_s=0.1)
    assert [(level.concurrency, level.runs) for level in result.levels] == [(1, 3), (2, 3)]
    for level in result.levels:
        low, high = level.intervals["ttft_p50_s"]
        assert 0 < low < high
        assert low - 0.01 < level.summary.ttft_s.p50 < high + 0.01
        assert "3 runs, 95 % intervals: " in benchmark_table(result)
    assert len(list(tmp_path.glob("requests-*.json.gz"))) == 6


def test_a_busy_machine_is_refused_or_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work before a load."""
    busy = MachineLoad(0.7, 0.05, 4)
    monkeypatch.setattr("pipelines.loadgen.health.MachineWatch.load", lambda _: busy)
    words = "other work kept the 4 CPUs of this machine 75% busy"
    assert any(words in note for note in once(StubOpenAi(), tmp_path).notes)
    with serving(StubOpenAi()) as url, pytest.raises(UserError, match=f"Before a load, {words} .*on_busy=refuse"):
        measure(url, tmp_path, on_busy="refuse")


@pytest.mark.parametrize(
    ("stub", "how", "words"),
    [
        (StubOpenAi(html=True), {}, "does not list models: .*text/html"),
        (
            StubOpenAi(key="sk-right"),
            {},
            "refuses a request without a key: HTTP 401: Incorrect API key.*OPENAI_API_KEY",
        ),
        (StubOpenAi(), {"model": "stb"}, "model_name='stb' is not a model .* It has stub. Did you mean 'stub'"),
        (StubOpenAi(models=("a", "b")), {}, "has 2 models. It has a, b. Name one with benchmark.model_name"),
        (StubOpenAi(overhead=-2), {}, r"counts \d+ input tokens where the tokenizer of model= counts \d+"),
        (StubOpenAi(refuses=("messages",)), {"api": "chat"}, "Unknown parameter: messages.*benchmark.api=completions"),
        (StubOpenAi(fault="busy", faults_after=0), {}, "HTTP 429, Retry-After 7: queue is full. Run this again when"),
    ],
)
def test_an_endpoint_that_cannot_be_measured_is_said_at_once(
    tmp_path: Path, stub: StubOpenAi, how: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence, with the server's own words."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(stub) as url, pytest.raises(UserError, match=words):
        measure(url, tmp_path, **how)


def test_the_key_is_sent_and_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It comes from the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-77")
    stub = StubOpenAi(key="sk-secret-77")
    assert not once(stub, tmp_path).summary.errors
    for path in tmp_path.rglob("*.json"):
        assert "sk-secret" not in path.read_text()
    assert "sk-secret" not in "".join(capfd.readouterr())
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-78")
    with serving(stub) as url, pytest.raises(UserError, match="refuses the key in OPENAI_API_KEY") as caught:
        measure(url, tmp_path)
    assert "sk-wrong" not in str(caught.value)


def test_nobody_at_the_url_is_said_at_once(tmp_path: Path) -> None:
    """With the address."""
    with pytest.raises(UserError, match=r"No OpenAI server responds at http://127.0.0.1:9/v1: .*refused"):
        measure("http://127.0.0.1:9/v1", tmp_path)


def test_a_host_without_an_address_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the resolver's words."""

    def unknown(*_args: Any, **_named: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        UserError, match=r"No OpenAI server responds at http://gpu\.test/v1: name or service not known\."
    ):
        measure("http://gpu.test/v1", tmp_path)


def test_a_server_that_accepts_and_never_answers_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the limit is not called a setting that it is not."""
    monkeypatch.setattr("pipelines.loadgen.openai_endpoint._LIVE_WAIT_S", 0.1)
    monkeypatch.setattr(OpenAiEndpoint._ask, "__defaults__", (0.2,))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = OpenAiEndpoint(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "completions", TINY_LLAMA)
        assert not endpoint.is_live()
        with pytest.raises(UserError, match=r"No OpenAI server responds at .*: not finished within 0.2 s\. Check"):
            endpoint.describe("m", streaming=True)


@pytest.mark.parametrize(
    ("until", "trusted", "words"),
    [
        (2100, "ca.pem", ""),
        (2001, "ca.pem", "its certificate is not valid: certificate has expired. Renew it"),
        (2100, "other.pem", "its certificate is not valid: unable to get local issuer certificate"),
        (2100, "no.pem", r"its certificate is not valid: .*no\.pem is no file"),
    ],
)
def test_an_encrypted_endpoint_is_checked(
    tmp_path: Path, until: int, trusted: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a certificate that is known, one that has expired, and one of an unknown authority."""
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", not_before=datetime(2000, 1, 1), not_after=datetime(until, 1, 1)).configure_cert(
        tls
    )
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / trusted))
    with serving(StubOpenAi(), tls) as url:
        if not words:
            assert not measure(url, tmp_path, concurrency=2).levels[0].summary.errors
            return
        with pytest.raises(UserError, match=f"No OpenAI server responds at {url}: {words}"):
            measure(url, tmp_path)


def asked(raw: bytes, *, keeps_text: bool = False) -> tuple[Row, str, str | None]:
    """One request that is answered with these bytes: its record, what was wrong, and the text that was kept."""

    async def ask(url: str) -> tuple[Row, str, str | None]:
        async with transport(url, keeps_text=keeps_text) as connect:
            stream = connect()
            row = await stream.ask(HttpRequest("POST", "/completions", b"{}"), 0, None, 10**10, True, 7)
            await stream.close()
            return row, stream.error_text, stream.take_text()

    with serving(StubOpenAi(raw=raw)) as url:
        return asyncio.run(ask(url))


def http(body: bytes, media: str = "application/json", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def events(*events: object, start: bytes = b"", end: bytes = b"data: [DONE]\n\n", media: str = "") -> bytes:
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return http(start + body + end, media or "text/event-stream")


def split(*events: object) -> bytes:
    """Write each event on several lines."""
    lines = (json.dumps(event, indent=1).encode().replace(b"\n", b"\ndata: ") for event in events)
    return b"".join(b"data: " + each + b"\n\n" for each in lines)


A, B = {"choices": [{"text": " a"}]}, {"choices": [{"text": " b", "finish_reason": "length"}]}
USED = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


@pytest.mark.parametrize(
    "raw",
    [
        events(A, B, USED, media="Text/Event-Stream; charset=UTF-8"),
        events(A, B, USED, end=b""),
        events(A | {"error": None, "usage": None}, B, USED),
        events(A, B, USED, start=b"\xef\xbb\xbf"),
        events(A, B, USED).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Content-Length", b"X-Was"),
        events(A, B, USED, end=b"").replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Content-Length", b"X-Was"),
        events(A, B, USED).replace(b"Content-Type", b"X-Big: " + b"a" * 100_000 + b"\r\nContent-Type"),
        http((b": ping\nevent: x\n" + split(A, B, USED)), "text/event-stream"),
        http(split(A, B, USED).replace(b"\n", b"\r"), "text/event-stream"),
    ],
)
def test_answers_of_other_servers_are_read(raw: bytes) -> None:
    """Letter case, no [DONE], `"error": null`, a byte order mark, HTTP/1.0, a huge header, lines: two tokens by 9."""
    row, words, _ = asked(raw)
    assert (row[-1], words, row[5], row[6], len(row[7])) == (None, "", 9, 2, 2)


@pytest.mark.parametrize("size", [1, 7])
def test_an_event_of_several_lines_may_arrive_in_any_pieces(size: int) -> None:
    """A piece may end between CR and LF, which are one line's end and not two."""
    protocol = _Protocol()
    protocol.connection_made(asyncio.Transport())
    protocol.reply = reply = HttpReply(asyncio.new_event_loop().create_future())
    raw = http(split(A, B, USED).replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n", "text/event-stream")
    for at in range(0, len(raw), size):
        protocol.data_received(raw[at : at + size])
    assert (reply.error(), len(reply.stamps), reply.usage) == (None, 2, USED["usage"])


def test_an_answer_without_counts_and_done_ends_with_its_finish_reason() -> None:
    """And without that it is not whole."""
    row, _, text = asked(events(A, B, end=b""), keeps_text=True)
    assert (row[-1], text) == (None, " a b")
    row, words, _ = asked(events(A, A, end=b""))
    assert (row[-1], words) == ("server_error", "the stream of events ended without [DONE]")


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        (http(b'{"choices": ['), "invalid", "invalid answer (EOF while parsing"),
        (http(b"[]"), "invalid", "invalid answer: []"),
        (http(b"x").replace(b"Content-Type", b"X-Type"), "invalid", "the answer has no content type, not JSON"),
        (http(b"<html>", "text/html"), "invalid", "the answer is text/html, not JSON"),
        (events(A)[:-40], "connection", "the server closed the connection before the answer's end"),
        (events(A, 5), "invalid", "invalid event: 5"),
        (events(A, {"choices": [None]}), "invalid", 'invalid event: {"choices": [null]}'),
        (events(A, {"error": {"message": "engine died", "code": 500}}), "server_error", "engine died"),
        (events(A, {"error": "engine died"}), "server_error", "engine died"),
        (events(A, {"error": {"message": "engine died"}}), "server_error", "engine died"),
        (events({"error": "engine died", "error_type": "generation"}), "server_error", "engine died"),
        (events({"error": "prompt too long", "error_type": "validation"}), "invalid", "prompt too long"),
        (events({"object": "error", "message": "engine died", "code": 500}), "server_error", "engine died"),
        (http(split(A) + b"data: {\ndata: 5\n\ndata: [DONE]\n\n", "text/event-stream"), "invalid", "invalid event ("),
        (http(split(A) + b"data: {\ndata: [DONE]\n", "text/event-stream"), "invalid", "invalid event (EOF while"),
        (events(A, {"usage": 5}), "invalid", 'invalid event: {"usage": 5}'),
        (events(A, {"usage": {"completion_tokens": "2"}}), "invalid", "invalid event (completion_tokens='2')"),
        (events(A, {"usage": {"completion_tokens": -2}}), "invalid", "invalid event (completion_tokens=-2)"),
        (events(A, {"usage": {"prompt_tokens": 10**30}}), "invalid", "invalid event (prompt_tokens=1000"),
        (events(A, {"usage": {"prompt_tokens_details": 7}}), "invalid", "invalid event: "),
        (http(b"a\x1b[31mred\nline \xff", "text/plain", "400 Bad"), "invalid", "HTTP 400: a [31mred line \ufffd"),
    ],
)
def test_what_is_no_answer_is_said_in_one_true_sentence(raw: bytes, kind: str, words: str) -> None:
    """The client process lives on, and no control character reaches the terminal."""
    row, error, _ = asked(raw)
    assert row[-1] == kind
    assert error.startswith(words)
    assert error.isprintable()


def test_text_that_is_none_is_an_error_only_if_it_must_be_counted() -> None:
    """Some servers send parts of a message as a list."""
    listed = {"choices": [{"delta": {"content": [{"type": "text", "text": "a"}]}}]}
    assert asked(events(listed, USED))[0][-1] is None
    assert asked(events(listed), keeps_text=True)[0][-1] == "invalid"


def test_a_usage_without_the_answers_tokens_leaves_them_to_be_counted() -> None:
    """Taken for a count, it made every answer one of 0 tokens."""
    row, _, text = asked(
        events(A, B, {"choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 11}}), keeps_text=True
    )
    assert (row[-1], text) == (None, " a b")


def test_a_key_that_a_server_repeats_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in full, and not the start of it where the words are cut."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-77")
    for before in (0, 160):  # words are cut after 500 letters
        body = b'{"error": {"message": "' + b"no " * before + b'{authorization}"}}'
        _, words, _ = asked(http(body, status="401 Unauthorized").replace(b"Content-Length", b"X-Was"))
        assert words.endswith("Bearer ***")


def test_a_conversation_is_sent_as_messages_and_its_length_is_exact(tmp_path: Path) -> None:
    """The first turn has 24 tokens, the second these, the answer's 4, and 24 more; the template's tokens count."""
    stub = StubOpenAi(overhead=7, per_message=3)
    level = once(stub, tmp_path, {"turns": 2, "isl": 24, "osl": 4}, api="chat")
    assert {record.isl for record in records(tmp_path)} == {24, 52}
    roles = {tuple(each["role"] for each in body["messages"]) for body in stub.sent[4:]}
    assert roles == {("user",), ("user", "assistant", "user")}
    assert not any("other input tokens" in note for note in level.notes)


def test_a_model_that_may_be_another_is_said(tmp_path: Path) -> None:
    """By its name, and by the input tokens of the load."""
    with serving(StubOpenAi(models=("other",))) as url:
        result = measure(url, tmp_path, concurrency=2)
    assert "that it is stub is unknown: its counts of input tokens fit" in result.server["model_check"]
    level = once(StubOpenAi(per_word=1), tmp_path)
    assert any("other input tokens than the tokenizer of model=" in note for note in level.notes)


def sessions(file: Path, seed: int) -> dict[int, tuple[str, float]]:
    """Write a trace of sessions whose turns have delays; return, by its input tokens, when each turn is sent, ms."""
    random, when = Random(seed), dict[int, tuple[str, float]]()
    lines = []
    for session in range(6):
        for turn in range(random.randint(1, 4)):
            isl = 10 + len(when)
            key, ms = ("delay", random.choice([0, 5, 30.5])) if turn else ("timestamp", 20 * random.randint(0, 10))
            when[isl] = key, ms
            lines.append({"session_id": session, key: ms, "input_length": isl, "output_length": 3})
    file.write_text("\n".join(map(json.dumps, lines)))
    return when


@pytest.mark.parametrize(("seed", "processes", "http"), [(1, 1, True), (2, 2, True), (3, 1, False)])
def test_a_turn_is_sent_a_delay_after_the_answer_before(tmp_path: Path, seed: int, processes: int, http: bool) -> None:
    """Its latency counts from there, and other sessions do not wait for it."""
    when = sessions(tmp_path / "trace", seed)
    how = {"processes": processes, "warmup_s": 0}
    with serving(StubOpenAi(ttft_s=0.01)) if http else running("--ttft-ms", "10") as server:
        url = server if isinstance(server, str) else server.url
        (level,) = measure(url, tmp_path, {"trace": tmp_path / "trace"}, **how).levels
    sent = records(tmp_path)
    assert sorted(record.isl for record in sent) == sorted(when)
    assert not level.summary.errors
    ends = {record.isl: record.end_ns for record in sent}
    first = min(ms for key, ms in when.values() if key == "timestamp")
    for record in sent:
        key, ms = when[record.isl]
        begin = ends[record.isl - 1] if key == "delay" else -round(first * 1e6)
        assert record.intended_ns == begin + round(ms * 1e6)
        assert record.sent_ns >= record.intended_ns
    assert any("are turns with a delay" in note for note in level.notes)


def test_a_failed_turn_ends_its_session_and_the_rest_are_counted(tmp_path: Path) -> None:
    """They have no answer to wait for."""
    when = sessions(tmp_path / "trace", 1)
    with serving(StubOpenAi(fault="gone", faults_after=4)) as url:
        (level,) = measure(url, tmp_path, {"trace": tmp_path / "trace"}, warmup_s=0).levels
    sent, failed = records(tmp_path), sum(level.summary.errors.values())
    assert 0 < failed < len(sent) < len(when)
    assert any(f"{len(when) - len(sent)} later turns of their sessions were not sent" in note for note in level.notes)


@pytest.mark.parametrize(("how", "sent"), [({"duration_s": "auto"}, 3), ({"duration_s": 0.3, "min_requests": 1}, 2)])
def test_a_trace_is_sent_to_its_end_unless_a_window_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], sent: int
) -> None:
    """However long it is; what a given window cuts off is said."""
    monkeypatch.setattr("pipelines.loadgen.config.AUTO_SECONDS", (0.1, 0.2))
    monkeypatch.setattr("pipelines.loadgen.config.AUTO_REQUESTS", 1)
    (tmp_path / "trace").write_text("time,isl,osl\n0,9,3\n0.1,9,3\n0.8,9,3\n")
    with serving(StubOpenAi()) as url:
        result = measure(url, tmp_path, {"trace": tmp_path / "trace"}, warmup_s=0, **{"min_requests": 1} | how)
    assert len(records(tmp_path)) == sent
    said = "1 of the trace's 3 requests were not sent, because its window had ended" in str(result.levels[0].notes)
    assert said == (sent == 2)
    assert result.protocol["duration_s"] == (None if sent == 3 else 0.3)
