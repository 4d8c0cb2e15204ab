"""The metric that decides whether an answer is right: 1 or 0 for every question, so that two results can be paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.spec import EvalSpec
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

    @property
    def stderr(self) -> str:
        """Name of its standard error in lm-eval's results."""
        return f"{self.name}_stderr,{self.filter}"

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
    given = {
        "eval.metric": spec.metric,
        "eval.num_fewshot": spec.num_fewshot or None,
        "eval.system_instruction": spec.system_instruction,
        "eval.apply_chat_template": "true" if spec.apply_chat_template else None,
    }
    for setting, value in given.items():
        if value is not None:
            raise UserError(
                f"{setting}={value} has no effect on eval.task='{spec.task}', which measures the perplexity of texts.",
                todo="Leave it out.",
            )
    return True


def deciding_metric(name: str, tasks: Sequence[Any], wanted: str | None) -> TaskMetric:
    """Return the metric of a task, the first one unless another is wanted.

    Args:
        name: of the task, for errors.
        tasks: lm-eval's tasks; all have the metric.
        wanted: "metric" or "metric,filter".

    Raises:
        UserError: the tasks have no such metric, or it is not defined for a single question.
    """
    known = [TaskMetric(metric, each.name) for metric in tasks[0].aggregation() for each in tasks[0]._filters]
    for task in tasks[1:]:
        own = {(metric, each.name) for metric in task.aggregation() for each in task._filters}
        known = [metric for metric in known if (metric.name, metric.filter) in own]
    usable = [metric for metric in known if metric.name not in NOT_OF_ONE_QUESTION]
    for metric in usable:
        if wanted in (None, str(metric), metric.name):
            return metric
    raise UserError(
        f"eval.task='{name}' has no metric {'that is 0 or 1 for each question' if wanted is None else repr(wanted)}.",
        allowed=f"It has {', '.join(map(str, usable)) or ', '.join(map(str, known))}.",
        todo="Set eval.metric.",
    )
