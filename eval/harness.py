"""Run MMLU on a session through lm-eval and keep every answer."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eval.results import EvalResult, QuestionRecord, Score
from eval.spec import EvalSpec
from pipelines.domain.progress import Advance, Progress
from pipelines.engines.port import ScoringSession

__all__ = ["EvalResult", "EvalSpec", "evaluate"]

CATEGORIES = ("stem", "humanities", "social_sciences", "other")
METRIC, STDERR = "acc,none", "acc_stderr,none"
"""lm-eval's names for the unfiltered accuracy and its standard error."""


def evaluate(
    session: ScoringSession,
    tokenizer_dir: Path,
    spec: EvalSpec,
    progress: Progress,
    *,
    model: str,
    qformat: str,
    engine: str,
) -> EvalResult:
    """Ask the model all questions of the task.

    Args:
        session: the loaded engine, or anything else that scores.
        tokenizer_dir: folder with the checkpoint's tokenizer.
        spec: which questions to ask, and how.
        progress: shows bars that count questions.
        model: name of the model, for the result.
        qformat: how the model was compressed, for the result.
        engine: what executes the model, for the result.

    Raises:
        UserError: the questions or the tokenizer are missing or malformed.
        RuntimeError: the engine returned NaN.
    """
    import lm_eval.evaluator

    from eval.adapter import EngineLM, load_tokenizer
    from eval.tasks.load import load_tasks

    with _tamed():
        tasks = load_tasks(spec)
        choices = len(next(iter(tasks["tasks"].values())).config.doc_to_choice)
        lm = EngineLM(session, load_tokenizer(tokenizer_dir), spec.max_length, _PerQuestion(progress, choices))
        # Not `simple_evaluate`, which would spend seconds describing the machine. Any positive number of
        # bootstrap rounds yields the standard error of a mean, which has a closed form and draws no samples.
        raw = lm_eval.evaluator.evaluate(lm=lm, task_dict=tasks, limit=spec.limit, bootstrap_iters=1)
    result = _result(raw, spec, lm.truncated, model=model, qformat=qformat, engine=engine)
    if result.truncated:
        progress.note(
            f"{result.truncated} of {result.questions} prompts exceed {spec.max_length} tokens; their beginning was cut"
        )
    return result


class _PerQuestion:
    """A progress display that counts questions, although the work arrives as requests, one per choice."""

    def __init__(self, outer: Progress, choices: int) -> None:
        self._outer, self._choices = outer, choices

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        questions = None if total is None else total / self._choices
        with self._outer.task(title, questions, "questions") as advance:
            yield lambda amount: advance(amount / self._choices)

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._outer.note(text)


@contextmanager
def _tamed() -> Iterator[None]:
    """Silence lm-eval's log and bars and compile each of its prompt templates once.

    lm-eval offers no switch for these within a process. It recompiles a template for every example and
    question: 1.4 ms, seven times per question, two minutes for MMLU.
    """
    import lm_eval.api.task as task_module
    from lm_eval.utils import env

    logger, bar = logging.getLogger("lm_eval"), task_module.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    task_module.tqdm = lambda iterable, **_settings: iterable
    env.from_string = cache(env.from_string)
    try:
        yield
    finally:
        logger.setLevel(level)
        task_module.tqdm = bar
        del env.from_string  # makes the class's own method visible again


def _result(
    raw: Mapping[str, Any], spec: EvalSpec, truncated: int, *, model: str, qformat: str, engine: str
) -> EvalResult:
    samples = {name.removeprefix(f"{spec.task}_"): rows for name, rows in raw["samples"].items()}
    prompts = "".join(row["prompt_hash"] for rows in samples.values() for row in rows)
    return EvalResult(
        model=model,
        qformat=qformat,
        engine=engine,
        task=spec.task,
        num_fewshot=spec.num_fewshot,
        limit=spec.limit,
        max_length=spec.max_length,
        truncated=truncated,
        lm_eval_version=version("lm_eval"),
        prompts_sha256=hashlib.sha256(prompts.encode()).hexdigest(),
        overall=_score(raw["results"][spec.task]),
        categories={
            name: _score(raw["results"][group])
            for name in CATEGORIES
            if (group := f"{spec.task}_{name}") in raw["results"]
        },
        subjects={name: _score(raw["results"][f"{spec.task}_{name}"]) for name in samples},
        records=tuple(_record(name, row) for name, rows in samples.items() for row in rows),
    )


def _score(metrics: Mapping[str, Any]) -> Score:
    stderr = metrics[STDERR]
    return Score(
        accuracy=float(metrics[METRIC]),
        stderr=None if stderr == "N/A" else float(stderr),
        questions=int(metrics["sample_len"]),
    )


def _record(subject: str, row: Mapping[str, Any]) -> QuestionRecord:
    logprobs = tuple(float(score) for score, _ in row["filtered_resps"])
    return QuestionRecord(
        subject=subject,
        index=int(row["doc_id"]),
        logprobs=logprobs,
        choice=logprobs.index(max(logprobs)),
        answer=int(row["target"]),
        correct=bool(row["acc"]),
    )
