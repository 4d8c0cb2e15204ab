"""Run a task of lm-eval on a session and keep every answer."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eval.exports import write_lm_eval
from eval.metric import TaskMetric, deciding_metric
from eval.results import EvalResult, QuestionRecord, Score
from eval.spec import EvalSpec
from pipelines.domain.progress import Progress
from pipelines.engines.port import ScoringSession

__all__ = ["EvalResult", "EvalSpec", "evaluate"]

CATEGORIES = ("stem", "humanities", "social_sciences", "other")


def evaluate(
    session: ScoringSession,
    tokenizer_dir: Path,
    spec: EvalSpec,
    progress: Progress,
    *,
    model: str,
    qformat: str,
    engine: str,
    export_to: Path | None = None,
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
        export_to: folder for the results in lm-eval's own form.

    Raises:
        UserError: the questions or the tokenizer are missing or malformed.
        RuntimeError: the engine returned NaN.
    """
    import lm_eval.evaluator

    from eval.adapter import EngineLM, load_tokenizer
    from eval.tasks.load import load_tasks

    with _tamed():
        tasks = load_tasks(spec)
        metric = deciding_metric(spec.task, list(tasks["tasks"].values()), spec.metric)
        lm = EngineLM(session, load_tokenizer(tokenizer_dir), spec.max_length, progress)
        # Not `simple_evaluate`, which would spend seconds describing the machine. Any positive number of
        # bootstrap rounds yields the standard error of a mean, which has a closed form and draws no samples.
        raw = lm_eval.evaluator.evaluate(lm=lm, task_dict=tasks, limit=spec.limit, bootstrap_iters=1)
    result = _result(raw, tasks["tasks"], spec, metric, lm.truncated, model=model, qformat=qformat, engine=engine)
    if export_to is not None:
        write_lm_eval(raw, result, export_to)
    if result.truncated:
        progress.note(
            f"{result.truncated} of {result.questions} prompts exceed {spec.max_length} tokens; their beginning was cut"
        )
    return result


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
    raw: Mapping[str, Any],
    tasks: Mapping[str, Any],
    spec: EvalSpec,
    metric: TaskMetric,
    truncated: int,
    *,
    model: str,
    qformat: str,
    engine: str,
) -> EvalResult:
    samples = {name: [row for row in rows if row["filter"] == metric.filter] for name, rows in raw["samples"].items()}
    prompts = "".join(row["prompt_hash"] for rows in samples.values() for row in rows)
    short = {name: name.removeprefix(f"{spec.task}_") for name in samples}
    records = tuple(_record(short[name], row, tasks[name], metric) for name, rows in samples.items() for row in rows)
    return EvalResult(
        model=model,
        qformat=qformat,
        engine=engine,
        task=spec.task,
        num_fewshot=max(int(raw["n-shot"][name] or 0) for name in samples),
        limit=spec.limit,
        max_length=spec.max_length,
        truncated=truncated,
        lm_eval_version=version("lm_eval"),
        prompts_sha256=hashlib.sha256(prompts.encode()).hexdigest(),
        overall=_score(raw["results"].get(spec.task, {}), metric) or _score_of(records),
        categories={
            name: score
            for name in CATEGORIES
            if (score := _score(raw["results"].get(f"{spec.task}_{name}", {}), metric))
        },
        subjects={
            short[name]: _score(raw["results"][name], metric)
            or _score_of([record for record in records if record.subject == short[name]])
            for name in samples
        },
        records=records,
        metric=str(metric),
    )


def _score(metrics: Mapping[str, Any], metric: TaskMetric) -> Score | None:
    """Return a score as lm-eval computed it; None for a group whose task files do not ask for this metric."""
    if str(metric) not in metrics:
        return None
    stderr = metrics.get(metric.stderr, "N/A")
    return Score(
        accuracy=float(metrics[str(metric)]),
        stderr=None if stderr == "N/A" else float(stderr),
        questions=int(metrics["sample_len"]),
    )


def _score_of(records: Sequence[QuestionRecord]) -> Score:
    """Return the share of right answers, and its standard error as lm-eval defines it for a mean."""
    count, share = len(records), sum(record.correct for record in records) / len(records)
    return Score(share, math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None, count)


def _record(subject: str, row: Mapping[str, Any], task: Any, metric: TaskMetric) -> QuestionRecord:
    index, correct = int(row["doc_id"]), metric.of(row)
    if task.OUTPUT_TYPE == "generate_until":
        text, target = row["filtered_resps"][0], row["target"]
        return QuestionRecord(subject, index, (), str(text), str(target), correct)
    logprobs = tuple(float(score) for score, _ in row["filtered_resps"])
    if task.OUTPUT_TYPE == "loglikelihood":
        return QuestionRecord(subject, index, logprobs, int(row["filtered_resps"][0][1]), 1, correct)
    choices = task.doc_to_choice(row["doc"])
    scores = logprobs
    if metric.name == "acc_norm":  # lm-eval divides by the length of the choice in characters
        scores = tuple(score / len(choice) for score, choice in zip(logprobs, choices, strict=True))
    return QuestionRecord(
        subject, index, logprobs, scores.index(max(scores)), _right_choice(row["target"], choices), correct
    )


def _right_choice(target: Any, choices: Sequence[str]) -> int:
    """Return the index of the right choice, the first if there are several; a task gives its index or its text."""
    first = target[0] if isinstance(target, list) else target
    if isinstance(first, str):
        return choices.index(first) if first in choices else int(first)
    return int(first)
