"""Correct a prediction with the errors of similar measurements, fading with distance.

Similar cases share errors that the formula of `performance.physics` leaves: a kernel that is slow at one shape, a
scheduler's habit. This is Gaussian-process regression ("kriging") of log(measured / predicted): the correction of a
case is a weighted mean of the errors of measured cases of the same kind, with weights that fall with the distance in
log(input tokens), log(output tokens), log(ranks), log(requests together) and with each of framework, GPU, model and
format that differs. Far from all measurements it is 0, and the interval is as wide as without correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.predict.published.cases import PublishedCase

SMOOTH = ("isl", "osl", "tp", "load")
"""Features compared by distance, as logarithms."""
KINDS = ("framework", "family", "gpu", "model", "form", "metric", "mode")
"""Features compared for equality."""
LIMIT = 1.5
"""Upper bound on errors: those beyond a factor of 4.5 are outliers and count as 4.5."""
NORMAL_80 = 1.2816
"""Half-width of the interval that holds 80 % of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class Points:
    """Cases as features for the kernel.

    Attributes:
        smooth: float64[n, 4], logarithms of `SMOOTH`.
        kinds: int64[n, 7], codes of `KINDS`.
    """

    smooth: Any
    kinds: Any

    def rows(self, index: Any) -> Points:
        """Select rows."""
        return Points(self.smooth[index], self.kinds[index])


@dataclass(frozen=True, slots=True)
class Kernel:
    """Similarity of two cases.

    Attributes:
        near: variance that fades with the distance.
        far: variance that depends only on what is equal.
        noise: variance of a single measurement.
        lengths: length scales of `SMOOTH`, in logarithms.
        alike: for each of `KINDS`, the correlation that remains when it differs.
    """

    near: float
    far: float
    noise: float
    lengths: tuple[float, ...]
    alike: tuple[float, ...]

    def between(self, left: Points, right: Points) -> Any:
        """Compute covariances, float64[left, right]."""
        scaled = [points.smooth / np.array(self.lengths) for points in (left, right)]
        square = ((scaled[0][:, None, :] - scaled[1][None, :, :]) ** 2).sum(-1)
        equal = np.ones(square.shape)
        for index, share in enumerate(self.alike):
            equal *= np.where(left.kinds[:, None, index] == right.kinds[None, :, index], 1.0, share)
        return equal * (self.near * np.exp(-0.5 * square) + self.far)


def correct(kernel: Kernel, known: Points, errors: Any, asked: Points) -> tuple[Any, Any]:
    """Return the expected error and its variance (of the case, measurement noise included), float64[asked] each.

    Args:
        kernel: similarity of cases.
        known: measured cases.
        errors: their log(measured / predicted).
        asked: cases to correct.
    """
    clipped = np.clip(errors, -LIMIT, LIMIT)
    covariance = kernel.between(known, known) + kernel.noise * np.eye(len(clipped))
    cross = kernel.between(asked, known)
    weights = np.linalg.solve(covariance, np.column_stack([clipped, cross.T]))
    mean = cross @ weights[:, 0]
    variance = kernel.near + kernel.far + kernel.noise - (cross * weights[:, 1:].T).sum(1)
    return mean, np.maximum(variance, kernel.noise)


def block_of(case: PublishedCase) -> str:
    """Return the block of a case. Errors within a block are of one kind; nothing is learnt across blocks.

    Full loads: by runtime. Static batches: by source and by whether they prefill. Closed loops: by framework family,
    fixed or drawn lengths, and metric. MLPerf: by metric.
    """
    rate = case.metric in ("output_tok_s", "output_tok_s_per_gpu", "requests_s")
    framework = case.setup.runs_on
    if case.mode == "inflight_maxload":
        return f"full load, {framework.engine}"
    if case.mode == "static_batch":
        if case.source == "splitwise-sim":
            return "static, Splitwise"
        return "static, prefill" if case.metric in ("ttft_ms", "prefill_batch_ms") else "static, rate"
    if case.mode == "open_loop_trace":
        return "trace"
    kind = {"ttft_ms": "TTFT", "e2e_ms": "E2E"}.get(case.metric, "rate" if rate else "ITL")
    if case.mode == "closed_loop_concurrency":
        return f"closed loop, {framework.family}, {'drawn' if case.randomised else 'fixed'} lengths, {kind}"
    return f"MLPerf, {kind}"


def points(cases: Sequence[PublishedCase], codes: dict[tuple[int, str], int]) -> Points:
    """Convert cases to features; `codes` numbers the words and grows."""
    smooth = [[case.isl, case.osl, case.setup.tp, case.users or case.batch or 1] for case in cases]
    kinds = [[codes.setdefault((at, word), len(codes)) for at, word in enumerate(_words(case))] for case in cases]
    return Points(np.log(np.array(smooth, float)).reshape(-1, len(SMOOTH)), np.array(kinds).reshape(-1, len(KINDS)))


def _words(case: PublishedCase) -> tuple[str, ...]:
    setup = case.setup
    same = {"itl_ms": "tpot_ms", "output_tok_s_per_gpu": "output_tok_s", "requests_s": "output_tok_s"}
    metric = f"{same.get(case.metric, case.metric)} {'p99' if case.stat == 'p99' else ''}"
    form = setup.qformat.value
    return (setup.framework, setup.runs_on.family, setup.gpu.name, setup.model.name, form, metric, case.mode)
