"""The questions of a task: all of them as its files list them, or the beginning of their random order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from eval.looks import order
from eval.metric import TaskMetric, deciding_metric, measures_perplexity
from eval.spec import EvalSpec
from eval.tasks.load import load_tasks
from eval.tasks.local import SEED

Tasks = dict[str, Any]
"""lm-eval's `TaskDict`: tasks and groups by name."""


class Questions:
    """Questions in memory, loaded once and asked as often as needed.

    Attributes:
        spec: which questions, and how they are asked.
        metric: what makes an answer right; None for a task that reads texts.
        tasks: lm-eval's tasks and groups.
    """

    def __init__(self, spec: EvalSpec, tokenizer: Any = None) -> None:
        """Load the questions.

        Args:
            spec: which questions to ask, and how.
            tokenizer: of the model; needed for a task that is made as long as the engine allows.

        Raises:
            UserError: they are missing or malformed, or the task has no usable metric.
        """
        self.spec, self.tasks = spec, load_tasks(spec, tokenizer)
        each = list(self.tasks["tasks"].values())
        self.metric: TaskMetric | None = (
            None if measures_perplexity(spec, each) else deciding_metric(spec.task, each, spec.metric)
        )
        self._docs: dict[str, Any] = {}

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Number of questions of each task that may be asked."""
        found = {name: len(self._all(name)) for name in self.tasks["tasks"]}
        return {name: min(size, self.spec.limit or size) for name, size in found.items()}

    @property
    def count(self) -> int:
        """Number of questions of all tasks together."""
        return sum(self.sizes.values())

    @cached_property
    def order(self) -> list[tuple[str, int]]:
        """All questions as (task, index) in random order; every beginning has its share of each task."""
        return order(self.sizes)

    def first(self, count: int) -> tuple[Tasks, dict[str, list[int]]]:
        """Return the tasks with only the first questions of the order, and the index of each question by task.

        Worked examples are drawn anew from the first question on, so that a question has the same prompt however many
        follow it.
        """
        chosen: dict[str, list[int]] = {}
        for name, index in self.order[:count]:
            chosen.setdefault(name, []).append(index)
        tasks = {name: task for name, task in self.tasks["tasks"].items() if name in chosen}
        for name, task in tasks.items():
            docs = self._all(name)
            some = docs.select(chosen[name]) if hasattr(docs, "select") else [docs[i] for i in chosen[name]]
            given = "test_docs" if task.has_test_docs() else "validation_docs"
            setattr(task, given, lambda some=some: some)  # lm-eval's own `samples` would keep the order of the file
            task.set_fewshot_seed(seed=SEED)
        return {**self.tasks, "tasks": tasks}, chosen

    def _all(self, name: str) -> Any:
        if name not in self._docs:
            docs = self.tasks["tasks"][name].eval_docs
            self._docs[name] = docs if hasattr(docs, "__len__") else list(docs)
        return self._docs[name]
