"""The metric that decides whether an answer is right: 1 or 0 for every question, so that two results can be paired."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eval.exact import order
from eval.spec import EvalSpec
from eval.tasks.load import load_tasks
from eval.tasks.local import SEED
from pipelines.domain.errors import UserError

PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte")
"""Figures of a task that lets the model read texts."""
NOT_OF_ONE_QUESTION = {"f1", "mcc", "bleu", "chrf", "ter", "brier_score", "perplexity"}
"""Metrics that are defined for a set of questions only."""


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """A metric of lm-eval and the filter through which answers go before it.

    Attributes:
        name: e.g. acc, acc_norm, exact_match.
        filter: e.g. none, strict-match.
    """

    name: str
    filter: str

    def __str__(self) -> str:
        return f"{self.name},{self.filter}"

    def of(self, row: Mapping[str, Any]) -> bool:
        """Return whether the answer in a row of lm-eval's samples is right.

        Raises:
            UserError: the metric is not 0 or 1 for this question.
        """
        value = row[self.name]
        if value not in (0, 1):
            raise UserError(
                f"Metric '{self.name}' of question {row['doc_id']} is {value!r}, not 0 or 1, so that no two results can"
                " be paired question by question.",
                todo="Choose another one with eval.metric.",
            )
        return bool(value)


def measures_perplexity(spec: EvalSpec, tasks: Sequence[Any]) -> bool:
    """Return whether a task lets the model read texts, which are neither right nor wrong.

    Raises:
        UserError: it does, with settings that have no effect then, or together with others.
    """
    rolling = [task for task in tasks if task.OUTPUT_TYPE == "loglikelihood_rolling"]
    if not rolling:
        return False
    if len(tasks) > 1:
        raise UserError(
            f"eval.task='{spec.task}' measures the perplexity of several texts, or of texts and other things.",
            todo="Name one of its tasks.",
        )
    if missing := set(PERPLEXITIES) - set(rolling[0].aggregation()):
        raise UserError(
            f"eval.task='{spec.task}' measures the perplexity of texts, but without {', '.join(sorted(missing))}."
        )
    options = {
        "eval.metric": spec.metric,
        "eval.num_fewshot": spec.num_fewshot or None,
        "eval.system_instruction": spec.system_instruction,
        "eval.apply_chat_template": "true" if spec.apply_chat_template else None,
    }
    for setting, value in options.items():
        if value is not None:
            raise UserError(
                f"{setting}={value} has no effect on eval.task='{spec.task}', which measures the perplexity of texts.",
                todo="Leave it out.",
            )
    return True


def deciding_metric(name: str, tasks: Sequence[Any], chosen: str | None) -> TaskMetric:
    """Return the metric of a task, the first one unless another is chosen.

    Raises:
        UserError: the tasks have no such metric, or it is not defined for a single question.
    """
    common = [TaskMetric(metric, each.name) for metric in tasks[0].aggregation() for each in tasks[0]._filters]
    for task in tasks[1:]:
        own = {(metric, each.name) for metric in task.aggregation() for each in task._filters}
        common = [metric for metric in common if (metric.name, metric.filter) in own]
    usable = [metric for metric in common if metric.name not in NOT_OF_ONE_QUESTION]
    for metric in usable:
        if chosen in (None, str(metric), metric.name):
            return metric
    raise UserError(
        f"eval.task='{name}' has no metric {'that is 0 or 1 for each question' if chosen is None else repr(chosen)}.",
        allowed=f"It has {', '.join(map(str, usable)) or ', '.join(map(str, common))}.",
        todo="Set eval.metric.",
    )


# The questions of a task: all of them as its files list them, or the beginning of their random order.

Tasks = dict[str, Any]
"""lm-eval's `TaskDict`: tasks and groups by name."""


class Questions:
    """Questions in memory, loaded once and asked as often as needed.

    Attributes:
        spec: which questions, and how they are asked.
        metric: what makes an answer right; None for a task that reads texts.
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
        sizes = {name: len(self._all(name)) for name in self.tasks["tasks"]}
        return {name: min(size, self.spec.limit or size) for name, size in sizes.items()}

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
            method = "test_docs" if task.has_test_docs() else "validation_docs"
            setattr(task, method, lambda some=some: some)  # lm-eval's own `samples` would keep the order of the file
            task.set_fewshot_seed(seed=SEED)
        return {**self.tasks, "tasks": tasks}, chosen

    def _all(self, name: str) -> Any:
        if name not in self._docs:
            docs = self.tasks["tasks"][name].eval_docs
            self._docs[name] = docs if hasattr(docs, "__len__") else list(docs)
        return self._docs[name]
