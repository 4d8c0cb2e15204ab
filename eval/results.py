"""Result of one evaluation: scores as lm-eval computes them, and every answer for paired statistics."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eval.exact import PlannedLook
from pipelines.domain.errors import UserError, read_record

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
        questions: number of questions asked.
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
        of: questions that could have been asked, which the looks were planned for.
        available: questions that the task has.
        seed: of their order.
        looks: those that were taken; the last one is after all records.
    """

    of: int
    available: int
    seed: int
    looks: tuple[PlannedLook, ...]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of one model, in one format, on one engine, for one task.

    Attributes:
        model: name of the model.
        qformat: how the model was compressed, "none" for the 16-bit baseline.
        engine: what executed the model.
        task: name of the task, e.g. mini_mmlu.
        num_fewshot: worked examples per prompt.
        limit: maximum number of questions per subject, None for all.
        max_length: maximum number of tokens fed to the model.
        truncated: questions whose prompt lost its beginning to fit `max_length`.
        lm_eval_version: the version that built the prompts and computed the scores.
        prompts_sha256: hash of all prompts in order; if equal, the same questions were asked in the same words.
        overall: score over all questions, equally weighted.
        categories: one score each for stem, humanities, social_sciences, other.
        subjects: one score per subject.
        records: every question, in the order asked.
        metric: lm-eval's name of what decides whether an answer is right, with its filter.
        sequential: how asking went, if it could stop before all questions were asked; None otherwise.
        apply_chat_template: whether prompts were put into the model's chat template.
        fewshot_as_multiturn: whether each worked example was a turn of its own.
        system_instruction: the user's, before the task's own description; None without one.
    """

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
    def chance(self) -> float:
        """Accuracy of guessing among the choices; 0 where there are none."""
        guesses = [1 / len(record.logprobs) if len(record.logprobs) > 1 else 0.0 for record in self.records]
        return sum(guesses) / len(guesses)

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

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "evaluation result") -> EvalResult:
        """Read what `to_json` wrote.

        Raises:
            UserError: a field is missing, unknown or malformed.
        """
        return read_record(cls, data, source, what="an evaluation result", todo="Evaluate again with this version.")

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(json.dumps(self.to_json(), allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> EvalResult:
        """Read a file that `save` wrote.

        Raises:
            UserError: the file is missing or is not such a result.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"There is no evaluation result at {path}.") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is not valid JSON: {error}.") from None
        return cls.from_json(data, str(path))


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
        task: "mmlu".
        model: name on the Hub.
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

    @property
    def labels(self) -> set[str]:
        """Labels that a result of this model may have."""
        return {self.label, self.model.replace("/", "--")} - {""}


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
    return tuple(each for each in all_references() if label in each.labels and each.task == task)


def differences(result: EvalResult) -> str:
    """Name the differences between how an accuracy was measured here and how NVIDIA measures."""
    asked = f"{result.questions:,} here and {THEIR_QUESTIONS:,} there (72 of each subject, drawn at random)"
    shots = f"{result.num_fewshot} here and 5 there"
    if result.apply_chat_template or result.system_instruction is not None:
        shots += f"; prompts {result.shots} here and plain there"
    return (
        f"Differences of the measurement: questions {asked}; worked examples {shots}; here, the answer is the letter "
        "with the highest log probability, there the beginning of two generated tokens; the engine here is "
        f"{result.engine}. The two did not answer the same questions, so there is no verdict."
    )
