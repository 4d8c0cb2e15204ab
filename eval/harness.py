"""Run a task of lm-eval on a session and keep every answer."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from eval.metric import PERPLEXITIES, Questions, TaskMetric
from eval.perplexity import PerplexityResult
from eval.results import PLAIN_PROMPTS, EvalResult, QuestionRecord, Score
from eval.spec import EvalSpec
from eval.verdict import Criteria, too_few
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.engines.port import ScoringSession

if TYPE_CHECKING:
    from eval.adapter import EngineLM

# Results in the forms that others read: lm-eval's own JSON, and the Hub's `.eval_results`.

LM_EVAL = "lm_eval_results.json"
"""Name of the file in lm-eval's form."""
HUB = ".eval_results"
"""Folder of a model repository in which the Hub looks for results."""


def write_lm_eval(raw: Mapping[str, Any], result: EvalResult | PerplexityResult, folder: Path) -> None:
    """Write what `lm-eval --output_path` writes, without the samples.

    Args:
        raw: results as lm-eval's evaluator returns them.
        result: the same, ours.
        folder: the file is written into it.
    """
    content = {
        **{name: value for name, value in raw.items() if name != "samples"},
        "config": {"model": result.engine, "model_args": {"model": result.model, "format": result.qformat},
                   "limit": result.limit},
        **({name: getattr(result, name) for name in PLAIN_PROMPTS} if isinstance(result, EvalResult) else {}),
        "lm_eval_version": result.lm_eval_version,
        "model_name": result.model,
        "max_length": result.max_length,
    }  # fmt: skip
    (folder / LM_EVAL).write_text(json.dumps(content, indent=2, default=_plain, ensure_ascii=False), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return a number of numpy as a number, and a function by its name, which is the same in every run."""
    if hasattr(value, "item"):
        return value.item()
    return getattr(value, "__name__", type(value).__name__)


def write_hub(result: EvalResult, dataset: str, revision: str | None, folder: Path) -> None:
    """Write `.eval_results/<task>.yaml`, to be copied into the model's repository on the Hub.

    The value is a fraction, as in lm-eval's results.

    Args:
        result: over all questions of the task.
        dataset: the task's data set on the Hub, org/name.
        revision: its commit; a branch or tag is not a revision to compare with, and is left out.
        folder: the folder `.eval_results` is made in it.
    """
    import yaml

    source: dict[str, Any] = {"id": dataset, "task_id": result.task}
    if revision is not None and len(revision) == 40 and not revision.strip("0123456789abcdef"):
        source["revision"] = revision
    notes = (
        f"lm-eval {result.lm_eval_version}, {result.shots}, {result.metric}, {result.questions} questions; "
        f"format {result.qformat}, computed by {result.engine}"
    )
    (folder / HUB).mkdir()
    text = yaml.safe_dump([{"dataset": source, "value": result.accuracy, "notes": notes}], sort_keys=False, width=120)
    (folder / HUB / f"{result.task}.yaml").write_text(text, encoding="utf-8")


CATEGORIES = ("stem", "humanities", "social_sciences", "other")


class Labels(TypedDict):
    """What a result is of: name of the model, how it was compressed, and what executes it."""

    model: str
    qformat: str
    engine: str


def evaluate(
    session: ScoringSession,
    tokenizer_dir: Path,
    spec: EvalSpec,
    progress: Progress,
    *,
    export_to: Path | None = None,
    criteria: Criteria | None = None,
    **labels: Unpack[Labels],
) -> EvalResult | PerplexityResult:
    """Ask the model all questions of the task, or let it read the task's texts.

    Args:
        session: the loaded engine, or anything else that scores.
        tokenizer_dir: folder with the checkpoint's tokenizer.
        spec: which questions to ask, and how.
        progress: shows bars that count questions.
        export_to: folder for the results in lm-eval's own form.
        criteria: of the verdict that follows; says before the first question if there are too few questions for it.
        labels: of the result.

    Raises:
        UserError: the questions or the tokenizer are missing or malformed, or the engine gave NaN.
        RuntimeError: something else that scores gave NaN.
    """
    questions = load_questions(spec, tokenizer_dir)
    result: EvalResult | PerplexityResult
    if questions.metric is None:
        _, raw = _run(session, tokenizer_dir, spec, questions.tasks, spec.limit, progress)
        result = _perplexity(raw, spec, labels)
    else:
        if criteria and (few := too_few(questions.count, criteria, stops=False)):
            progress.note(f"warning: {few}")
        result, raw = ask(session, tokenizer_dir, questions, progress, **labels)
        note_truncated(result, progress)
    if export_to is not None:
        write_lm_eval(raw, result, export_to)
    return result


def load_questions(spec: EvalSpec, tokenizer_dir: Path | None = None) -> Questions:
    """Load the questions of a task.

    Args:
        spec: which questions to ask, and how.
        tokenizer_dir: folder with the tokenizer; needed for a task that is made as long as the engine allows.

    Raises:
        UserError: they are missing or malformed, or the task has no usable metric.
    """
    from eval.adapter import load_tokenizer

    with _tamed():
        return Questions(spec, load_tokenizer(tokenizer_dir) if tokenizer_dir else None)


def ask(
    session: ScoringSession,
    tokenizer_dir: Path,
    questions: Questions,
    progress: Progress,
    *,
    first: int | None = None,
    **labels: Unpack[Labels],
) -> tuple[EvalResult, Mapping[str, Any]]:
    """Ask the model questions that are loaded.

    Args:
        session: the loaded engine, or anything else that scores.
        tokenizer_dir: folder with the checkpoint's tokenizer.
        questions: what to ask.
        progress: shows bars that count questions.
        first: asks only so many questions of the random order, and returns their records in this order; None asks all.
        labels: of the result.

    Returns:
        the result, and what lm-eval returned.

    Raises:
        UserError: the tokenizer is missing or malformed, or the engine gave NaN.
        RuntimeError: something else that scores gave NaN.
    """
    spec, metric = questions.spec, questions.metric
    if metric is None:
        raise UserError(
            f"eval.task='{spec.task}' measures the perplexity of texts, which are neither right nor wrong.",
            todo="Leave out eval.sequential, or choose a task with questions.",
        )
    tasks, chosen = (questions.tasks, None) if first is None else questions.first(first)
    lm, raw = _run(session, tokenizer_dir, spec, tasks, spec.limit if first is None else None, progress)
    if chosen is not None:
        _name_questions(raw["samples"], chosen)
    result = _result(raw, tasks["tasks"], spec, metric, lm.truncated, labels)
    return (result if first is None else _in_order(result, questions, first)), raw


def _run(
    session: ScoringSession,
    tokenizer_dir: Path,
    spec: EvalSpec,
    tasks: Mapping[str, Any],
    limit: int | None,
    progress: Progress,
) -> tuple[EngineLM, Mapping[str, Any]]:
    """Let lm-eval ask, and return its adapter and what it returns."""
    import lm_eval.evaluator

    from eval.adapter import ChatPrompts, EngineLM, load_tokenizer

    with _tamed():
        tokenizer, system = load_tokenizer(tokenizer_dir), spec.system_instruction
        chat = ChatPrompts(tokenizer_dir, progress, system_instruction=system) if spec.apply_chat_template else None
        lm = EngineLM(session, tokenizer, spec.max_length, progress, max_prompt=spec.max_prompt, chat=chat)
        # Not `simple_evaluate`, which would spend seconds describing the machine. Any positive number of
        # bootstrap rounds yields the standard error of a mean, which has a closed form and draws no samples.
        return lm, lm_eval.evaluator.evaluate(
            lm=lm,
            task_dict=tasks,
            limit=limit,
            bootstrap_iters=1,
            system_instruction=system,
            apply_chat_template=spec.apply_chat_template,
            fewshot_as_multiturn=spec.multiturn,
        )


def note_truncated(result: EvalResult, progress: Progress) -> None:
    """Say how many prompts lost their beginning."""
    if result.truncated:
        progress.note(
            f"{result.truncated} of {result.questions} prompts exceed {result.max_length} tokens; their beginning was "
            "cut"
        )


def _name_questions(samples: Mapping[str, Sequence[dict[str, Any]]], chosen: Mapping[str, Sequence[int]]) -> None:
    """Number the questions of a beginning as the data set does; lm-eval numbers those that it was given."""
    for name, rows in samples.items():
        for row in rows:
            row["doc_id"] = chosen[name][row["doc_id"]]


def _in_order(result: EvalResult, questions: Questions, first: int) -> EvalResult:
    """Return a result with its records in the order of the questions; lm-eval returns them task by task."""
    task = questions.spec.task
    place = {(name.removeprefix(f"{task}_"), index): at for at, (name, index) in enumerate(questions.order[:first])}
    records = sorted(result.records, key=lambda record: place[record.subject, record.index])
    return replace(result, records=tuple(records))


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


def _perplexity(raw: Mapping[str, Any], spec: EvalSpec, labels: Labels) -> PerplexityResult:
    (rows,) = raw["samples"].values()
    figures: dict[str, Any] = {name: float(raw["results"][spec.task][f"{name},none"]) for name in PERPLEXITIES}
    return PerplexityResult(
        **labels,
        **_how_asked(spec, rows),
        task=spec.task,
        documents=len(rows),
        **figures,
    )


def _how_asked(spec: EvalSpec, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields that every result has: the limits, lm-eval's version and the hash of all prompts in order."""
    return {
        "limit": spec.limit,
        "max_length": spec.max_length,
        "lm_eval_version": version("lm_eval"),
        "prompts_sha256": hashlib.sha256("".join(row["prompt_hash"] for row in rows).encode()).hexdigest(),
    }


def _result(
    raw: Mapping[str, Any],
    tasks: Mapping[str, Any],
    spec: EvalSpec,
    metric: TaskMetric,
    truncated: int,
    labels: Labels,
) -> EvalResult:
    samples = {name: [row for row in rows if row["filter"] == metric.filter] for name, rows in raw["samples"].items()}
    short = {name: name.removeprefix(f"{spec.task}_") for name in samples}
    records = tuple(_record(short[name], row, tasks[name], metric) for name, rows in samples.items() for row in rows)
    return EvalResult(
        **labels,
        **_how_asked(spec, chain.from_iterable(samples.values())),
        task=spec.label,
        num_fewshot=max(int(raw["n-shot"][name] or 0) for name in samples),
        truncated=truncated,
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
        apply_chat_template=spec.apply_chat_template,
        fewshot_as_multiturn=spec.multiturn,
        system_instruction=spec.system_instruction,
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
