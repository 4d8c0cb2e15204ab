"""Run a task of lm-eval on a session and keep every answer."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypedDict, Unpack

import lm_eval.api.metrics
import lm_eval.api.task
import lm_eval.evaluator
from jinja2 import UndefinedError
from lm_eval.utils import env

from eval.adapter import ChatPrompts, EngineLM, OnOneBar, load_tokenizer
from eval.answer_cache import AnswerLog, AskedEngine, CachedSession
from eval.exact import SEED, Answered, PlannedInterim, planned_interims
from eval.metric import PERPLEXITIES, Questions, TaskMetric
from eval.perplexity import PerplexityResult
from eval.results import PLAIN_PROMPTS, EvalResult, QuestionRecord, Score, Sequential, answers_of, compare_pair
from eval.spec import EvalSpec
from eval.verdict import Criteria, Verdict, judge, too_few
from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.engines.pictures import ScoredPictures, SeeingSession
from pipelines.engines.port import ScoringSession

LM_EVAL = "lm_eval_results.json"
"""Name of the file in lm-eval's form."""


def write_lm_eval(raw: Mapping[str, Any], result: EvalResult | PerplexityResult, folder: Path) -> None:
    """Write what `lm-eval --output_path` writes, without the samples."""
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


CATEGORIES = ("stem", "humanities", "social_sciences", "other")


class Labels(TypedDict):
    """Subject of a result: the model's name, its compression, and its engine."""

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
        (rows,) = raw["samples"].values()
        figures: dict[str, Any] = {name: float(raw["results"][spec.task][f"{name},none"]) for name in PERPLEXITIES}
        common = {**labels, **_how_asked(spec, rows)}
        result = PerplexityResult(**common, task=spec.task, documents=len(rows), **figures)
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
    if first is None:
        lm, raw = _run(session, tokenizer_dir, spec, questions.tasks, spec.limit, progress)
        return _result(raw, questions.tasks["tasks"], spec, metric, lm.truncated, labels), raw
    tasks, chosen = questions.first(first)
    lm, raw = _run(session, tokenizer_dir, spec, tasks, None, progress)
    for name, rows in raw["samples"].items():  # numbered as in the data set; lm-eval numbers those that it was given
        for row in rows:
            row["doc_id"] = chosen[name][row["doc_id"]]
    result = _result(raw, tasks["tasks"], spec, metric, lm.truncated, labels)
    order = enumerate(questions.order[:first])  # lm-eval returns the records task by task
    place = {(name.removeprefix(f"{spec.task}_"), index): at for at, (name, index) in order}
    records = sorted(result.records, key=lambda record: place[record.subject, record.index])
    return replace(result, records=tuple(records)), raw


def _run(
    session: ScoringSession,
    tokenizer_dir: Path,
    spec: EvalSpec,
    tasks: Mapping[str, Any],
    limit: int | None,
    progress: Progress,
) -> tuple[EngineLM, Mapping[str, Any]]:
    with _tamed():
        tokenizer, system = load_tokenizer(tokenizer_dir), spec.system_instruction
        chat = ChatPrompts(tokenizer_dir, progress, system_instruction=system) if spec.apply_chat_template else None
        pictures = None if spec.vision is None else ScoredPictures(spec.vision)
        if pictures is not None and isinstance(session, SeeingSession):
            session.see(pictures)
        lm = EngineLM(
            session, tokenizer, spec.max_length, progress, max_prompt=spec.max_prompt, chat=chat, pictures=pictures
        )
        with _explained(spec):
            # Not `simple_evaluate`, which would spend seconds describing the machine. Any positive number of
            # bootstrap rounds yields the standard error of a mean, which has a closed form and draws no samples; those
            # of other figures are left out (`_tamed`).
            return lm, lm_eval.evaluator.evaluate(
                lm=lm,
                task_dict=tasks,
                limit=limit,
                bootstrap_iters=1,
                system_instruction=system,
                apply_chat_template=spec.apply_chat_template,
                fewshot_as_multiturn=spec.multiturn,
            )


@contextmanager
def _explained(spec: EvalSpec) -> Iterator[None]:
    """Turn an error of lm-eval's own code, as of a task whose examples it cannot put into a prompt, into ours."""
    try:
        yield
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, UndefinedError,
        ValueError,
    ) as error:  # fmt: skip
        packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
        if next(name for name in reversed(packages) if name in ("lm_eval", "eval", "pipelines")) != "lm_eval":
            raise
        raise UserError(
            f"lm-eval {version('lm_eval')} failed at eval.task='{spec.task}': {error!r}",
            todo=f"{'' if spec.num_fewshot == 0 else 'Try eval.num_fewshot=0, or '}choose another task with eval.task.",
        ) from error


def note_truncated(result: EvalResult, progress: Progress) -> None:
    """Say how many prompts lost their beginning."""
    if result.truncated:
        progress.note(
            f"{result.truncated} of {result.questions} prompts exceed {result.max_length} tokens; their beginning was "
            "cut"
        )


@contextmanager
def _tamed() -> Iterator[None]:
    """Silence lm-eval's log and bars, leave out its bootstrap and compile each of its prompt templates once.

    lm-eval offers no switch for these within a process. It recompiles a template for every example and
    question: 1.4 ms, seven times per question, two minutes for MMLU.
    """
    logger, bar = logging.getLogger("lm_eval"), lm_eval.api.task.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    lm_eval.api.task.tqdm = lambda iterable, **_settings: iterable
    bootstrap = lm_eval.api.metrics.bootstrap_stderr  # of perplexity, F1, ...: no result here has their standard error
    lm_eval.api.metrics.bootstrap_stderr = lambda *_args, **_settings: "N/A"
    env.from_string = cache(env.from_string)
    try:
        yield
    finally:
        logger.setLevel(level)
        lm_eval.api.task.tqdm, lm_eval.api.metrics.bootstrap_stderr = bar, bootstrap
        del env.from_string  # makes the class's own method visible again


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
    stderr = metrics.get(f"{metric.name}_stderr,{metric.filter}", "N/A")
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
    if (length := _LENGTHS.get(metric.name)) is not None:  # an empty choice is never the best, as in lm-eval
        sizes = map(length, choices)
        scores = tuple(score / size if size else -math.inf for score, size in zip(logprobs, sizes, strict=True))
    return QuestionRecord(
        subject, index, logprobs, scores.index(max(scores)), _right_choice(task, row, choices), correct
    )


_LENGTHS: Mapping[str, Callable[[str], int]] = {"acc_norm": len, "acc_bytes": lambda choice: len(choice.encode())}
"""What lm-eval divides the log probability of a choice by."""


def _right_choice(task: Any, row: Mapping[str, Any], choices: Sequence[str]) -> int | str:
    """Return the index of the right choice, the first if there are several; the task's own text if it names none.

    Where the choices are beginnings of one text (winogrande), lm-eval's `target` is that text, and `doc_to_text` the
    index.
    """
    target = task.doc_to_text(row["doc"]) if task.multiple_input else row["target"]
    target = target[0] if isinstance(target, list) else target
    if isinstance(target, str):
        return choices.index(target) if target in choices else target
    return int(target)


# Ask two engines the same questions in random order, and stop as soon as the verdict is known.


@dataclass(frozen=True, slots=True)
class Asked:
    """Results of both engines on the same questions."""

    baseline: EvalResult
    result: EvalResult
    raw: Mapping[str, Any]


def ask_in_turns(
    baseline: AskedEngine,
    other: AskedEngine,
    tokenizer_dir: Path,
    questions: Questions,
    criteria: Criteria,
    progress: Progress,
    *,
    most: int,
    together: int = 1,
    model: str,
    engine: str,
) -> Asked:
    """Ask until the verdict is known or no question is left.

    Args:
        baseline: the 16-bit engine.
        other: the compressed one.
        tokenizer_dir: folder with the tokenizer of both.
        questions: what may be asked.
        criteria: which loss is acceptable, and how sure the verdict has to be.
        progress: shows the questions asked, and at each interim analysis what is known.
        most: asks so many questions at most.
        together: models that are judged together; the verdict has to hold among so many.
        model: name of the model, for the results.
        engine: what executes both, for the results.
    """
    strict, progress_text = replace(criteria, false_go=criteria.false_go / together), ""
    taken: list[PlannedInterim] = []
    for interim in planned_interims(most):
        taken.append(interim)
        how = Sequential(most, questions.count, SEED, tuple(taken))
        title = f"{interim.questions:,} of {count(most, 'question')}{progress_text}"
        with progress.task(title, 2 * interim.questions, "answers") as advance:
            both = []
            for side in (baseline, other):  # opened only if it has not answered everything before
                with CachedSession(side.opened, AnswerLog(side.answers)) as session:
                    both.append(
                        ask(
                            session, tokenizer_dir, questions, OnOneBar(advance, progress), first=interim.questions,
                            model=model, qformat=side.qformat, engine=engine,
                        )
                    )  # fmt: skip
        before, after = (replace(result, sequential=how) for result, _ in both)
        evidence = compare_pair(before, after).evidence
        changed, (least, most_lost) = evidence.changed, evidence.bounds(strict.false_go)
        progress_text = (
            f", {changed.lost} lost, {changed.gained} gained, loss {100 * least:+.2f} to {100 * most_lost:+.2f}"
        )
        progress.note(f"{interim.questions:,} of {count(most, 'question')} asked{progress_text}")
        verdict = judge([evidence], strict)[0].verdict
        if verdict in (Verdict.GO, Verdict.NO_GO):
            break
        share = planned_interims(most)[-1].share  # would further questions make a baseline one that beats guessing?
        answered = Answered.of(answers_of(before))
        if verdict is Verdict.NOT_MEASURED and answered.is_hopeless(most, strict.margin, strict.false_go, share):
            break
    note_truncated(after, progress)
    return Asked(before, after, both[1][1])
