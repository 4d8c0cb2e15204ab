"""The first screen of a report: what the chosen format saves, loses, serves and costs; else what there is."""

import math
from collections.abc import Sequence
from dataclasses import replace

from eval.compare import in_points
from eval.verdict import Verdict
from pipelines.document.blocks import Card
from pipelines.document.show import count, ms, number, percent
from pipelines.domain.benchmark import BenchmarkResult, LoadPoint, Summary
from pipelines.domain.units import show_bytes
from pipelines.engines.registry import ENGINES, runs_on_cpu
from pipelines.host.machine import GpuFacts
from pipelines.predict.config import PriceSettings
from pipelines.predict.performance.gpus import row_of
from pipelines.predict.sizing.fleet import HOURS, server_year
from pipelines.report.compare import Comparison, FormatRow
from pipelines.report.data import BASELINE, ReportData
from pipelines.report.plots import what_was_asked
from pipelines.report.tables_load import slo_text


def main_comparison(compared: Sequence[Comparison]) -> Comparison:
    """Return the comparison under the workload that most formats were measured under."""
    return max(compared, key=lambda item: len(item.workload.runs) if item.workload else 0)


def tiles(data: ReportData, main: Comparison, prices: PriceSettings, limits: str | None = None) -> tuple[Card, ...]:
    """Return the tiles of a report.

    Args:
        data: result of `pipelines.report.collect`.
        main: the comparison that they answer for.
        prices: as given; without any there is no tile of a price.
        limits: what the limits are called; None names each with its value.
    """
    chosen = next((row for row in main.rows if row.variant == main.chosen), None)
    made = (_size(main, chosen), _loss(data, chosen)) if chosen else (_engines(data), _accuracy(data))
    return *made, *_load(main, prices, limits)


def _engines(data: ReportData) -> Card:
    built = [artifact for item in data.formats if (artifact := item.artifact("build"))]
    sizes = [int(artifact.facts["engine_bytes"]) for artifact in built if artifact.facts.get("engine_bytes")]
    ends = dict.fromkeys(show_bytes(size) for size in (min(sizes), max(sizes))) if sizes else {}
    between = f"{' to '.join(ends)} on disk" if ends else "no engine"
    engines = ", ".join(sorted({str(artifact.settings.get("engine", "unknown")) for artifact in built})) or "none"
    return Card("Engines built", str(len(built)), "", f"{engines}; {between}", "recorded")


def _size(main: Comparison, chosen: FormatRow) -> Card:
    size = chosen.engine_bytes
    base = next((row.engine_bytes for row in main.rows if row.variant == BASELINE), None)
    if chosen.variant == BASELINE and size:
        return Card("Engine", show_bytes(size), "", "16 bit, so nothing is saved", "recorded")
    if not (size and base):
        size_text = f"{chosen.variant}: {show_bytes(size)}" if size else f"no size of {chosen.variant} is recorded"
        return Card(
            "Size saved", "unknown", "", f"{size_text}; no 16-bit engine to compare" if size else size_text, "recorded"
        )
    detail = f"{chosen.variant}: {show_bytes(size)} instead of {show_bytes(base)} in 16 bit"
    return Card("Size saved", f"{100 * (1 - size / base):.0f} %", "", detail, "recorded")


def _loss(data: ReportData, chosen: FormatRow) -> Card:
    if chosen.variant == BASELINE:
        return Card("Loss of accuracy", "none", "", "16 bit is the baseline", "measured")
    row = next(
        item.accuracy.row
        for item in data.formats
        if (item.model, item.variant) == (chosen.model, chosen.variant) and item.accuracy
    )
    assert row is not None, "a format without a known loss is not chosen"
    bound = "no upper bound" if chosen.most_percent is None else f"at most {chosen.most_percent:.2f} %"
    detail = f"{chosen.variant} {chosen.verdict}: {bound}; {what_was_asked([row])}, paired with 16 bit"
    return Card("Loss of accuracy", f"{chosen.loss_percent:.2f} %", "", detail, "measured")


def _accuracy(data: ReportData) -> Card:
    rows = [(item, item.accuracy.row) for item in data.formats if item.accuracy and item.accuracy.row]
    if not rows:
        evaluated = [item for item in data.formats if item.accuracy]
        if not evaluated or not evaluated[0].accuracy:
            return Card("Accuracy", "not measured", "", "make evaluate", "")
        result = evaluated[0].accuracy.result
        evaluation = f"{evaluated[0].label}, {result.task}, {count(result.questions, 'question')}"
        compressed = any(item.variant != BASELINE for item in evaluated)
        lacks = "16-bit model with the same questions" if compressed else "compressed format"
        detail = f"{evaluation}; no {lacks} to compare"
        return Card("Accuracy", percent(result.accuracy), "%", detail, "measured")
    passed = [item for item, row in rows if row["verdict"] == Verdict.GO]
    lost = [
        f"{item.variant} NO-GO, at least {100 * row['loss_least']:.2f} points lost"
        for item, row in rows
        if row["verdict"] == Verdict.NO_GO
    ]
    details = [
        f"{', '.join(variants)} {word}"
        for word in (Verdict.UNDECIDED, Verdict.NOT_MEASURED)
        if (variants := [item.variant for item, row in rows if row["verdict"] == word])
    ]
    evaluation = f"{what_was_asked([row for _, row in rows])}, paired with 16 bit"
    detail = "; ".join([*lost, *details, evaluation])
    title = f"GO: less than {in_points(rows[0][1]['margin'])} lost"
    return Card(title, f"{len(passed)} of {len(rows)}", "formats", detail, "measured")


def _load(main: Comparison, prices: PriceSettings, limits: str | None) -> list[Card]:
    """Show the best throughput, its price, and the latency at the lightest load."""
    rows = [row for row in main.rows if row.run and row.peak]
    if not rows and any(row.run for row in main.rows):
        return [Card("Throughput", "no load counts", "", "each was cut short or limited by the load generator", "")]
    if not rows:
        return [Card("Throughput", "not measured", "", "make benchmark", "")]
    eligible = [row for row in rows if row.variant == main.chosen or row.variant not in main.rejected]
    best = max(eligible or rows, key=lambda row: row.score or 0.0)
    level = best.at_slo or best.peak
    assert best.run is not None, "rows without a run were left out"
    assert level is not None, "rows without a level were left out"
    result = best.run.result
    light = next(level for level in result.levels if level.counts)
    named = limits or f"the SLO {slo_text(result.slo)}"
    rate, where = number(level.summary.output_tokens_per_s), f"{best.variant} at {level.load}"
    unfit = "" if eligible else f"; {main.rejected[best.variant]}"
    throughput = Card("Throughput", rate, "output tokens/s", f"{where}{unfit}", "measured")
    if result.slo.limits and best.at_slo:
        throughput = replace(throughput, detail=f"{where}, within {named}{unfit}")
    elif result.slo.limits:
        outside = f"outside {named}, {rate} output tokens/s: {where}{unfit}"
        throughput = Card("Throughput", "no load fits", "", outside, "measured")
    price = [_price(best, level, result, prices)] if prices.server_usd or prices.gpu_hour_usd else []
    return [throughput, _first_token(f"{best.variant} at {light.load}", light.summary), *price]


def _first_token(where: str, summary: Summary) -> Card:
    title, first, gap = "Time to first token", summary.ttft_s.p50, summary.itl_s.p50
    if first is None:
        return Card(title, "not measured", "", f"{where}: answers came as a whole, or without text", "")
    return Card(title, ms(first), "ms median", where + (f"; then {ms(gap)} ms per token" if gap else ""), "measured")


def _price(row: FormatRow, level: LoadPoint, result: BenchmarkResult, prices: PriceSettings) -> Card:
    """Return the price of output tokens on a machine that is always as busy as at this load."""
    hour, what = usd_per_hour(result, prices)
    unit, rate = "USD per million output tokens", level.summary.output_tokens_per_s
    if hour is None or not rate:
        return Card("Price", "unknown", "", what, "")
    detail = f"{row.variant}, always as busy as at {level.load}; {what}: {number(hour)} USD an hour"
    return Card("Price", number(1e6 * hour / (3600 * rate)), unit, detail, "")


def usd_per_hour(result: BenchmarkResult, prices: PriceSettings) -> tuple[float | None, str]:
    """Return USD per hour of what served a benchmark, and what that is; None and why if it is not known."""
    if result.engine not in ENGINES:
        return None, "the machine of a server elsewhere is not known"
    if runs_on_cpu(result.engine):
        if prices.server_usd is None or isinstance(prices.server_usd, dict):
            return None, "it ran on a CPU, and the price given is that of a GPU"
        parts, _ = server_year(prices, 0, None)
        return sum(usd for _, usd in parts) / HOURS, "one server"
    gpus = result.machine.get("gpus") or ()
    row = row_of(GpuFacts(gpus[0]["name"], gpus[0]["sm"], gpus[0]["memory_bytes"])) if gpus else None
    own = prices.of(row.name if row else "")
    if isinstance(own.gpu_hour_usd, int | float):
        return own.gpu_hour_usd * result.gpus, count(result.gpus, "GPU")
    if not isinstance(own.server_usd, int | float):
        return None, f"no price is given for {gpus[0]['name'] if gpus else 'its GPU, which is not recorded'}"
    if row is None or not row.gpus_per_server:
        return None, "the GPUs of one server are not known"
    servers = math.ceil(result.gpus / row.gpus_per_server)
    parts, _ = server_year(own, row.gpus_per_server, row.tdp_w)
    return servers * sum(usd for _, usd in parts) / HOURS, count(servers, "whole server")
