"""Choose the format with the most throughput within a given accuracy loss, with reasons against the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.domain.benchmark import Level, Slo
from pipelines.domain.summary import has_limits
from pipelines.report.data import BASELINE, BenchmarkRun, FormatReport, ReportData, Workload
from pipelines.report.workloads import spread


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One format under one workload; None means "not measured".

    Attributes:
        model: label of the model.
        variant: compression in one word.
        accuracy: share of right answers, 0..1.
        loss_percent: loss in percent of the baseline's accuracy; 0 for the baseline itself.
        interval_percent: 95 % interval of that loss.
        verdict: result of the paired statistics.
        engine_bytes: size of the engine on disk.
        run: the benchmark.
        peak: level with the most output tokens/s; complete levels are preferred.
        at_slo: level with the most output tokens/s whose p99 meets every limit; None without limits or if none does.
    """

    model: str
    variant: str
    accuracy: float | None
    loss_percent: float | None
    interval_percent: tuple[float, float] | None
    verdict: str
    engine_bytes: int | None
    run: BenchmarkRun | None
    peak: Level | None
    at_slo: Level | None

    @property
    def score(self) -> float | None:
        """Return the output tokens/s that count: at the best level within the limits, or at the peak without limits."""
        level = self.at_slo if self.run and has_limits(self.run.result.slo) else self.peak
        return level.summary.output_tokens_per_s if level else None


@dataclass(frozen=True, slots=True)
class Rejection:
    """A format that was not chosen, and why."""

    variant: str
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one model's formats under one workload.

    Attributes:
        workload: the comparable runs; None if nothing was benchmarked.
        model: label of the model.
        max_loss_percent: limit of the accuracy loss.
        rows: one per format.
        chosen: variant with the most throughput within the limit; None if no format is eligible.
        reason: text that explains the choice, or why there is none.
        rejected: every other format with its reason.
        notes: limitations of the choice: noise, a client that was the bottleneck, a wide interval.
    """

    workload: Workload | None
    model: str
    max_loss_percent: float
    rows: tuple[FormatRow, ...]
    chosen: str | None
    reason: str
    rejected: tuple[Rejection, ...]
    notes: tuple[str, ...]


def comparison(data: ReportData, max_loss_percent: float = 1.0) -> tuple[Comparison, ...]:
    """Compare the formats of every workload; a model that was never benchmarked is compared by accuracy and size.

    Args:
        data: result of `pipelines.report.collect`.
        max_loss_percent: in percent of the baseline's accuracy; a format that loses more is not chosen.
    """
    compared = [_compare(data, workload, workload.model, max_loss_percent) for workload in data.workloads]
    without = [model for model in data.models if model not in {item.model for item in compared}]
    return tuple(compared + [_compare(data, None, model, max_loss_percent) for model in without])


def _compare(data: ReportData, workload: Workload | None, model: str, limit: float) -> Comparison:
    runs = {run.result.precision: run for run in workload.runs} if workload else {}
    rows = tuple(_row(item, runs.get(item.variant)) for item in data.formats if item.model == model)
    eligible = [row for row in rows if not _refusal(row, limit)]
    best = max(eligible, key=lambda row: row.score or 0.0, default=None)
    rejected = tuple(
        Rejection(row.variant, _refusal(row, limit) or _slower(row, best)) for row in rows if row is not best
    )
    if best is None:
        reason = f"No format can be recommended: none has a usable throughput and loses at most {limit:g} %."
        return Comparison(workload, model, limit, rows, None, reason, rejected, ())
    return Comparison(
        workload, model, limit, rows, best.variant, _reason(best, limit), rejected, _notes(best, rows, limit)
    )


def _row(item: FormatReport, run: BenchmarkRun | None) -> FormatRow:
    build = item.piece("build")
    levels = usable(run)
    loss, interval, verdict = _loss(item)
    return FormatRow(
        model=item.model,
        variant=item.variant,
        accuracy=item.accuracy.result.accuracy if item.accuracy else None,
        loss_percent=loss,
        interval_percent=interval,
        verdict=verdict,
        engine_bytes=build.facts.get("engine_bytes") if build else None,
        run=run,
        peak=max(levels, key=_rate, default=None),
        at_slo=max((level for level in levels if run and meets(level, run.result.slo)), key=_rate, default=None),
    )


def _loss(item: FormatReport) -> tuple[float | None, tuple[float, float] | None, str]:
    """Return the loss in percent of the baseline, its 95 % interval, and the verdict."""
    if item.accuracy is None:
        return None, None, "not measured"
    if item.accuracy.row is None:
        is_base = item.variant == BASELINE
        return (0.0, None, "baseline") if is_base else (None, None, "no baseline")
    row = item.accuracy.row
    base, interval = row["baseline_accuracy"], row["interval"]
    shown = (-100 * interval[1] / base, -100 * interval[0] / base) if interval and base else None
    return row["loss_percent"], shown, str(row["verdict"])


def usable(run: BenchmarkRun | None) -> list[Level]:
    """Return the levels with finished requests; only the complete ones if there are any."""
    levels = [level for level in run.result.levels if level.summary.requests] if run else []
    return [level for level in levels if level.complete] or levels


def _rate(level: Level) -> float:
    return level.summary.output_tokens_per_s


def meets(level: Level, slo: Slo) -> bool:
    """Return whether the 99th percentiles are within every limit, as MLPerf counts; False without limits.

    A metric without values (no ITL with fewer than two output tokens) meets its limit, as for goodput.
    """
    summary = level.summary
    pairs = ((summary.ttft_s, slo.ttft_ms), (summary.itl_s, slo.itl_ms), (summary.e2e_s, slo.e2e_ms))
    checked = [(metric.p99, limit) for metric, limit in pairs if limit is not None]
    return bool(checked) and all(p99 is None or 1000 * p99 <= limit for p99, limit in checked)


def _refusal(row: FormatRow, limit: float) -> str:
    """Return why a format is not eligible regardless of the others; empty if it is eligible."""
    if row.loss_percent is None:
        return f"its accuracy is unknown ({row.verdict})"
    if row.loss_percent > limit:
        return f"loses {row.loss_percent:.2f} % of the accuracy; the limit is {limit:g} %"
    if row.run is None:
        return "it was not benchmarked"
    if row.peak is None:
        return f"no request of its benchmark finished ({row.run.result.reason or 'see its errors'})"
    if has_limits(row.run.result.slo) and row.at_slo is None:
        return "no load met the limits of the SLO at p99"
    return ""


def in_words(variant: str) -> str:
    """Return a format's name for use in a sentence."""
    return "none (16 bit)" if variant == BASELINE else variant


def _reason(best: FormatRow, limit: float) -> str:
    level = best.at_slo if best.run and has_limits(best.run.result.slo) else best.peak
    assert level is not None, "a chosen format has a level"
    where = "at the highest load that meets the SLO" if level is best.at_slo else "at its peak"
    return (
        f"{in_words(best.variant)} gives the most throughput within an accuracy loss of {limit:g} %: "
        f"{_rate(level):,.0f} output tokens/s {where} ({level.load}), loss {best.loss_percent:.2f} %."
    )


def _slower(row: FormatRow, best: FormatRow | None) -> str:
    if best is None or not row.score or not best.score:
        return "no throughput to compare"
    return f"{row.score:,.0f} output tokens/s, {100 * (1 - row.score / best.score):.0f} % below {best.variant}"


def _notes(best: FormatRow, rows: Sequence[FormatRow], limit: float) -> tuple[str, ...]:
    notes = []
    others = [row for row in rows if row is not best and not _refusal(row, limit)]
    second = max(others, key=lambda row: row.score or 0.0, default=None)
    if second is not None:
        notes += _noise(best, second)
    judged = [(row.variant, level) for row in (best, *others) if (level := _level(row))]
    limited = [
        f"{variant} at {level.load} ({level.client.reason})" for variant, level in judged if level.client.bottleneck
    ]
    if limited:
        notes.append(
            f"The load generator was the bottleneck for {', '.join(limited)}: such a throughput is a lower bound, "
            "and the order of the formats is not certain."
        )
    cut = [f"{variant} at {level.load} ({level.reason})" for variant, level in judged if not level.complete]
    if cut:
        notes.append(f"Cut short: {', '.join(cut)}.")
    if best.interval_percent and best.interval_percent[1] > limit:
        notes.append(
            f"The 95 % interval of the accuracy loss of {best.variant} reaches {best.interval_percent[1]:.2f} %, "
            f"above the limit of {limit:g} %: evaluate more questions to be sure."
        )
    return tuple(notes)


def _level(row: FormatRow) -> Level | None:
    return row.at_slo if row.run and has_limits(row.run.result.slo) else row.peak


def _noise(best: FormatRow, second: FormatRow) -> list[str]:
    """Return a note on whether repeated runs show a difference between the best two formats."""
    ranges = [spread(row.run, level.load) for row in (best, second) if row.run and (level := _level(row))]
    if len(ranges) < 2 or any(item is None for item in ranges):
        return ["Each load was measured once per format, so the noise between runs is not known."]
    low = ranges[0][0] if ranges[0] else math.nan
    high = ranges[1][1] if ranges[1] else math.nan
    if low <= high:
        return [
            f"Repeated runs of {best.variant} and {second.variant} overlap "
            f"(lowest {low:,.0f}, highest {high:,.0f} output tokens/s): the two cannot be told apart."
        ]
    return [f"Repeated runs of {best.variant} and {second.variant} do not overlap."]
