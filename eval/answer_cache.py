"""A session that caches answers: each question is asked once, across runs, formats and interim analyses."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pipelines.domain.progress import Progress, SilentProgress
from pipelines.engines.pictures import ScoredPictures, SeeingSession
from pipelines.engines.port import Generation, SamplingParams, Session, TokenIds

Request = dict[str, Any]

# Answers of a model, appended to a file as they arrive, so that a stopped run resumes.


class AnswerLog:
    """One line of JSON per answer; a line that a killed run left unfinished is ignored.

    Attributes:
        path: the file; it exists after the first answer. None keeps answers in memory alone.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._answers: dict[str, Any] = {}
        self._torn = False
        if path is None or not path.is_file():
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        self._torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                key, answer = json.loads(line)
            except (ValueError, TypeError):
                continue
            self._answers[key] = answer

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, request: Request) -> Any:
        """Return the answer to a request; None if it was not answered yet."""
        return self._answers.get(_key(request))

    def add(self, answered: Iterable[tuple[Request, Any]]) -> None:
        """Keep the answers to several requests; another thread or process may do so at the same time."""
        new = {_key(request): answer for request, answer in answered}
        lines = "".join(json.dumps([key, answer], ensure_ascii=False) + "\n" for key, answer in new.items())
        with self._lock:
            self._answers |= new
            if self.path is None:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" + lines if self._torn else lines)
            self._torn = False

    def remove(self) -> None:
        """Forget all answers, after the result that they led to was written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self._answers = {}


def _key(request: Request) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class AskedEngine:
    """One of two engines that are asked in turns.

    Attributes:
        qformat: how its model was compressed, for the result.
        opened: opens it; at any time only one of the two is open.
        answers: file of the answers that it gave before, and of new ones.
    """

    qformat: str
    opened: Callable[[], AbstractContextManager[Session]]
    answers: Path


SCORED_AT_ONCE = 512
"""Scored requests between two writes: enough to share prefixes, few enough to lose little when killed."""
WRITTEN_AT_ONCE = 128
"""Likewise of requests whose answer is written, which take longer: enough to fill a batch."""
Input = TypeVar("Input")
"""What a session takes for one request."""


class CachedSession(ExitStack):
    """An engine that is opened when it is first asked something new. Use as a context manager."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Session]], answers: AnswerLog) -> None:
        """Remember how to open the engine, and what it answered before."""
        super().__init__()
        self._opened, self._answers = opened, answers
        self._pictures: ScoredPictures | None = None

    def see(self, pictures: ScoredPictures) -> None:
        """Let the engine see these pictures once it is opened; see `SeeingSession`."""
        self._pictures = pictures

    @cached_property
    def engine(self) -> Session:
        """The engine, which is opened for it if it was not asked anything yet."""
        engine = self.enter_context(self._opened())
        if self._pictures is not None and isinstance(engine, SeeingSession):
            engine.see(self._pictures)
        return engine

    def loglikelihood(self, pairs: Sequence[tuple[TokenIds, TokenIds]], progress: Progress) -> list[tuple[float, bool]]:
        """Score continuations; see `port.ScoringSession`."""
        requests = [{"context": context, "continuation": continuation} for context, continuation in pairs]

        def ask(session: Session, some: Sequence[tuple[TokenIds, TokenIds]], silent: Progress) -> list[Any]:
            return session.loglikelihood(some, silent)

        scores = self._ask("scoring", requests, pairs, ask, progress, SCORED_AT_ONCE)
        return [(float(score), bool(greedy)) for score, greedy in scores]

    def generate(self, prompts: Sequence[TokenIds], limits: SamplingParams, progress: Progress) -> list[Generation]:
        """Generate for every prompt; see `port.Session`."""
        settings = {**asdict(replace(limits, guide=None)), "stop_token_ids": sorted(limits.stop_token_ids)}
        del settings["guide"]
        if limits.guide is not None:
            settings["json_schema"] = limits.guide.schema
        requests = [{"prompt": prompt, **settings} for prompt in prompts]

        def ask(session: Session, some: Sequence[TokenIds], silent: Progress) -> list[Any]:
            return [asdict(each) for each in session.generate(some, limits, silent)]

        return [
            Generation(**each) for each in self._ask("generating", requests, prompts, ask, progress, WRITTEN_AT_ONCE)
        ]

    def _ask(
        self,
        title: str,
        requests: Sequence[Request],
        inputs: Sequence[Input],
        ask: Callable[[Session, Sequence[Input], Progress], Sequence[Any]],
        progress: Progress,
        at_once: int,
    ) -> list[Any]:
        """Ask what was not answered before, and write the answers as they come."""
        answers = [self._answers.get(request) for request in requests]
        missing = [place for place, answer in enumerate(answers) if answer is None]
        with progress.task(title, len(requests), "requests") as advance:
            advance(len(requests) - len(missing))
            for places in (missing[at : at + at_once] for at in range(0, len(missing), at_once)):
                new = ask(self.engine, [inputs[place] for place in places], SilentProgress())
                self._answers.add(zip([requests[place] for place in places], new, strict=True))
                for place, answer in zip(places, new, strict=True):
                    answers[place] = answer
                advance(len(places))
        return answers
