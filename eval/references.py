"""Accuracies that NVIDIA published, to be shown beside measured ones: `references.csv`, facts only."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from eval.results import EvalResult

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
