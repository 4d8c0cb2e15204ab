"""Result of one evaluation: scores as lm-eval computes them, and every answer for paired statistics."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from eval.exact import Answered, Changed, Evidence, Interim, PlannedInterim
from pipelines.domain.errors import JsonFile, UserError

RESULT = "evaluation.json"
"""File of an evaluation with its result."""
BASELINE = "baseline.json"
"""File beside it with the result of the 16-bit engine, where both were asked in turns."""

PLAIN_PROMPTS = {"apply_chat_template": False, "fewshot_as_multiturn": False, "system_instruction": None}
"""How prompts are made unless something else is asked for; results have the fields that differ."""


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy over some questions.

    Attributes:
        accuracy: fraction of right answers, 0..1.
        stderr: standard error of `accuracy` from lm-eval; None where it cannot be estimated (one question).
    """

    accuracy: float
    stderr: float | None
    questions: int


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """One question and the model's answer.

    Attributes:
        subject: e.g. "anatomy".
        index: position in the subject's test file, from 0.
        logprobs: natural-log probability of each choice after the prompt; empty where the model writes the answer.
        choice: the choice with the highest log probability (the first one in a tie), or the written answer after the
            task's filter. Where a task scores a single text, 1 if the model itself would have written it, else 0.
        answer: the right choice, or the expected answer.
        correct: whether the task's metric counts the answer as right.
    """

    subject: str
    index: int
    logprobs: tuple[float, ...]
    choice: int | str
    answer: int | str
    correct: bool


@dataclass(frozen=True, slots=True)
class Sequential:
    """How asking went that stops as soon as the verdict is known (`eval.exact`).

    Attributes:
        of: questions that could have been asked, which the interim analyses were planned for.
        available: questions that the task has.
        seed: of their order.
        looks: the interim analyses that were made; the last one is after all records.
    """

    of: int
    available: int
    seed: int
    looks: tuple[PlannedInterim, ...]


@dataclass(frozen=True, slots=True)
class EvalResult(JsonFile):
    """Result of one model, in one format, on one engine, for one task.

    Attributes:
        qformat: how the model was compressed, "none" for the 16-bit baseline.
        task: name of the task, e.g. mini_mmlu.
        num_fewshot: worked examples per prompt.
        limit: maximum number of questions per subject, None for all.
        max_length: maximum number of tokens fed to the model.
        truncated: questions whose prompt lost its beginning to fit `max_length`.
        lm_eval_version: the version that built the prompts and computed the scores.
        prompts_sha256: hash of all prompts in order; if equal, the same questions were asked in the same words.
        overall: score over all questions, equally weighted.
        categories: one score each for stem, humanities, social_sciences, other.
        records: every question, in the order asked.
        metric: lm-eval's name of what decides whether an answer is right, with its filter.
        sequential: how asking went, if it could stop before all questions were asked; None otherwise.
        apply_chat_template: whether prompts were put into the model's chat template.
        fewshot_as_multiturn: whether each worked example was a turn of its own.
        system_instruction: the user's, before the task's own description; None without one.
    """

    FILE = RESULT
    WHAT = "an evaluation result"
    TODO = "Evaluate again with this version."

    model: str
    qformat: str
    engine: str
    task: str
    num_fewshot: int
    limit: int | None
    max_length: int
    truncated: int
    lm_eval_version: str
    prompts_sha256: str
    overall: Score
    categories: Mapping[str, Score]
    subjects: Mapping[str, Score]
    records: tuple[QuestionRecord, ...]
    metric: str = "acc,none"
    sequential: Sequential | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    system_instruction: str | None = None

    @property
    def shots(self) -> str:
        """How prompts were made, in words: "5-shot, chat template, system instruction"."""
        turns = "" if self.fewshot_as_multiturn or not self.num_fewshot else " (examples in one turn)"
        parts = [f"chat template{turns}"] if self.apply_chat_template else []
        parts += ["system instruction"] if self.system_instruction is not None else []
        return ", ".join([f"{self.num_fewshot}-shot", *parts])

    @property
    def accuracy(self) -> float:
        """Overall accuracy, 0..1."""
        return self.overall.accuracy

    @property
    def questions(self) -> int:
        """Number of questions asked."""
        return self.overall.questions

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values, without those of settings that were not used."""
        values = asdict(self)
        unused = {"sequential": None, **PLAIN_PROMPTS}
        return {name: value for name, value in values.items() if name not in unused or value != unused[name]}


HUB = ".eval_results"
"""Folder of a model repository in which the Hub looks for results."""


def write_hub(result: EvalResult, dataset: str, revision: str | None, folder: Path) -> None:
    """Write `.eval_results/<task>.yaml`, to be copied into the model's repository on the Hub.

    The value is a fraction, as in lm-eval's results.

    Args:
        result: over all questions of the task.
        dataset: the task's data set on the Hub, org/name.
        revision: its commit; a branch or tag is not a revision to compare with, and is left out.
        folder: the folder `.eval_results` is made in it.
    """
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


# Accuracies that NVIDIA published, to be shown beside measured ones: `references.csv`, facts only.

FILE = Path(__file__).with_name("references.csv")
SOURCE = "TensorRT-LLM 1.3.0rc3, tests/integration/defs/accuracy/references/mmlu.yaml"
"""Entries without speculative decoding and without changed sampling, of the Llama and Gemma models that it has."""

THEIR_QUESTIONS = 4104
"""72 of each of the 57 subjects of MMLU: `NUM_SAMPLES` = 4,096 in accuracy_core.py, rounded up per subject."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One published accuracy.

    Attributes:
        label: name of this project's configuration of the model; empty if it has none.
        qformat: format of the weights in the source's words, "none" for 16 bit.
        kv_cache: format of the KV cache, likewise.
        num_fewshot: worked examples per prompt.
        accuracy: in percent.
    """

    task: str
    model: str
    label: str
    qformat: str
    kv_cache: str
    num_fewshot: int
    accuracy: float


@cache
def all_references() -> tuple[Reference, ...]:
    """Read the file."""
    with FILE.open(newline="", encoding="utf-8") as lines:
        return tuple(
            Reference(
                row["task"], row["model"], row["label"], row["qformat"], row["kv_cache"],
                int(row["num_fewshot"]), float(row["accuracy"]),
            )
            for row in csv.DictReader(lines)
        )  # fmt: skip


def references_of(label: str, task: str) -> tuple[Reference, ...]:
    """Return what was published of a model, by its label, on a task."""
    return tuple(
        each
        for each in all_references()
        if label and label in (each.label, each.model.replace("/", "--")) and each.task == task
    )


def differences(result: EvalResult) -> str:
    """Name the differences between how an accuracy was measured here and how NVIDIA measures."""
    numbers = f"{result.questions:,} here and {THEIR_QUESTIONS:,} there (72 of each subject, drawn at random)"
    shots = f"{result.num_fewshot} here and 5 there"
    if result.apply_chat_template or result.system_instruction is not None:
        shots += f"; prompts {result.shots} here and plain there"
    return (
        f"Differences of the measurement: questions {numbers}; worked examples {shots}; here, the answer is the letter "
        "with the highest log probability, there the beginning of two generated tokens; the engine here is "
        f"{result.engine}. The two did not answer the same questions, so there is no verdict."
    )


# Compare two results on the same questions: which answers changed. Standard library only.


@dataclass(frozen=True, slots=True)
class Paired:
    """The same questions, answered before and after.

    Attributes:
        baseline_accuracy: fraction right before, 0..1.
        accuracy: fraction right after, 0..1.
        lost: questions right before and wrong after.
        gained: questions wrong before and right after.
        flips: questions answered differently, right or wrong.
        difference: accuracy after minus before; the mean of the per-question differences.
        evidence: what a verdict is made from.
    """

    questions: int
    baseline_accuracy: float
    accuracy: float
    lost: int
    gained: int
    flips: int
    difference: float
    evidence: Evidence

    @property
    def loss_percent(self) -> float | None:
        """Loss in percent of the baseline's accuracy, negative for a gain; None when the baseline got nothing right.

        60 % -> 57 % is a loss of 5 %.
        """
        right_before = self.baseline_accuracy * self.questions
        return 100 * (self.lost - self.gained) / right_before if right_before else None


def mcnemar_exact(lost: int, gained: int) -> float:
    """Return the two-sided exact p-value of McNemar's test.

    If only luck changed, each changed question is lost or gained like the toss of a fair coin:
    p = 2 * P(Binomial(lost + gained, 1/2) <= min(lost, gained)), at most 1.
    6 lost, 0 gained: 2 / 64 = 0.03125.
    """
    changed, fewer = lost + gained, min(lost, gained)
    term = total = 1  # C(changed, 0); integers, so that nothing is rounded before the division
    for k in range(1, fewer + 1):
        term = term * (changed - k + 1) // k
        total += term
    return min(1.0, 2 * total / int(2**changed))


def compare_pair(baseline: EvalResult, other: EvalResult) -> Paired:
    """Pair two results question by question.

    Raises:
        UserError: the two did not answer the same questions.
    """
    _check_same_questions(baseline, other)
    before, after, answers = baseline.records, other.records, answers_of(baseline)
    changes = [int(b.correct) - int(a.correct) for a, b in zip(before, after, strict=True)]
    if other.sequential is None:
        evidence = Evidence.once(_counted(changes), Answered.of(answers))
    else:
        interims = (
            Interim(_counted(changes[: each.questions]), each.share, Answered.of(answers[: each.questions]))
            for each in other.sequential.looks
        )
        evidence = Evidence(tuple(interims), other.sequential.of)
    return Paired(
        questions=len(changes),
        baseline_accuracy=sum(a.correct for a in before) / len(before),
        accuracy=sum(b.correct for b in after) / len(after),
        lost=changes.count(-1),
        gained=changes.count(1),
        flips=sum(a.choice != b.choice for a, b in zip(before, after, strict=True)),
        difference=sum(changes) / len(changes),
        evidence=evidence,
    )


def answers_of(result: EvalResult) -> list[tuple[bool, float]]:
    """Return, per question, whether it was answered right and how probable that is by guessing among its choices.

    With `exact_match` an answer is right if the model would have written it, which nobody guesses (webqs, whose choices
    are all right).
    """
    chosen = not result.metric.startswith("exact_match,")
    records = result.records
    return [(each.correct, 1 / len(each.logprobs) if chosen and len(each.logprobs) > 1 else 0.0) for each in records]


def _counted(changes: Sequence[int]) -> Changed:
    return Changed(len(changes), changes.count(-1), changes.count(1))


def logprob_shift(baseline: EvalResult, other: EvalResult) -> tuple[float | None, float | None]:
    """Return mean and maximum of the distance between the log probabilities of a choice in two results.

    It shows a change of the model's output that is too small to change an answer. Written answers have none.

    Raises:
        UserError: the two did not answer the same questions.
    """
    _check_same_questions(baseline, other)
    both = zip(baseline.records, other.records, strict=True)
    shifts = [abs(new - old) for a, b in both for old, new in zip(a.logprobs, b.logprobs, strict=True)]
    return (sum(shifts) / len(shifts), max(shifts)) if shifts else (None, None)


def above_chance(result: EvalResult) -> bool:
    """Return whether the model answers better than by guessing among the choices (exact one-sided test, 5 %)."""
    return Answered.of(answers_of(result)).p_above() <= 0.05


def _check_same_questions(baseline: EvalResult, other: EvalResult) -> None:
    for name in ("task", "metric", "num_fewshot", "limit", "sequential", *PLAIN_PROMPTS, "prompts_sha256"):
        ours, theirs = getattr(baseline, name), getattr(other, name)
        if ours != theirs:
            raise UserError(
                f"{baseline.model} {baseline.qformat} and {other.model} {other.qformat} did not get the same"
                f" questions: {name} is {ours!r} and {theirs!r}.",
                todo="Evaluate both with the same eval settings.",
            )


# Answers of two evaluations that differ, by direction, and how sure the reference was of them.
#
# Flips show what equal accuracies hide (Dutta et al., Accuracy is Not All You Need, NeurIPS 2024).


@dataclass(frozen=True, slots=True)
class Flips:
    """Questions that two models answer differently.

    A margin is the difference between the probabilities of the best and the second choice, among the choices.

    Attributes:
        to_wrong: right under the reference, wrong under the other.
        to_right: the reverse.
        wrong_to_wrong: wrong under both, with another choice.
        margin_kept: median margin of the reference on questions with equal choices; None without any, and for written
            answers.
        margin_flipped: likewise on those with different choices.
    """

    questions: int
    to_wrong: int
    to_right: int
    wrong_to_wrong: int
    margin_kept: float | None
    margin_flipped: float | None

    @property
    def flipped(self) -> int:
        """All questions with different choices."""
        return self.to_wrong + self.to_right + self.wrong_to_wrong


def flips(reference: EvalResult, other: EvalResult) -> Flips:
    """Compare the answers of two evaluations of the same questions, in the same order."""
    pairs = list(zip(reference.records, other.records, strict=True))
    flipped = [(a, b) for a, b in pairs if a.choice != b.choice]
    margins = [margin(a) for a, b in pairs if a.choice == b.choice and len(a.logprobs) > 1]
    changed = [margin(a) for a, _ in flipped if len(a.logprobs) > 1]
    return Flips(
        questions=len(pairs),
        to_wrong=sum(a.correct and not b.correct for a, b in flipped),
        to_right=sum(b.correct and not a.correct for a, b in flipped),
        wrong_to_wrong=sum(not a.correct and not b.correct for a, b in flipped),
        margin_kept=median(margins) if margins else None,
        margin_flipped=median(changed) if changed else None,
    )


def margin(record: QuestionRecord) -> float:
    """Return the probability of the likeliest choice minus that of the second, among the choices."""
    best, second = sorted(record.logprobs, reverse=True)[:2]
    total = sum(math.exp(each - best) for each in record.logprobs)
    return (1 - math.exp(second - best)) / total
