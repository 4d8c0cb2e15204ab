"""The client of an OpenAI-compatible server: retries, order, what is kept, and what is refused."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval.answer_cache import AnswerLog
from eval.server import OpenAiServer, TritonGrpc
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.engines.port import SamplingParams

GREEDY = SamplingParams(max_new_tokens=4)
Reply = Callable[[dict[str, Any], int], "tuple[int, dict[str, str], Any]"]


class Stand:
    """A server whose replies a test decides: (request, number of the request) -> status, headers, body."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        self.models = ["m"]
        self.together = self.most_together = 0
        lock = threading.Lock()
        stand = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    stand.requests.append(body)
                    number = len(stand.requests)
                    stand.together += 1
                    stand.most_together = max(stand.most_together, stand.together)
                status, headers, content = stand.reply(body, number)
                with lock:
                    stand.together -= 1
                if status == 0:  # the server dies
                    self.close_connection = True
                    return
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(raw))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self) -> None:
                raw = json.dumps({"data": [{"id": name} for name in stand.models]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_words: object) -> None:
                """Stay silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def stand() -> Iterator[Callable[[Reply], Stand]]:
    made: list[Stand] = []

    def make(reply: Reply) -> Stand:
        made.append(Stand(reply))
        return made[-1]

    yield make
    for each in made:
        each.close()


def client(stand: Stand, folder: Path, **settings: Any) -> tuple[OpenAiServer, list[float]]:
    """A client that does not wait, and the seconds that it would have waited."""
    waits: list[float] = []
    return OpenAiServer(stand.url, "m", AnswerLog(folder / "answers.jsonl"), sleep=waits.append, **settings), waits


def echo(request: dict[str, Any], _number: int) -> tuple[int, dict[str, str], Any]:
    return 200, {}, {"choices": [{"text": f"<{request['prompt']}>"}]}


def scored(request: dict[str, Any], _number: int) -> tuple[int, dict[str, str], Any]:
    """Token t has the log probability -t; token 9 is never the best one."""
    scores = [None, *(-float(token) for token in request["prompt"][1:]), -0.5]
    best = [None, *({"x": -0.1 if token == 9 else -float(token)} for token in request["prompt"][1:]), {"x": -0.5}]
    return 200, {}, {"choices": [{"text": "", "logprobs": {"token_logprobs": scores, "top_logprobs": best}}]}


def test_answers_come_in_the_order_of_the_prompts(stand, tmp_path) -> None:
    server, _ = client(stand(echo), tmp_path, concurrency=4)
    prompts = [f"p{n}" for n in range(20)]
    assert server.write(prompts, GREEDY, ["\n"], SilentProgress()) == [f"<{prompt}>" for prompt in prompts]


def test_a_request_says_all_that_decides_the_answer(stand, tmp_path) -> None:
    """Greedy, with the first four stop strings, which are all that the interface takes."""
    made = stand(echo)
    client(made, tmp_path)[0].write(["p"], GREEDY, ["a", "", "b", "c", "d", "e"], SilentProgress())
    assert made.requests == [
        {"model": "m", "prompt": "p", "max_tokens": 4, "temperature": 0.0, "stop": ["a", "b", "c", "d"]}
    ]


def test_prompts_as_token_ids_are_sent_as_they_are(stand, tmp_path) -> None:
    """A rendered chat has BOS already, and a server would add it to text once more."""
    made = stand(echo)
    client(made, tmp_path)[0].write([[2, 5, 9]], GREEDY, ["\n"], SilentProgress())
    assert made.requests[0]["prompt"] == [2, 5, 9]


def test_triton_models_for_text_take_no_token_ids(tmp_path) -> None:
    server = TritonGrpc("grpc://h:1", "ensemble", AnswerLog(tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match=r"needs prompts as token ids where answers are written.*grpc://h:1"):
        server.write([[2, 5]], GREEDY, [], SilentProgress())


def test_scores_are_those_of_the_continuation(stand, tmp_path) -> None:
    made = stand(scored)
    found = client(made, tmp_path)[0].loglikelihood([([1, 2], [3, 4]), ([1], [9])], SilentProgress())
    assert found == [(-7.0, True), (-9.0, False)]
    assert made.requests[0].keys() == {"model", "prompt", "max_tokens", "temperature", "logprobs", "echo"}


def test_requests_have_the_form_of_lm_evals_own_client(stand, tmp_path) -> None:
    """Its payload is ours but for a seed, and it reads the same numbers from the same response."""
    api = pytest.importorskip("lm_eval.models.openai_completions").LocalCompletionsAPI
    made = stand(scored)
    ours = client(made, tmp_path)[0].loglikelihood([([1, 2], [3, 4])], SilentProgress())
    theirs = api._create_payload(type("Named", (), {"model": "m"}), [1, 2, 3, 4], generate=False)
    assert {**made.requests[0], "seed": theirs["seed"]} == theirs
    reply = scored(made.requests[0], 1)[2]
    reply["choices"][0]["index"] = 0
    assert api.parse_logprobs(reply, ctxlens=[2]) == ours


def test_no_more_requests_at_a_time_than_asked(stand, tmp_path) -> None:
    together = threading.Barrier(2, timeout=20)

    def reply(request: dict[str, Any], number: int) -> Any:
        together.wait()  # the second request is there before the first is answered
        return echo(request, number)

    made = stand(reply)
    client(made, tmp_path, concurrency=2)[0].write([f"p{n}" for n in range(6)], GREEDY, [], SilentProgress())
    assert made.most_together == 2


def test_a_server_that_limits_its_rate_is_asked_again_when_it_says(stand, tmp_path) -> None:
    def reply(request: dict[str, Any], number: int) -> Any:
        return (429, {"Retry-After": "7"}, {"error": {"message": "slow down"}}) if number < 3 else echo(request, number)

    server, waits = client(stand(reply), tmp_path)
    assert server.write(["p"], GREEDY, [], SilentProgress()) == ["<p>"]
    assert waits == [7.0, 7.0]


def test_a_connection_that_is_closed_during_the_wait_costs_no_attempt(stand, tmp_path, monkeypatch) -> None:
    """Uvicorn closes idle ones after 5 s; then the reason shown would be a broken pipe."""
    made = stand(lambda request, number: (503, {}, b"busy") if number == 1 else echo(request, number))
    closed, close = threading.Event(), made._server.shutdown_request
    monkeypatch.setattr(made._server.RequestHandlerClass, "timeout", 0.05)
    monkeypatch.setattr(made._server, "shutdown_request", lambda request: (close(request), closed.set()))
    server, _ = client(made, tmp_path, attempts=2)
    server.sleep = lambda _: closed.wait(30)
    assert server.write(["p"], GREEDY, [], SilentProgress()) == ["<p>"]


def test_a_connection_that_the_server_closed_between_requests_costs_no_attempt(stand, tmp_path, monkeypatch) -> None:
    """A diagnosis asks Triton for longer than the service in front of it keeps an idle connection."""
    made = stand(echo)
    closed, close = threading.Event(), made._server.shutdown_request
    monkeypatch.setattr(made._server.RequestHandlerClass, "timeout", 0.05)
    monkeypatch.setattr(made._server, "shutdown_request", lambda request: (close(request), closed.set()))
    server, _ = client(made, tmp_path, attempts=1)
    server.choose_model()
    assert closed.wait(30)
    assert server.send("POST", "/completions", {"prompt": "p"})["choices"] == [{"text": "<p>"}]


def test_waits_grow_where_the_server_says_nothing(stand, tmp_path) -> None:
    def reply(request: dict[str, Any], number: int) -> Any:
        return (503, {}, b"busy") if number < 5 else echo(request, number)

    server, waits = client(stand(reply), tmp_path)
    server.write(["p"], GREEDY, [], SilentProgress())
    assert all(low <= wait <= 2 * low for wait, low in zip(waits, (0.25, 0.5, 1, 2), strict=True))


def test_a_server_that_dies_loses_nothing(stand, tmp_path) -> None:
    """What was answered is kept; the next run asks the rest only, and its answers are in order."""
    dead = False

    def reply(request: dict[str, Any], number: int) -> Any:
        return (0, {}, b"") if number > 5 or dead else echo(request, number)

    made, prompts = stand(reply), [f"p{n}" for n in range(9)]
    server, _ = client(made, tmp_path, concurrency=1, attempts=2)
    with pytest.raises(UserError, match=r"did not answer in 2 attempts.*5 of 9 answers are kept in .*answers\.jsonl"):
        server.write(prompts, GREEDY, [], SilentProgress())
    made.reply, made.requests = echo, []
    again, _ = client(made, tmp_path)
    assert again.write(prompts, GREEDY, [], SilentProgress()) == [f"<{prompt}>" for prompt in prompts]
    assert sorted(request["prompt"] for request in made.requests) == prompts[5:]


def test_a_line_that_a_killed_run_left_unfinished_is_asked_again(stand, tmp_path) -> None:
    made = stand(echo)
    client(made, tmp_path)[0].write(["a", "b"], GREEDY, [], SilentProgress())
    file = tmp_path / "answers.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    for _ in range(2):
        assert client(made, tmp_path)[0].write(["a", "b"], GREEDY, [], SilentProgress()) == ["<a>", "<b>"]
    assert len(made.requests) == 3


def test_other_settings_are_another_question(stand, tmp_path) -> None:
    made = stand(echo)
    for limits in (GREEDY, SamplingParams(max_new_tokens=5)):
        client(made, tmp_path)[0].write(["a"], limits, [], SilentProgress())
    assert len(made.requests) == 2


def test_a_page_is_no_answer_of_a_dead_server(stand, tmp_path) -> None:
    """A cut response is asked for again; in the end the address is doubted, not whether the server runs."""
    server, _ = client(stand(lambda *_: (200, {}, b"<html>")), tmp_path, attempts=2)
    with pytest.raises(UserError, match=r"in JSON in 2 attempts: HTTP status 200, <html>\..*Check eval\.url and give"):
        server.write(["p"], GREEDY, [], SilentProgress())


@pytest.mark.parametrize(
    "body", [{"error": {"message": "no such adapter"}}, {"object": "error", "message": "no such adapter", "code": 400}]
)
def test_an_error_with_status_200_is_shown_at_once(stand, tmp_path, body) -> None:
    made = stand(lambda *_: (200, {}, body))
    with pytest.raises(UserError, match=r"refused a request with HTTP status 200: no such adapter\."):
        client(made, tmp_path)[0].write(["p"], GREEDY, [], SilentProgress())


def test_a_refusal_is_shown_at_once(stand, tmp_path) -> None:
    """Sending the same again would not help."""
    made = stand(lambda *_: (404, {}, {"error": {"message": "The model 'm' does not exist."}}))
    server, waits = client(made, tmp_path)
    with pytest.raises(UserError, match=r"HTTP status 404: The model 'm' does not exist\. Check eval\.url"):
        server.write(["p"], GREEDY, [], SilentProgress())
    assert (len(made.requests), waits) == (1, [])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "TypeError"),
        ({"token_logprobs": [None, -1.0], "top_logprobs": [None, {"x": -1.0}]}, "2 log probabilities for 3 tokens"),
        ({"token_logprobs": [None, -1.0, None], "top_logprobs": [None, {"x": -1.0}, {"x": -1.0}]}, "TypeError"),
    ],
)
def test_a_server_without_log_probabilities_is_refused(stand, tmp_path, found, said) -> None:
    """With the tasks that it can be asked."""
    made = stand(lambda *_: (200, {}, {"choices": [{"text": "", "logprobs": found}]}))
    with pytest.raises(UserError, match=rf"no log probabilities of the prompt.*{said}.*eval=gsm8k"):
        client(made, tmp_path)[0].loglikelihood([([1, 2], [3])], SilentProgress())


def test_no_server_at_the_url(tmp_path) -> None:
    server = OpenAiServer("http://127.0.0.1:9/v1", "m", AnswerLog(tmp_path / "a"), attempts=1)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/v1 did not answer in 1 attempt: .*refused"):
        server.choose_model()


@pytest.mark.parametrize(
    ("wanted", "names", "said"),
    [
        ("gemma-2", ["gemma", "llama"], r"has no model 'gemma-2'.*gemma, llama.*Did you mean 'gemma'"),
        ("", ["gemma", "llama"], "has 2 models and none is named"),
    ],
)
def test_the_model_must_be_there(stand, tmp_path, wanted, names, said) -> None:
    made = stand(echo)
    made.models = names
    with pytest.raises(UserError, match=said):
        OpenAiServer(made.url, wanted, AnswerLog(tmp_path / "a")).choose_model()


def test_the_only_model_needs_no_name(stand, tmp_path) -> None:
    server = OpenAiServer(stand(echo).url, "", AnswerLog(tmp_path / "a"))
    server.choose_model()
    assert server.model == "m"


def likely(request: dict[str, Any], _number: int) -> tuple[int, dict[str, str], Any]:
    """Tokens 7, 8 and 9 have 0.5, 0.3 and 0.1; a token of the text that is not among them comes as one more, first."""
    best = {f"token_id:{token}": math.log(p) for token, p in ((8, 0.3), (7, 0.5), (9, 0.1))}
    tops, own = [None], [None]
    for token in [*request["prompt"][1:], 7]:
        name = f"token_id:{token}"
        tops.append({name: best.get(name, -5.0)} | best)
        own.append(best.get(name, -5.0))
    found = {"tokens": [], "token_logprobs": own, "top_logprobs": tops}
    return 200, {}, {"choices": [{"text": "", "logprobs": found}]}


def test_the_likeliest_tokens_of_a_text_by_id(stand, tmp_path) -> None:
    """The likeliest first, without the token of the text where it is not among them; and it is asked once."""
    made = stand(likely)
    for _ in range(2):
        found = client(made, tmp_path)[0].top_logprobs([(2, 5, 8)], 3, SilentProgress())
    assert found == [
        {
            "ids": [[7, 8, 9], [7, 8, 9]],
            "logprobs": [[math.log(0.5), math.log(0.3), math.log(0.1)]] * 2,
            "own": [-5.0, math.log(0.3)],
        }
    ]
    (request,) = made.requests
    assert (request["logprobs"], request["echo"], request["return_tokens_as_token_ids"]) == (3, True, True)


def without_top(reply: dict[str, Any]) -> None:
    reply["choices"][0]["logprobs"]["top_logprobs"] = None


def without_log_probabilities(reply: dict[str, Any]) -> None:
    reply["choices"][0]["logprobs"] = None


def without_the_prompt(reply: dict[str, Any]) -> None:
    reply["choices"][0]["logprobs"] = {"token_logprobs": [-1.0], "top_logprobs": [{"token_id:1": -1.0}]}


def as_text(reply: dict[str, Any]) -> None:
    reply["choices"][0]["logprobs"]["top_logprobs"][1] = {" the": -0.1, "a": -3.0, "b": -4.0}


def as_nan(reply: dict[str, Any]) -> None:
    reply["choices"][0]["logprobs"]["token_logprobs"][1] = float("nan")


def as_probabilities(reply: dict[str, Any]) -> None:
    reply["choices"][0]["logprobs"]["token_logprobs"][1] = 0.25


def rounded(reply: dict[str, Any]) -> None:
    reply["choices"][0]["logprobs"]["token_logprobs"][1] = 1e-6


@pytest.mark.parametrize(
    ("change", "top", "said"),
    [
        (without_top, 3, "no log probabilities of the likeliest tokens .* TypeError"),
        (without_log_probabilities, 3, "no log probabilities of the likeliest tokens .*: TypeError"),
        (without_the_prompt, 3, "1 log probabilities for 3 tokens"),
        (as_text, 3, "' the' is not of the form token_id:5"),
        (as_nan, 3, "The server returned nan as a log probability"),
        (as_probabilities, 3, r"The server returned 0\.25 as a log probability\. It must be .* at most 0"),
        (lambda _: None, 5, "returned 3 log probabilities of 5 at a position"),
    ],
)
def test_a_server_without_the_likeliest_tokens_is_refused(stand, tmp_path, change, top, said) -> None:
    def reply(request: dict[str, Any], number: int) -> Any:
        status, headers, body = likely(request, number)
        change(body)
        return status, headers, body

    with pytest.raises(UserError, match=said):
        client(stand(reply), tmp_path)[0].top_logprobs([(2, 7, 8)], top, SilentProgress())


@pytest.mark.parametrize(
    ("change", "said"),
    [(as_nan, "returned nan as"), (as_probabilities, r"returned 0\.25 as a log probability\. It must be .* at most 0")],
)
def test_numbers_that_are_no_log_probabilities_are_not_scored(stand, tmp_path, change, said) -> None:
    """Above 0 are probabilities, logits or negated values; above it by rounding is 0."""

    def reply(request: dict[str, Any], number: int, change: Any = change) -> Any:
        status, headers, body = scored(request, number)
        change(body)
        return status, headers, body

    with pytest.raises(UserError, match=said):
        client(stand(reply), tmp_path)[0].loglikelihood([((2,), (7, 8))], SilentProgress())
    made = stand(lambda request, number: reply(request, number, rounded))
    ((score, _),) = client(made, tmp_path)[0].loglikelihood([((2,), (7, 8))], SilentProgress())
    assert score == pytest.approx(-8, abs=1e-5)


def test_a_refusal_of_so_many_log_probabilities_says_what_to_change(stand, tmp_path) -> None:
    made = stand(lambda *_: (400, {}, {"error": {"message": "Requested prompt logprobs of 50, greater than 20"}}))
    with pytest.raises(UserError, match=r"greater than 20\.") as caught:
        client(made, tmp_path)[0].top_logprobs([(2, 7, 8)], 50, SilentProgress())
    assert "fidelity.top_logprobs" in str(caught.value.faults[0].todo)
