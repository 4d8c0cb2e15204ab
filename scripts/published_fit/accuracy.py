"""Accuracy goals of the performance model, and the measurements that each of them applies to."""

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.published.cases import PublishedCase, published_cases
from scripts.published_fit.crossvalidation import score

Score = Mapping[str, float]

VALIDATED = Path(__file__).with_name("cross_validation.csv.gz")
"""The prediction for each published row when its group was left out of the fit."""

ENOUGH_ROWS_OF_FAMILY = 50
"""Rows of a metric from which a family has its own spread."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits in percent for the errors on measurements that were not used in the fit; None is no limit.

    Attributes:
        median: (pass, stretch).
        mape: (pass, stretch).
        anchor: the errors of other models, for comparison.
    """

    median: tuple[float, float] | None
    mape: tuple[float, float] | None
    anchor: str

    def words(self, kind: str) -> str:
        """Return the limits as text; kind is "pass" or "stretch"."""
        at = 0 if kind == "pass" else 1
        both = (("median", self.median), ("MAPE", self.mape))
        return ", ".join(f"{name} <= {limits[at]:g} %" for name, limits in both if limits)

    def met(self, kind: str, score: Mapping[str, float]) -> bool:
        """Return whether a score is within the limits."""
        at = 0 if kind == "pass" else 1
        return all(
            score[name] <= limits[at] for name, limits in (("median", self.median), ("mape", self.mape)) if limits
        )


GOALS = {
    "full load, TensorRT-LLM 1.x": Goal(None, (8, 5), "prototype 5.3 (MAPE)"),
    "full load, TensorRT-LLM 0.10 to 0.15": Goal((12, 8), None, "prototype 9.7 to 12.2"),
    "ITL, closed loop (TensorRT-LLM, vLLM)": Goal((10, 6), (14, 10), "aiconfigurator 12.8 / 20.0"),
    "TTFT, closed loop (TensorRT-LLM, vLLM)": Goal((23, 15), (38, 25), "aiconfigurator 45 / 48"),
    "ITL, closed loop, all": Goal((10, 6), (14, 10), "aiconfigurator 12.8 / 20.0"),
    "TTFT, closed loop, all": Goal((23, 15), (38, 25), "aiconfigurator 45 / 48"),
    "static prefill": Goal((10, 7), None, "prototype 8.0"),
    "static tokens/s": Goal((10, 7), None, "prototype 9.8"),
    "requests/s, closed loop (NIM)": Goal((8, 5), None, "prototype 6.0"),
    "MLPerf offline tokens/s": Goal((20, 12), None, "none"),
    "unseen GPU (left out)": Goal((20, 13), None, "KernelSight-LM 12.8 to 15.4"),
}
"""Goals by their row names in docs/sizing.md. For the anchors see decision 0023."""
UNSEEN = "unseen GPU (left out)"


def goals_of(case: PublishedCase) -> list[str]:
    """Return the goals that a measurement counts towards."""
    rate = case.metric in ("output_tok_s", "output_tok_s_per_gpu", "requests_s")
    framework = case.setup.runs_on
    if case.mode == "inflight_maxload":
        one = framework.family == "trtllm-torch"
        return ["full load, TensorRT-LLM 1.x" if one else "full load, TensorRT-LLM 0.10 to 0.15"]
    if case.mode == "closed_loop_concurrency":
        if rate:
            return ["requests/s, closed loop (NIM)"] if framework.family == "nim" else []
        kind = "TTFT" if case.metric == "ttft_ms" else "ITL"
        named = [] if framework.family == "sglang" else [f"{kind}, closed loop (TensorRT-LLM, vLLM)"]
        return [*named, f"{kind}, closed loop, all"]
    if case.mode == "static_batch":
        if case.metric in ("ttft_ms", "prefill_batch_ms"):
            return ["static prefill"]
        return ["static tokens/s"] if rate else []
    return ["MLPerf offline tokens/s"] if case.mode == "mlperf_offline" else []


def case_scores(names_of: Callable[[PublishedCase], Iterable[str]]) -> dict[str, tuple[Score, Score]]:
    """Return, by each name of a case, the scores of the formula and of predictions with neighbours, for rows left out.

    Args:
        names_of: names of the groups that a case belongs to.
    """
    found, groups = validated(), defaultdict(list)
    for row, case, value in zip(*published_cases(), strict=True):
        each = found[row["case_id"]]
        formula, predicted, low, high = (float(each[name]) for name in ("formula", "predicted", "low", "high"))
        for name in names_of(case):
            groups[name].append((formula, predicted, value, low <= value <= high))
    scores: dict[str, tuple[Score, Score]] = {}
    for name, rows in groups.items():
        formulas, corrected, values, covered = (np.array(column) for column in zip(*rows, strict=True))
        ratios = np.log([formulas / values, corrected / values])
        scores[name] = score(ratios[0], formulas, values), score(ratios[1], corrected, values, covered)
    return scores


def validated() -> dict[str, dict[str, str]]:
    """Return what was predicted for each published row when its group was left out of the fit, by case."""
    with gzip.open(VALIDATED, "rt", encoding="utf-8", newline="") as lines:
        return {row["case_id"]: row for row in csv.DictReader(lines)}


def verdict(goal: Goal, score: Mapping[str, float]) -> str:
    """Return in one word whether stretch or pass is met."""
    if goal.met("stretch", score):
        return "**stretch**"
    return "pass" if goal.met("pass", score) else "missed"
