"""Evaluate over an OpenAI-compatible server: log probabilities of answers, or the answers."""

import asyncio
import http.client
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eval.answer_cache import AnswerLog
from eval.spec import written_chats_fault
from pipelines.document.show import count
from pipelines.domain.errors import UserError, did_you_mean, stated_reason
from pipelines.domain.progress import Progress
from pipelines.engines.port import SamplingParams, TokenIds
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.inputs import text_inputs
from pipelines.serving.openai.scoring import PromptScorer

if TYPE_CHECKING:
    from pipelines.serving.openai.backend import Backend


# Read the replies of an OpenAI-compatible server: log probabilities and texts.

Json = dict[str, Any]

SCORING_TODO = (
    "Scoring needs /v1/completions with prompts as token ids, echo and logprobs; a server without them can be asked"
    " tasks whose answers are written, e.g. eval=mini_answers or eval=gsm8k."
)


TOP_TODO = (
    "Fidelity needs /v1/completions with prompts as token ids, echo, logprobs and return_tokens_as_token_ids, as vLLM"
    " and this project's service have them. Ask for no more than the server gives (fidelity.top_logprobs), in windows"
    " that it takes (fidelity.window)."
)


@contextmanager
def _lacking(what: str, todo: str = "") -> Iterator[None]:
    """Turn what fails while a response is read into the message that it lacks something."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"The server's response has no {what}: {type(error).__name__}: {error}.", todo=todo) from None


def _echoed(reply: Json, length: int) -> tuple[list[Any], list[Any]]:
    """Return the log probabilities of an echoed prompt, and those of the likeliest tokens at its positions."""
    logprobs = reply["choices"][0]["logprobs"]
    scores, places = logprobs["token_logprobs"], logprobs["top_logprobs"]
    if not length <= len(scores) <= length + 1:  # the last one is of the new token
        raise ValueError(f"{len(scores)} log probabilities for {length} tokens")
    return scores, places


def _read_top_logprobs(reply: Json, length: int, top: int) -> Json:
    """Read the likeliest tokens of an echoed prompt of so many tokens; see `OpenAiServer.top_logprobs`."""
    with _lacking("log probabilities of the likeliest tokens of the prompt, by token id", TOP_TODO):
        scores, places = _echoed(reply, length)
        if len(places) != len(scores):
            raise ValueError(f"{len(places)} positions for {len(scores)} log probabilities")
        own = [float(score) for score in scores[1:length]]
        best = [sorted(place.items(), key=lambda pair: -float(pair[1]))[:top] for place in places[1:length]]
        ids = [[_token_id(name) for name, _ in place] for place in best]
        logprobs = [[float(score) for _, score in place] for place in best]
    if (fewest := min(map(len, ids), default=top)) < top:
        raise UserError(f"The server returned {fewest} log probabilities of {top} at a position.", todo=TOP_TODO)
    _check_log_probabilities(chain(own, *logprobs))
    return {"ids": ids, "logprobs": logprobs, "own": own}


def _token_id(name: str) -> int:
    start, _, number = name.partition(":")
    if start != "token_id" or not number.isdigit():
        raise ValueError(f"'{name[:40]}' is not of the form token_id:5")
    return int(number)


def _read_score(reply: Json, context: int, length: int) -> tuple[float, bool]:
    """Read the log probability of a continuation from an echoed prompt, as lm-eval's `local-completions` does."""
    with _lacking("log probabilities of the prompt", SCORING_TODO):
        scores, places = _echoed(reply, length)
        own = [float(score) for score in scores[context:length]]
        greedy = all(score == max(top.values()) for score, top in zip(own, places[context:length], strict=True))
    _check_log_probabilities(own)
    return sum(own), greedy


ROUNDING = 1e-3
"""How far above 0 rounding may take a log probability."""


def _check_log_probabilities(scores: Iterable[float]) -> None:
    for score in scores:
        if not math.isfinite(score):
            todo = "A model whose logits overflow gives such numbers: make diagnose eval.url=... finds the stage."
        elif score > ROUNDING:
            todo = "The server returns probabilities, logits or negated values instead; it cannot be scored."
        else:
            continue
        raise UserError(
            f"The server returned {score} as a log probability.",
            allowed="It must be a finite number of at most 0.",
            todo=todo,
        )


def _read_text(reply: Json) -> str:
    with _lacking("text"):
        return str(reply["choices"][0]["text"] or "")


FOR_THE_MOMENT = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which a request is retried."""
NO_JSON = "HTTP status 200"
"""How the reason begins where a response is no JSON object: a web page, or one that was cut."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
MOST_STOPS = 4
"""Stop strings that OpenAI's interface takes; answers are cut at all of them here as well."""


class ForTheMoment(Exception):  # noqa: N818 - caught here, and the request is sent again
    """A request that was not answered this time.

    Attributes:
        wait_s: how long the server asks to wait; None if it does not say.
    """

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass
class OpenAiServer:
    """A model behind `/v1/completions`.

    Requests have the form of lm-eval's `local-completions`. They are retried while the server is overloaded or
    unreachable, and each answer is stored as soon as it arrives.
    """

    url: str
    model: str
    answers: AnswerLog
    concurrency: int = 8
    attempts: int = 6
    timeout_s: float = 300
    sleep: Callable[[float], object] = time.sleep
    _local: threading.local = field(default_factory=threading.local)

    def loglikelihood(self, pairs: Sequence[tuple[TokenIds, TokenIds]], progress: Progress) -> list[tuple[float, bool]]:
        """Score continuations; see `ScoringSession`. The server scores the whole prompt and echoes it."""
        requests = [
            {
                "model": self.model, "prompt": [*context, *continuation], "max_tokens": 1, "temperature": 0,
                "logprobs": 1, "echo": True,
            }
            for context, continuation in pairs
        ]  # fmt: skip
        read = [
            partial(_read_score, context=len(context), length=len(context) + len(continuation))
            for context, continuation in pairs
        ]
        return [(float(score), bool(greedy)) for score, greedy in self._ask(requests, read, "scoring", progress)]

    def top_logprobs(self, rows: Sequence[TokenIds], top: int, progress: Progress) -> list[Json]:
        """Return the server's log probabilities of every token but the first.

        Args:
            rows: token ids of each text, T of them.
            top: likeliest tokens whose log probabilities are asked for at each position.
            progress: counts texts.

        Returns:
            per text, "ids" and "logprobs" [T - 1][top] of the likeliest tokens, and "own" [T - 1] of the text's tokens.

        Raises:
            UserError: the server does not answer, or does not return these log probabilities.
        """
        requests = [
            {
                "model": self.model, "prompt": list(row), "max_tokens": 1, "temperature": 0, "logprobs": top,
                "echo": True, "return_tokens_as_token_ids": True,
            }
            for row in rows
        ]  # fmt: skip
        read = [partial(_read_top_logprobs, length=len(row), top=top) for row in rows]
        return list(self._ask(requests, read, "asking the server", progress))

    def write(
        self, prompts: Sequence[str | TokenIds], limits: SamplingParams, stop: Sequence[str], progress: Progress
    ) -> list[str]:
        """Generate for every prompt; see `TextSession`."""
        settings: Json = {"max_tokens": limits.max_new_tokens, "temperature": limits.temperature}
        if limits.temperature > 0:
            settings |= {"top_p": limits.top_p, "seed": limits.seed}
        if stops := [text for text in stop if text][:MOST_STOPS]:
            settings["stop"] = stops
        if limits.guide is not None:
            schema = {"name": "answer", "schema": json.loads(limits.guide.schema)}
            settings["response_format"] = {"type": "json_schema", "json_schema": schema}
        requests = [{"model": self.model, "prompt": prompt, **settings} for prompt in prompts]
        return [str(text) for text in self._ask(requests, [_read_text] * len(requests), "generating", progress)]

    def choose_model(self) -> None:
        """Look the model up on the server; without a name it is the only one.

        Raises:
            UserError: the server does not answer, lacks the model, or has several and none is named.
        """
        reply = self.send("GET", "/models")
        try:
            names = [str(each["id"]) for each in reply["data"]]
        except (KeyError, TypeError):
            raise UserError(
                f"{self.url}/models does not list models, so that this is no OpenAI-compatible server.",
                todo="Give eval.url up to and with /v1.",
            ) from None
        if self.model in names or (not self.model and len(names) == 1):
            self.model = self.model or names[0]
            return
        fault = f"has no model '{self.model}'" if self.model else f"has {len(names)} models and none is named"
        raise UserError(
            f"The server at {self.url} {fault}.",
            allowed=f"It has {', '.join(names) or 'none'}.",
            todo="Set eval.model. " + did_you_mean(self.model, names),
        )

    def _ask(
        self, requests: Sequence[Json], read: Sequence[Callable[[Json], Any]], title: str, progress: Progress
    ) -> list[Any]:
        """Send the unanswered requests; stop at the first failure, and keep the answers that arrived."""
        waiting: dict[str, int] = {}
        for position, request in enumerate(requests):  # equal requests are sent once
            if self.answers.get(request) is None:
                waiting.setdefault(json.dumps(request), position)
        with progress.task(title, len(requests)) as advance:
            advance(len(requests) - len(waiting))

            def work(position: int) -> None:
                reply = self.send("POST", "/completions", requests[position], len(requests))
                self.answers.add([(requests[position], read[position](reply))])
                advance(1)

            with ThreadPoolExecutor(self.concurrency, "eval-client") as pool:
                running: list[Future[None]] = [pool.submit(work, position) for position in waiting.values()]
                try:
                    done, _ = wait(running, return_when=FIRST_EXCEPTION)
                finally:
                    pool.shutdown(wait=False, cancel_futures=True)
        for each in done:
            each.result()
        return [self.answers.get(request) for request in requests]

    def send(self, method: str, path: str, body: Json | None = None, total: int = 1) -> Json:
        """Send a request until it is answered, and return the response.

        Raises:
            UserError: the server refused it, or did not answer any attempt.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return self._once(method, path, body)
            except ForTheMoment as error:
                reason, wait_s = str(error), error.wait_s
            if attempt < self.attempts:
                usual = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1)
                self.sleep(usual if wait_s is None else min(wait_s, LONGEST_WAIT_S))
        spoke = reason.startswith(NO_JSON)
        fault = f"did not answer{' in JSON' if spoke else ''} in {count(self.attempts, 'attempt')}"
        message = f"The server at {self.url} {fault}: {reason}."
        if body is None or self.answers.path is None:
            raise UserError(message, todo="Check eval.url.")
        raise UserError(
            f"{message} {len(self.answers):,} of {count(total, 'answer')} are kept in {self.answers.path}.",
            todo=f"{'Check eval.url' if spoke else 'Start it again'} and give the same command: it goes on from there.",
        )

    def _once(self, method: str, path: str, body: Json | None) -> Json:
        try:
            parts, kept = urlsplit(self.url), getattr(self._local, "connection", None)
            if (connection := kept) is None:
                kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
                self._local.connection = connection = kind(parts.netloc, timeout=self.timeout_s)
            headers = {"Content-Type": "application/json"}
            if key := os.environ.get("OPENAI_API_KEY"):
                headers["Authorization"] = f"Bearer {key}"
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, parts.path.rstrip("/") + path, content, headers)
            response = connection.getresponse()
            status, raw = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._local.connection = None
            if kept is not None and isinstance(error, ConnectionError):  # servers close idle ones; uvicorn after 5 s
                return self._once(method, path, body)
            raise ForTheMoment(f"{type(error).__name__}: {error}") from None
        try:
            reply = json.loads(raw)
        except ValueError:
            reply = None
        ok = status == http.HTTPStatus.OK
        if ok and isinstance(reply, dict) and not (reply.get("error") or reply.get("object") == "error"):
            return reply
        reason = stated_reason(raw).rstrip(".")[:500] or "without a reason"
        if status in FOR_THE_MOMENT or (ok and not isinstance(reply, dict)):
            raise ForTheMoment(f"HTTP status {status}, {reason}", _seconds(response.headers.get("Retry-After")))
        todo = "Check eval.url and eval.model."
        if body and body.get("echo"):
            todo = TOP_TODO if "return_tokens_as_token_ids" in body else SCORING_TODO
        message = f"The server at {self.url} refused a request with HTTP status {status}: {reason}."
        raise UserError(message, todo=todo)


def _seconds(retry_after: str | None) -> float | None:
    """Read the header Retry-After; a date is not understood."""
    try:
        return None if retry_after is None else max(0.0, float(retry_after))
    except ValueError:
        return None


# Ask a Triton server over gRPC the same as an OpenAI-compatible one over HTTP.

TEXT_MODEL = "ensemble"
"""The Triton model that is given text, unless another is named."""


@dataclass
class TritonGrpc(OpenAiServer):
    """The models of a repository of TensorRT-LLM's layout.

    Written answers come from the model for text (`ensemble` or `tensorrt_llm_bls`), log probabilities from
    `tensorrt_llm`. It may return all logits of the prompt, which are large, so prompts are scored one at a time.

    Attributes:
        few_log_probs: whether it returns the log probabilities of a few tokens instead.
    """

    few_log_probs: bool = False
    _scoring: threading.Lock = field(default_factory=threading.Lock)

    def choose_model(self) -> None:
        """Take the model for text, and check that the server is ready.

        Raises:
            UserError: it is not.
        """
        self.model = self.model or TEXT_MODEL
        self.few_log_probs = self.send("GET", "/models")["few_log_probs"]

    def _once(self, method: str, path: str, body: Json | None) -> Json:
        try:
            with self._scoring if body and body.get("echo") else nullcontext():
                return asyncio.run(self._answer(body))
        except ApiError as error:
            if error.status in FOR_THE_MOMENT:
                raise ForTheMoment(error.message) from None
            raise UserError(f"The server at {self.url} refused a request: {error.message}") from None
        except TimeoutError:
            raise ForTheMoment(f"no response within {self.timeout_s:g} s") from None

    def write(
        self, prompts: Sequence[str | TokenIds], limits: SamplingParams, stop: Sequence[str], progress: Progress
    ) -> list[str]:
        """Generate for every prompt; see `TextSession`.

        Raises:
            UserError: the prompts are token ids, which the models for text do not take.
        """
        if any(not isinstance(prompt, str) for prompt in prompts):
            raise UserError.of([written_chats_fault(self.url)])
        return super().write(prompts, limits, stop, progress)

    async def _answer(self, body: Json | None) -> Json:
        from pipelines.serving.openai.backend import Backend

        async with asyncio.timeout(self.timeout_s), Backend(urlsplit(self.url).netloc) as backend:
            if body is None:
                if not await backend.ready():
                    raise ForTheMoment("the server is not ready")
                return {"few_log_probs": await backend.takes_few_log_probs()}
            if body.get("echo"):  # the log probabilities in the form of OpenAI's response
                scorer = PromptScorer(backend, few=self.few_log_probs)
                (scores,) = await scorer.score([tuple(body["prompt"])])
                best = [None if each is None else dict(each) for each in scores.best]
                logprobs = {"token_logprobs": list(scores.log_probs), "top_logprobs": best}
                return {"choices": [{"logprobs": logprobs}]}
            return await _text(backend, self.model, body)


async def _text(backend: "Backend", model: str, body: Json) -> Json:
    drawn = {name: body[name] for name in ("temperature", "top_p", "seed") if name in body}
    schema = json.dumps(body["response_format"]["json_schema"]["schema"]) if "response_format" in body else None
    inputs = text_inputs(body["prompt"], body["max_tokens"], body.get("stop", ()), json_schema=schema, **drawn)
    async with aclosing(backend.stream(model, inputs, ("text_output",))) as results:  # type: ignore[type-var]
        texts = [result.as_numpy("text_output").reshape(-1) async for result in results]
    return {"choices": [{"text": b"".join(part for text in texts for part in text).decode(errors="replace")}]}
