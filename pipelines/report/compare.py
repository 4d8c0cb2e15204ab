"""Choose the format with the most throughput within a given accuracy loss, with reasons against the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.fidelity.divergence import FidelityResult
from eval.verdict import Verdict
from pipelines.domain.benchmark import LoadPoint, Slo
from pipelines.engines.registry import ENGINES
from pipelines.engines.tensorrt_llm.config import TUNED
from pipelines.report.data import BASELINE, BenchmarkRun, FormatReport, ReportData, Workload, spread

AT_LEAST = "≥"
AGAIN = "Measure again on a machine that the load generator does not have to share."


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One format under one workload; None means "not measured".

    Attributes:
        accuracy: share of right answers, 0..1.
        loss_percent: loss in percent of the baseline's accuracy; 0 for the baseline itself.
        most_percent: upper bound of that loss.
        verdict: a word of `Verdict`, or why there is none.
        peak: level with the most output tokens/s; None if no level counts (see `LoadPoint.counts`).
        at_slo: level that counts with the most output tokens/s whose p99 meets every limit; None without limits or if
            none does.
        limited: client-limited levels, whose throughput is a lower bound.
        fidelity: how far predictions are from those of the 16-bit model.
    """

    model: str
    variant: str
    accuracy: float | None
    loss_percent: float | None
    most_percent: float | None
    verdict: str
    engine_bytes: int | None
    run: BenchmarkRun | None
    peak: LoadPoint | None
    at_slo: LoadPoint | None
    limited: tuple[LoadPoint, ...]
    fidelity: FidelityResult | None = None

    @property
    def peak_mark(self) -> str:
        """Return what stands before the throughput at the peak: "≥" if a higher load does not count."""
        return AT_LEAST if _above(self.peak, self.limited) else ""

    @property
    def slo_mark(self) -> str:
        """Return the same for the throughput at the best load within the limits."""
        return AT_LEAST if _above(self.at_slo, _bounds(self)) else ""

    @property
    def level(self) -> LoadPoint | None:
        """Return the level that counts: the best one within the limits, or the peak without limits."""
        return self.at_slo if self.run and self.run.result.slo.limits else self.peak

    @property
    def score(self) -> float | None:
        """Return the output tokens/s at that level."""
        return self.level.summary.output_tokens_per_s if self.level else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one model's formats under one workload.

    Attributes:
        workload: the comparable runs; None if nothing was benchmarked.
        chosen: variant with the most throughput within the limit; None if no format is eligible.
        reason: text that explains the choice, or why there is none.
        rejected: why each other format was not chosen.
        notes: limitations of the choice: noise, a client that was the bottleneck, a wide interval.
        tuning: which tuning the engines have; empty for engines without any.
    """

    workload: Workload | None
    model: str
    rows: tuple[FormatRow, ...]
    chosen: str | None
    reason: str
    rejected: Mapping[str, str]
    notes: tuple[str, ...]
    tuning: str = ""


def comparison(data: ReportData, max_loss_percent: float = 1.0) -> tuple[Comparison, ...]:
    """Compare the formats of every workload; a model that was never benchmarked is compared by accuracy and size.

    Args:
        data: result of `pipelines.report.collect`.
        max_loss_percent: in percent of the baseline's accuracy; a format that loses more is not chosen.
    """
    compared = [compare_formats(data, workload, workload.model, max_loss_percent) for workload in data.workloads]
    without = [model for model in data.models if model not in {item.model for item in compared}]
    return tuple(compared + [compare_formats(data, None, model, max_loss_percent) for model in without])


def compare_formats(data: ReportData, workload: Workload | None, model: str, limit: float) -> Comparison:
    """Compare the formats of one model under one workload, or without one by accuracy and size."""
    runs = {run.result.precision: run for run in workload.runs} if workload else {}
    formats = [item for item in data.formats if item.model == model]
    rows = tuple(_row(item, runs.get(item.variant)) for item in formats)
    eligible = [row for row in rows if not refusal(row, limit)]
    best = max(eligible, key=lambda row: row.score or 0.0, default=None)
    if best is None:
        lacking = "load within the limits" if any(row.peak and not row.level for row in rows) else "usable throughput"
        reason = f"No format can be recommended: not one has a {lacking} and a known loss of at most {limit:g} %."
    elif undecided := _undecided(best, rows, limit):
        reason, best = undecided, None
    else:
        reason = _reason(best, limit, alone=len(eligible) == 1)
    chosen = best.variant if best else None
    notes = (*(_choice_notes(best, eligible, limit) if best else ()), *load_notes(rows), *_failures(rows))
    rejected = {
        row.variant: why
        for row in rows
        if row is not best and (why := refusal(row, limit) or (_slower(row, best) if best else ""))
    }
    return Comparison(workload, model, rows, chosen, reason, rejected, notes, _tuning(formats))


def _tuning(formats: Sequence[FormatReport]) -> str:
    """Name the tuning of every engine that can be tuned, with the options that it chose or the user gave."""
    tunings = {
        item.variant: build
        for item in formats
        if (build := item.artifact("build"))
        and (engine := ENGINES.get(str(build.settings.get("engine"))))
        and engine.recommends
    }
    names = {build.tuning for build in tunings.values()}
    if not tunings or names == {None}:
        return ""
    alike = len(names) == 1
    parts = []
    for variant, build in tunings.items():
        options = build.facts.get("options") or {}
        chosen = ", ".join(f"{name}={options[name]}" for name in TUNED if name in options)
        how = f"with {chosen}" if chosen else "with the defaults of its builder"
        named = f" (tuning={build.tuning})" if build.tuning else " (tuning not recorded)"
        parts.append(f"{in_words(variant)} {how}{'' if alike else named}")
    text = "; ".join(parts)
    if alike:
        return f"Every engine has tuning={names.pop()}: {text}."
    return f"The engines are not tuned alike, so the format alone does not explain their speeds: {text}."


def _undecided(best: FormatRow, rows: Sequence[FormatRow], limit: float) -> str:
    """Return why even the best eligible format is not the winner; empty if it is."""
    if not any(row is not best and row.loss_percent is not None and row.peak for row in rows):
        known_loss = "a known loss and " if any(row.peak and row.loss_percent is None for row in rows) else ""
        return (
            f"{_said(best)}. No other format has {known_loss}a usable throughput, so there is nothing to choose from."
        )
    for row in rows:
        bound = max(_bounds(row), key=_rate, default=None)
        if row is not best and bound and _acceptable(row, limit) and _rate(bound) > (best.score or 0.0):
            return (
                f"The fastest format is not decided: {_said(best)}, but {in_words(row.variant)} reached "
                f"{_rate(bound):,.0f} at {bound.load}, where the load generator was the bottleneck "
                f"({bound.client.reason}). {AGAIN}"
            )
    for row in rows:
        if row is not best and _acceptable(row, limit) and (above := _above(row.level, _bounds(row))):
            counts = f"counts only up to {row.level.load}" if row.level else "has no load that counts"
            return (
                f"The fastest format is not decided: {_said(best)}, but {in_words(row.variant)} {counts}: at "
                f"{above.load} the load generator was the bottleneck ({above.client.reason}). {AGAIN}"
            )
    for row in rows:
        others = (level.height for each in rows if each is not row for level in finished(each.run) if level.counts)
        if row is not best and not refusal(row, limit) and (ended := _cut_below(row, max(others, default=0.0))):
            return (
                f"The fastest format is not decided: {_said(best)}, but the benchmark of {in_words(row.variant)} "
                f"{ended}. Measure it again."
            )
    return ""


def _cut_below(row: FormatRow, highest: float) -> str:
    """Return how a benchmark ended early, if its best load is its highest that counts, below the others' highest."""
    result, level = row.run.result if row.run else None, row.level
    if result is None or result.complete or level is None or level.height >= highest:
        return ""
    if any(each.counts and each.height > level.height for each in result.levels):
        return ""
    return f"ended early ({result.reason}) after {level.load}, its best load so far"


def _above(level: LoadPoint | None, others: Sequence[LoadPoint]) -> LoadPoint | None:
    """Return the highest of the other levels if it is a higher load than this one, and None if it is not."""
    highest = max(others, key=lambda each: each.height, default=None)
    return highest if highest and (level is None or highest.height > level.height) else None


def _bounds(row: FormatRow) -> list[LoadPoint]:
    """Return the levels whose throughput is a lower bound of what the format can do within the limits."""
    slo = row.run.result.slo if row.run else Slo()
    return [level for level in row.limited if meets(level, slo) or not slo.limits]


def _acceptable(row: FormatRow, limit: float) -> bool:
    return row.loss_percent is not None and row.loss_percent <= limit and row.verdict != Verdict.NO_GO


def _row(item: FormatReport, run: BenchmarkRun | None) -> FormatRow:
    build = item.artifact("build")
    levels = [level for level in finished(run) if level.counts]
    loss, most, verdict = _loss(item)
    return FormatRow(
        model=item.model,
        variant=item.variant,
        accuracy=item.accuracy.result.accuracy if item.accuracy else None,
        loss_percent=loss,
        most_percent=most,
        verdict=verdict,
        engine_bytes=build.facts.get("engine_bytes") if build else None,
        run=run,
        peak=max(levels, key=_rate, default=None),
        at_slo=max((level for level in levels if run and meets(level, run.result.slo)), key=_rate, default=None),
        limited=tuple(level for level in finished(run) if level.client.bottleneck),
        fidelity=item.fidelity.result if item.fidelity else None,
    )


def _loss(item: FormatReport) -> tuple[float | None, float | None, str]:
    """Return the loss in percent of the baseline, its upper bound, and the verdict."""
    if item.accuracy is None:
        return None, None, "not measured"
    if item.accuracy.row is None:
        is_base = item.variant == BASELINE
        return (0.0, None, "baseline") if is_base else (None, None, "no baseline")
    row = item.accuracy.row
    base = row["baseline_accuracy"]
    most = 100 * row["loss_most"] / base if base and row["loss_most"] is not None else None
    return row["loss_percent"], most, str(row["verdict"])


def finished(run: BenchmarkRun | None) -> list[LoadPoint]:
    """Return the levels with finished requests, including those that do not count."""
    return [level for level in run.result.levels if level.summary.requests] if run else []


def _rate(level: LoadPoint) -> float:
    return level.summary.output_tokens_per_s


def meets(level: LoadPoint, slo: Slo) -> bool:
    """Return whether the 99th percentiles are within every limit, as MLPerf counts; False without limits.

    A metric without values (no ITL with fewer than two output tokens) meets its limit, as for goodput. A request that
    failed meets none, so that more than 1 % of them are beyond any 99th percentile.
    """
    summary = level.summary
    failed, total = _failed(level)
    if failed > 0.01 * total:
        return False
    pairs = ((summary.ttft_s, slo.ttft_ms), (summary.itl_s, slo.itl_ms), (summary.e2e_s, slo.e2e_ms))
    checked = [(metric.p99, limit) for metric, limit in pairs if limit is not None]
    return bool(checked) and all(p99 is None or 1000 * p99 <= limit for p99, limit in checked)


def refusal(row: FormatRow, limit: float) -> str:
    """Return why a format is not eligible regardless of the others; empty if it is eligible."""
    if row.loss_percent is None:
        return f"its loss is unknown ({row.verdict})"
    if row.loss_percent > limit:
        return f"loses {row.loss_percent:.2f} % of the accuracy; the limit is {limit:g} %"
    if row.verdict == Verdict.NO_GO:
        return f"NO-GO: loses {row.loss_percent:.2f} % of the accuracy, proven to be more than the margin"
    if row.run is None:
        return "it was not benchmarked"
    if not row.run.result.levels and row.run.result.complete and row.run.result.reason:
        return row.run.result.reason
    if not finished(row.run):
        return f"no request of its benchmark finished ({row.run.result.reason or 'see its errors'})"
    if row.peak is None:
        return "each of its loads was cut short or limited by the load generator"
    if row.run.result.slo.limits and row.at_slo is None:
        return "no load met the limits of the SLO at p99"
    return ""


def in_words(variant: str) -> str:
    """Return a format's name for use in a sentence."""
    return "none (16 bit)" if variant == BASELINE else variant


def _reason(best: FormatRow, limit: float, *, alone: bool) -> str:
    what = "is the only format that qualifies" if alone else "gives the most throughput"
    loss = f"loss {best.loss_percent:.2f} %" + (" (UNDECIDED)" if best.verdict == Verdict.UNDECIDED else "")
    return f"{in_words(best.variant)} {what} within an accuracy loss of {limit:g} %: {_told(best)}, {loss}."


def _told(row: FormatRow) -> str:
    level = row.level
    assert level is not None, "an eligible format has a level"
    where = f"at its best load ({level.load})"
    if row.run and len(row.run.result.levels) == 1:
        where = f"at {level.load}"
    elif level is row.at_slo:
        where = f"at its best load that meets the SLO ({level.load})"
    return f"{_rate(level):,.0f} output tokens/s {where}"


def _said(row: FormatRow) -> str:
    return f"{in_words(row.variant)} gives {_told(row)}"


def _slower(row: FormatRow, best: FormatRow) -> str:
    if not row.score or not best.score:
        return "no throughput to compare"
    return f"{row.score:,.0f} output tokens/s, {100 * (1 - row.score / best.score):.0f} % below {best.variant}"


def _choice_notes(best: FormatRow, eligible: Sequence[FormatRow], limit: float) -> list[str]:
    """Return the limitations of the choice: noise, and an accuracy that is not known well enough."""
    notes = []
    second = max((row for row in eligible if row is not best), key=lambda row: row.score or 0.0, default=None)
    if second is not None:
        first, other = (spread(row.run, row.level.load) if row.run and row.level else None for row in (best, second))
        runs = f"Repeated runs of {best.variant} and {second.variant}"
        once = [row.variant for row, ends in ((best, first), (second, other)) if ends is None]
        if first is None or other is None:
            which = "Each load was measured once per format" if len(once) > 1 else f"{once[0]} was measured once"
            notes.append(f"{which}, so the noise between runs is not known.")
        elif first[0] <= other[1]:
            rates = f"(from {first[0]:,.0f}, up to {other[1]:,.0f} output tokens/s)"
            notes.append(f"{runs} overlap {rates}: the two cannot be told apart.")
        else:
            notes.append(f"{runs} do not overlap.")
    if best.most_percent is not None and best.most_percent > limit:
        notes.append(
            f"The accuracy loss of {best.variant} may be up to {best.most_percent:.2f} % (upper bound), above the "
            f"limit of {limit:g} %: evaluate more questions to be sure."
        )
    return notes


def _failed(level: LoadPoint) -> tuple[int, int]:
    """Return how many requests of a window failed, and how many it had."""
    failed = sum(level.summary.errors.values())
    return failed, failed + level.summary.e2e_s.count


def _failures(rows: Sequence[FormatRow]) -> list[str]:
    """Return a note with the loads in which requests failed."""
    loads = [(row.variant, level, *_failed(level)) for row in rows for level in finished(row.run)]
    some = [f"{variant} at {level.load} ({part:,} of {total:,})" for variant, level, part, total in loads if part]
    return [f"Requests failed, and the figures cover the others: {', '.join(some)}."] if some else []


def load_notes(rows: Sequence[FormatRow]) -> list[str]:
    """Return which loads do not count, and why."""
    loads = [(row.variant, level) for row in rows for level in finished(row.run)]
    notes = []
    limited = [
        f"{variant} at {level.load} ({level.client.reason})" for variant, level in loads if level.client.bottleneck
    ]
    if limited:
        notes.append(
            f"Not counted, because the load generator was the bottleneck: {', '.join(limited)}. A throughput measured "
            "there is a lower bound, so a format may be faster than shown."
        )
    cut = [f"{variant} at {level.load} ({level.reason})" for variant, level in loads if not level.complete]
    if cut:
        notes.append(f"Not counted, because cut short: {', '.join(cut)}.")
    return notes
