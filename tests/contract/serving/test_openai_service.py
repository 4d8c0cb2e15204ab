"""The official client against our OpenAI-compatible service in front of a real tritonserver."""

import http.client
import json
import multiprocessing
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

openai = pytest.importorskip("openai")

from pipelines.serving.frontend import OpenAiFrontend  # noqa: E402 - after the skip
from pipelines.serving.openai.bodies import REFUSAL_PAUSE_S  # noqa: E402
from pipelines.serving.process import TritonServer  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402


@pytest.fixture(scope="module")
def client(frontend: OpenAiFrontend, echo_server: TritonServer) -> Iterator[object]:
    with openai.OpenAI(base_url=echo_server.openai_url, api_key="none", max_retries=0, timeout=20) as found:
        yield found


def complete(client, prompt, **given):
    return client.completions.create(model="echo", prompt=prompt, temperature=0, **given)


def chat(client, content, **given):
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="echo", messages=messages, temperature=0, **given)


def test_a_completion_has_text_usage_and_a_reason(client) -> None:
    """Four of the words again, because four tokens were asked for."""
    answer = complete(client, "a b c", max_tokens=4)
    assert answer.choices[0].text == " a b c a"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 4, 8)
    assert answer.model == "echo"
    assert answer.object == "text_completion"


@pytest.mark.parametrize("body", [b'{"model": 1}', b" " * 5_000_000], ids=["bad request", "too long a body"])
def test_a_refusal_waits_so_that_a_loop_of_bad_requests_leaves_time_for_others(
    frontend: OpenAiFrontend, echo_server: TritonServer, body: bytes
) -> None:
    connection = http.client.HTTPConnection(urlsplit(echo_server.openai_url).netloc, timeout=20)
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert 400 <= connection.getresponse().status < 500
    assert time.perf_counter() - begun >= REFUSAL_PAUSE_S


def test_sixteen_tokens_are_the_default(client) -> None:
    assert complete(client, "a").usage.completion_tokens == 16


def test_a_text_that_ends_by_itself_has_stopped(client) -> None:
    assert complete(client, "a b end", max_tokens=9).choices[0].finish_reason == "stop"


def test_an_answer_ends_before_its_stop_string(client) -> None:
    """Also one that is no token of the model: "b c" are two."""
    answer = complete(client, "a b c d", max_tokens=9, stop=["b c", "nothing"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" a ", "stop")


def test_echo_puts_the_prompt_in_front(client) -> None:
    assert complete(client, "a b", max_tokens=1, echo=True).choices[0].text == "a b a"
    streamed = complete(client, "a b", max_tokens=1, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "a b a"


def test_prompts_and_choices_are_numbered(client) -> None:
    """Two prompts, two answers each; another answer draws from another seed; a prompt counts once."""
    answer = client.completions.create(model="echo", prompt=["a b", "c d"], n=2, max_tokens=1, seed=0)
    assert [choice.text for choice in answer.choices] == [" a", " b", " c", " d"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 4)


def test_a_streamed_completion_is_the_same_text(client) -> None:
    """One chunk per token, the reason in the last, usage when asked for."""
    options = {"include_usage": True}
    chunks = list(complete(client, "a b c", max_tokens=4, stream=True, stream_options=options))
    assert [chunk.choices[0].text for chunk in chunks[:-2]] == [" a", " b", " c", " a"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 4)


def test_a_streamed_stop_string_never_shows(client) -> None:
    chunks = list(complete(client, "a b c d", max_tokens=9, stream=True, stop="b c"))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " a "
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_goes_through_the_models_template(client) -> None:
    """`user : hi assistant :` are five words; <bos> is put in front by the tokenizer, once."""
    answer = chat(client, "hi", max_completion_tokens=6)
    assert answer.choices[0].message.content == " user : hi assistant : user"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == 6


def test_chat_may_use_all_the_room(client) -> None:
    """64 tokens in all; with <bos> the prompt takes 6."""
    answer = chat(client, "hi")
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (58, "length")


def test_a_streamed_chat_begins_with_the_role(client) -> None:
    chunks = list(chat(client, [{"type": "text", "text": "hi"}], max_tokens=2, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " user :"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[0].object == "chat.completion.chunk"


def test_the_template_may_refuse(client) -> None:
    with pytest.raises(openai.BadRequestError, match="the last message is not the user's"):
        client.chat.completions.create(model="echo", messages=[{"role": "assistant", "content": "x"}])


def test_models_are_listed(client) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").object == "model"


def test_another_model_is_not_found(client) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4o' does not exist") as caught:
        client.completions.create(model="gpt-4o", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"logprobs": 21}, "'logprobs' = 21 is not supported here. 0 to 20 are"),
        ({"best_of": 3}, "'best_of' = 3 is not supported"),
        ({"logit_bias": {"5000": 1}}, "'logit_bias' names token 5000; the vocabulary has"),
        ({"logit_bias": {"": 1}}, "'logit_bias' has the key '', which is no token id"),
        ({"logit_bias": {"b": 1}}, "'logit_bias' has the key 'b', which is no token id"),
        ({"extra_body": {"nonsense": 1}}, "Unknown parameter: 'nonsense'"),
        ({"extra_body": {"nonsense": None}}, "Unknown parameter: 'nonsense'"),
        ({"extra_body": {"nonsense": []}}, "Unknown parameter: 'nonsense'"),
        ({"extra_body": {"min_p": 0.1}}, "'min_p' = 0.1 is not supported here. TensorRT-LLM's Triton backend has no"),
        ({"extra_body": {"use_beam_search": True}}, "'use_beam_search' = True is not supported"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "'response_format'.*guided=llguidance adds it"),
        ({"extra_body": {"truncate_prompt_tokens": 1}}, "'truncate_prompt_tokens' = 1 leaves nothing"),
        ({"max_tokens": 0}, "'max_tokens' = 0 needs echo and logprobs"),
        ({"top_p": 7}, "top_p: Input should be less than or equal to 1"),
        ({"stop": ["a"] * 33}, "'stop' takes up to 32 strings"),
        ({"stream_options": {"include_usage": True}}, "'stream_options' requires stream=true"),
    ],
)
def test_what_cannot_be_honoured_is_refused(client, given, said) -> None:
    """Never silently."""
    with pytest.raises(openai.BadRequestError, match=said):
        complete(client, "a", **given)


def test_prompts_may_be_tokens(client) -> None:
    """Word 3 is "a", 4 is "b"; nothing is added to tokens."""
    answer = complete(client, [3, 4], max_tokens=3)
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == (" a b a", 2)
    both = complete(client, [[3], [4, 5]], max_tokens=1, echo=True)
    assert [choice.text for choice in both.choices] == ["a a", "b c b"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("word", "kind", "code"),
    [("full", "RateLimitError", "rate_limit_exceeded"), ("long", "BadRequestError", "context_length_exceeded")],
)
def test_errors_of_the_server_behind_keep_their_meaning(client, word, kind, code, stream) -> None:
    """Before the first token they are HTTP statuses, streamed or not."""
    with pytest.raises(getattr(openai, kind), match="maximum") as caught:
        complete(client, word, stream=stream)
    assert caught.value.code == code


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(client, echo_server, stream) -> None:
    """200 words of 100 ms each end within two seconds."""
    seen = echo_server.repository.path / "seen.txt"
    seen.unlink(missing_ok=True)
    connection = http.client.HTTPConnection(echo_server.host, echo_server.ports["openai_port"])
    body = {"model": "echo", "prompt": "sleep", "max_tokens": 200, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert not eventually(seen.exists, 0.3)
    connection.close()
    assert eventually(seen.exists)


def test_answers_that_are_cut_short_leave_the_server_running(client, echo_server) -> None:
    """Each stops while the engine's last responses are under way; cancelling their streams ended the server."""

    def several(_: int) -> None:
        for number in range(60):
            complete(client, "a b c", max_tokens=9, extra_body={"stop_token_ids": [4]})
            with complete(client, "a b c", max_tokens=9, stream=True) as chunks:
                for at, _ in enumerate(chunks):
                    if at == number % 9:
                        break

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(several, range(6))) == [None] * 6
    assert echo_server.poll() is None


def post(server: TritonServer, path: str, body: bytes) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(server.host, server.ports["openai_port"], timeout=10)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_broken_bodies_and_places_answer_in_openais_form(frontend, echo_server) -> None:
    """No stack trace, no other framework's words."""
    status, body = post(echo_server, "/v1/completions", b'{"model": ')
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    status, body = post(echo_server, "/v1/embeddings", b"{}")
    assert status == 404
    known = r"POST /v1/embeddings is not answered\. This service answers POST /v1/completions, /v1/chat/completions, "
    assert re.match(known, body["error"]["message"])


def test_health_and_metrics_are_passed_on(frontend, echo_server) -> None:
    connection = http.client.HTTPConnection(echo_server.host, echo_server.ports["openai_port"], timeout=10)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"")
    connection.request("GET", "/metrics")
    assert b"nv_inference_request_success" in connection.getresponse().read()


def test_without_a_server_behind_the_answer_is_unavailable(echo_repository: Path) -> None:
    """The service answers 503, in OpenAI's form."""
    from fastapi.testclient import TestClient

    from pipelines.serving.openai.app import make_app
    from pipelines.serving.openai.backend import Backend
    from pipelines.serving.openai.bodies import Limits
    from pipelines.serving.openai.prepare import served
    from pipelines.serving.repository import read_repository

    load = partial(served, read_repository(echo_repository), "http://127.0.0.1:1/metrics")
    app = make_app(load, Backend("127.0.0.1:1"), Limits())
    others = set(multiprocessing.active_children())  # of tests that ran in this process before
    with TestClient(app) as http_client:
        answer = http_client.post("/v1/completions", json={"model": "echo", "prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert http_client.get("/health").status_code == 503
        assert "trtllm_backend_up 0.0" in http_client.get("/metrics").text
        counted = 'trtllm_request_error_total{model_name="echo",reason="unavailable",status="503"} 1.0'
        assert counted in http_client.get("/metrics").text
        (reader,) = set(multiprocessing.active_children()) - others
    reader.join(30)
    assert reader.exitcode == -signal.SIGKILL, "a request that is being read does not delay the end of the service"
