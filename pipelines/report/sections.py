"""Compose the report's document: its content and order. The renderers only determine its appearance."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from eval.compare import against_original, method_text, sequential_text, verdict_sentence
from pipelines.document import blocks as doc
from pipelines.document.blocks import Callout, Card, Ranking, RankingStep, Table, left, right
from pipelines.document.show import NONE, count, machine_text, number, percent, versions_text, when
from pipelines.domain.benchmark import Slo
from pipelines.domain.metrics import RANKED
from pipelines.domain.units import show_bytes
from pipelines.predict.config import PriceSettings
from pipelines.report import checkpoints, fidelity, plots, plots_requests, tables, tables_load, tiles
from pipelines.report.compare import (
    AT_LEAST,
    Comparison,
    FormatRow,
    compare_formats,
    comparison,
    finished,
    load_notes,
    refusal,
)
from pipelines.report.data import (
    BenchmarkRun,
    FormatReport,
    ReportData,
    ReportedArtifact,
    Workload,
    place_of,
    run_label,
)
from pipelines.report.plots import CONVENTIONS
from pipelines.report.plots_pictures import picture_figure
from pipelines.report.stored import ReportedNumbers, attachments, side_by_side

NO_PRICES = PriceSettings()
NO_QUESTIONS = (
    "No questions were asked. `make evaluate` asks those on this machine or on the Hub,"
    " `eval=local eval.path=FILE` your own."
)
EACH_TASK = "Each task is judged by itself: the correction for several results counts those of one task."


def document(
    data: ReportData,
    max_accuracy_loss_percent: float = 1.0,
    prices: PriceSettings = NO_PRICES,
    earlier: ReportedNumbers | None = None,
) -> doc.Document:
    """Return the whole report as a document."""
    compared = comparison(data, max_accuracy_loss_percent)
    main, numbers = tiles.main_comparison(compared), ReportedNumbers.of(compared, data.newest)
    others = [item for item in compared if item is not main]
    made = partial(tiles.tiles, data, prices=prices, limits="the limits")
    first = _ranked(data, main, max_accuracy_loss_percent, made)
    further = [block for item in others for block in _ranked(data, item, max_accuracy_loss_percent)]
    sections = (
        doc.Section("formats", "Other workloads", tuple(further)),
        *([side_by_side(earlier, numbers)] if earlier else []),
        _accuracy(data),
        fidelity.section(data),
        *checkpoints.sections(data),
        *(_load(workload, data, number, len(data.workloads)) for number, workload in enumerate(data.workloads, 1)),
        _sizes(data),
        _made_from(data),
        _repeat(data),
        doc.Section("conventions", "Definitions", (doc.Terms(CONVENTIONS),)),
        _versions(data),
    )
    variants = ", ".join(dict.fromkeys(item.variant for item in data.formats))
    newest = max((each for item in data.formats for each in item.chain), key=lambda each: each.created)
    return doc.Document(
        title=" and ".join(data.models),
        subtitle=f"{variants} · newest result {when(data.newest)} · {machine_text(newest.machine)}",
        cards=tiles.tiles(data, main, prices),
        lead=_lead(data, first),
        sections=tuple(section for section in sections if section.blocks),
        files=attachments(numbers),
    )


def _lead(data: ReportData, ranked: Sequence[doc.Block]) -> tuple[doc.Block, ...]:
    blocks = list(ranked)
    for result in (run.result for run in _runs(data) if not run.result.complete):
        what, reason = f"{result.model} {result.precision}", result.reason or "no reason recorded"
        blocks.append(doc.Callout("warning", f"The benchmark of {what} is incomplete: {reason}."))
    if missing := [text for item in data.formats for text in item.missing]:
        blocks.append(doc.Callout("note", "Missing: " + " ".join(missing)))
    return tuple(blocks)


def _runs(data: ReportData) -> list[BenchmarkRun]:
    return [run for workload in data.workloads for run in workload.runs]


def _ranked(data: ReportData, item: Comparison, most_percent: float, made: "Tiles | None" = None) -> list[doc.Block]:
    notes = load_notes(item.rows)
    uncounted = [doc.Fold("Loads that do not count", (doc.BulletList(tuple(notes)),))] if notes else []
    tuning = [doc.Text(item.tuning)] if item.tuning else []
    return [ranking(data, item, most_percent, made), *tuning, *uncounted]


def _accuracy(data: ReportData) -> doc.Section:
    texts = tables.perplexities(data)
    read = [texts] if texts else []
    if not any(item.accuracy for item in data.formats):
        return doc.Section("accuracy", "Accuracy", (doc.Text(NO_QUESTIONS), *read))
    blocks: list[doc.Block] = [tables.accuracy_table(data)]
    rows = [item.accuracy.row for item in data.formats if item.accuracy and item.accuracy.row]
    if rows:
        blocks += [doc.BulletList(tuple(map(verdict_sentence, rows))), doc.Text(method_text(rows[0]))]
        blocks += [doc.Text(text)] if (text := sequential_text(rows)) else []
    originals = [item.accuracy.original for item in data.formats if item.accuracy and item.accuracy.original]
    if originals:
        blocks.append(doc.Text("Against the model itself, computed by Transformers in float32 before any conversion:"))
        blocks.append(doc.BulletList(tuple(map(against_original, originals))))
    if table := tables.other_tasks_table(data):
        judged = [each.row for item in data.formats for each in item.other_tasks if each.row]
        sentences = tuple(f"{row['task']}: {verdict_sentence(row)}" for row in judged)
        blocks.append(table)
        blocks += [doc.BulletList(sentences), doc.Text(EACH_TASK)] if sentences else []
    blocks += [*tables.published_tables(data), *read]
    if figure := plots.accuracy_change(data.formats):
        blocks.append(figure)
    blocks += [figure for model in data.models if (figure := picture_figure(data, model))]
    for model in data.models:
        if table := tables.subject_table([item for item in data.formats if item.model == model]):
            blocks.append(doc.Fold(f"By category and subject: {model}", (table,)))
    return doc.Section("accuracy", "Accuracy", tuple(blocks))


def _load(workload: Workload, data: ReportData, position: int, count: int) -> doc.Section:
    order = list(dict.fromkeys(item.variant for item in data.formats))
    tail = "" if position == 1 else f"-{position}"
    blocks: list[doc.Block] = tables_load.protocol(workload)
    overview = (
        plots.throughput_latency(workload, order, f"throughput_latency{tail}"),
        plots.ttft_throughput(workload, order, f"ttft_throughput{tail}"),
    )
    blocks += [figure for figure in overview if figure]
    for run in workload.runs:
        blocks += [table for table in (tables_load.levels_table(run), tables_load.modelled_table(run)) if table]
        blocks += _details(run, tail)
    model = f"{workload.model}, " if len(data.models) > 1 else ""
    title = "Under load" if count == 1 else f"Under load: {model}{workload.title}"
    return doc.Section(f"load{tail}", title, tuple(blocks))


def _details(run: BenchmarkRun, tail: str) -> list[doc.Block]:
    """Return distributions and a timeline of one run, and the server's and the client's own counters."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", run.result.precision)
    figures: list[doc.Figure | None] = [plots_requests.distributions(run, f"distributions{tail}-{name}")]
    levels = finished(run)
    if levels:
        busy = max(levels, key=lambda level: level.summary.output_tokens_per_s)
        figures.append(plots_requests.timeline(run, busy, f"timeline{tail}-{name}"))
    blocks: list[doc.Block] = [*(figure for figure in figures if figure), tables_load.percentiles_table(run)]
    if table := tables_load.counters_table(run):
        blocks.append(table)
    return [doc.Fold(f"{run.result.precision}: distributions, timeline, all percentiles, counters", tuple(blocks))]


def _sizes(data: ReportData) -> doc.Section:
    figure = plots.sizes(data.formats)
    memory = [table for table in (tables.build_memory_table(data), tables.memory_table(data)) if table]
    return doc.Section("sizes", "Sizes and memory", (*([figure] if figure else []), tables.size_table(data), *memory))


def _made_from(data: ReportData) -> doc.Section:
    blocks: list[doc.Block] = [
        doc.Text("Every artifact is identified by the digest of its content; each row was made from the rows above it.")
    ]
    for item in data.formats:
        blocks.append(tables.chain_table(item))
        if item.accuracy and item.accuracy.baseline:
            blocks.append(doc.Text(f"Its accuracy is compared with {item.accuracy.baseline}, question by question."))
        elsewhere = [run.artifact.place for run in item.runs if run.artifact.place not in {p.place for p in item.chain}]
        if elsewhere:
            blocks.append(doc.Text(f"Also shown: {', '.join(elsewhere)}."))
        if item.left_out:
            blocks.append(doc.Fold(f"Not used: {len(item.left_out)}", (doc.BulletList(item.left_out),)))
    return doc.Section("made-from", "Provenance", tuple(blocks))


def _repeat(data: ReportData) -> doc.Section:
    """List the commands that produce everything shown, each once, then the command of this report."""
    repeated = [each for item in data.formats for each in _repeated(item)] + [each.artifact for each in data.bounds]
    commands = list(dict.fromkeys(each.repeat for each in sorted(repeated, key=lambda each: each.created)))
    created = {
        artifact.commit for item in data.formats for artifact in (*item.chain, *(run.artifact for run in item.runs))
    }
    newest = shlex.split(commands[-1]) if commands else []
    overrides = [
        word for word in newest if word.startswith(("experiment=", "model=", "model.", "paths.store=", "report."))
    ]
    blocks: list[doc.Block] = [
        doc.Text(
            "Each command makes all artifacts that it needs and takes finished ones from the store; benchmarks are "
            "always measured again. To make everything anew, use an empty store: paths.store=FOLDER in every command."
        ),
        doc.Code((*commands, shlex.join(["python", "-m", "pipelines", "report", *overrides]))),
    ]
    if any(commit.endswith("+changes") for commit in created):
        blocks.append(doc.Text("The source had uncommitted changes, so no commit alone repeats these results."))
    if outside := sorted({place_of(source) for item in data.formats for artifact in item.chain
                          for source in artifact.inputs if not source.in_store}):  # fmt: skip
        blocks.append(doc.Text(f"From outside the store, and needed again: {', '.join(outside)}."))
    return doc.Section("repeat", "How to reproduce", tuple(blocks))


def _repeated(item: FormatReport) -> list[ReportedArtifact]:
    """Return the artifacts whose commands make all others of a format: what was measured, else the last stage.

    The command of a benchmark builds its engine and repository; `all` with the same questions evaluates too.
    """
    artifacts = [run.artifact for run in item.runs]
    evaluation = item.artifact("evaluate")
    if evaluation:
        questions = _questions(shlex.split(evaluation.repeat))
        commands = [shlex.split(artifact.repeat) for artifact in artifacts]
        if not any("all" in words[3:4] and _questions(words) == questions for words in commands):
            artifacts.append(evaluation)
    return [*artifacts, *item.beside] or list(item.chain[-1:])


def _questions(words: Sequence[str]) -> list[str]:
    """Return the settings of a command that say which questions are asked."""
    return [word for word in words[4:] if word.startswith("eval")]


def _versions(data: ReportData) -> doc.Section:
    artifacts = [artifact for item in data.formats for artifact in (*item.chain, *(run.artifact for run in item.runs))]
    items = [
        ("this project", ", ".join(sorted({f"{artifact.version} at {artifact.commit}" for artifact in artifacts})))
    ]
    items += versions_text(
        (*(artifact.libraries for artifact in artifacts), *(run.result.versions for run in _runs(data)))
    )
    machines = dict.fromkeys(machine_text(artifact.machine) for artifact in artifacts)
    items += [("machine", text) for text in machines]
    return doc.Section("versions", "Versions and machines", (doc.Terms(tuple(items)),))


# Rank the formats of a workload again under every TTFT limit that changes something, at each load or the best.
#
# All steps are computed here, by the rules of `pipelines.report.compare`: the page only looks one up.

BEST = "each format at its best load"
NO_TTFT = (
    "There is no slider for a TTFT limit, because no time to first token was measured: the answers were not streamed."
)
NO_LOAD = "The formats cannot be ranked by a TTFT limit, because no latency was measured: `make benchmark`."

Tiles = Callable[[Comparison], tuple[Card, ...]]


def ranking(data: ReportData, compared: Comparison, most_percent: float, tiles: Tiles | None = None) -> Ranking:
    """Return the ranking of a comparison; without loads it has one step, and says why.

    Args:
        data: result of `pipelines.report.collect`.
        compared: its comparison under one workload.
        most_percent: acceptable loss, percent of the baseline's accuracy.
        tiles: makes the first screen of a comparison; None leaves the first screen alone.
    """
    levels = [level for row in compared.rows for level in finished(row.run)]
    loads = dict.fromkeys(level.load for level in levels)
    slo = next((row.run.result.slo for row in compared.rows if row.run), Slo())
    others = {name: limit for name, limit in slo.limits.items() if name != "ttft"}
    hints = [f"{name.upper()} p99 stays limited to {limit:g} ms." for name, limit in others.items()]
    if not any(level.summary.ttft_s.p99 for level in levels):
        hints = [*hints, NO_TTFT] if levels else [NO_LOAD]
    return Ranking(
        limit="TTFT p99",
        unit="ms",
        views=tuple(
            (load or BEST, tuple(_steps(data, compared, most_percent, load, tiles)))
            for load in ([None, *loads] if len(loads) > 1 else [None])
        ),
        start=slo.ttft_ms,
        hint=" ".join(hints),
    )


def _steps(
    data: ReportData, comparison: Comparison, most_percent: float, load: str | None, tiles: Tiles | None
) -> Iterator[RankingStep]:
    """Yield a step for each limit at which something changes; the last has no limit."""
    levels = [level for row in comparison.rows for level in finished(row.run) if load in (None, level.load)]
    ends = sorted({1000 * level.summary.ttft_s.p99 for level in levels if level.summary.ttft_s.p99})
    before: RankingStep | None = None
    for limit in [*([0.0, *ends] if ends else []), None]:
        workload = comparison.workload
        if workload is not None:
            workload = replace(workload, runs=tuple(_limited(run, load, limit) for run in workload.runs))
        compared = compare_formats(data, workload, comparison.model, most_percent)
        answer = Callout("good" if compared.chosen else "note", compared.reason)
        step = RankingStep(limit, answer, _table(compared, load, most_percent), tiles(compared) if tiles else ())
        if limit is None or before is None or replace(step, at=before.at) != before:
            yield (before := step)


def _limited(run: BenchmarkRun, load: str | None, limit: float | None) -> BenchmarkRun:
    """Return a run as if it had been measured at one load and with this limit, ms; None is every load, no limit."""
    levels = tuple(level for level in run.result.levels if load in (None, level.load))
    timed = tuple(level for level in levels if limit is None or level.summary.ttft_s.p99 is not None)
    result = replace(run.result, levels=timed, slo=replace(run.result.slo, ttft_ms=limit))
    if run.result.levels and not timed:
        why = "its TTFT was not measured" if levels else f"it was not measured at {load}"
        result = replace(result, complete=True, reason=why)
    elif load and all(level.complete for level in timed):
        result = replace(result, complete=True)
    return replace(run, result=result)


def _table(compared: Comparison, load: str | None, most_percent: float) -> Table:
    """Return the formats that qualify by throughput, then the others; only a decided order has ranks."""
    fit = [row for row in compared.rows if not refusal(row, most_percent)]
    fit.sort(key=lambda row: row.score or 0.0, reverse=True)
    others = [row for row in compared.rows if row not in fit]
    runs = [row.run for row in compared.rows if row.run and row.run.result.levels]
    rows = tuple(
        (
            row.variant,
            str(rank) if compared.chosen and row in fit else NONE,
            *_figures(row, load),
            percent(row.accuracy),
            NONE if row.loss_percent is None else f"{row.loss_percent:.2f}",
            row.verdict,
            NONE if row.engine_bytes is None else show_bytes(row.engine_bytes),
            compared.rejected.get(row.variant, ""),
        )
        for rank, row in enumerate([*fit, *others], 1)
    )
    first, *times = RANKED
    where = f"{run_label(runs)}; engine {runs[0].result.engine}" if runs else f"model {compared.model}"
    hint = f"; {AT_LEAST}: higher loads do not count" if any(AT_LEAST in cell for row in rows for cell in row) else ""
    workload = f" under the workload {compared.workload.title}" if compared.workload else ""
    return Table(
        caption=f"Formats by {first.title}{workload}, ranked if they lose at most {most_percent:g} %: {where}{hint}",
        origin="measured",
        columns=(
            *left("format"),
            *right("rank", first.column, "load", *(figure.title for figure in times), "accuracy %", "loss %"),
            *left("verdict"),
            *right("engine"),
            *left("why not"),
        ),
        rows=rows,
        strong=0 if compared.chosen else None,
        notes=_notes(compared),
    )


def _notes(compared: Comparison) -> tuple[str, ...]:
    """Return the limitations of the choice, and how many loads do not count: the report lists them below."""
    uncounted = sum(not level.counts for row in compared.rows for level in finished(row.run))
    listed = load_notes(compared.rows)
    more = (
        (f"{count(uncounted, 'load')} not counted: cut short or limited by the load generator.",) if uncounted else ()
    )
    return (*(note for note in compared.notes if note not in listed), *more)


def _figures(row: FormatRow, load: str | None) -> list[str]:
    """Return throughput, load and latencies at the load that counts; at a given load even if it does not qualify."""
    level, mark = row.level, row.slo_mark if row.level is row.at_slo else row.peak_mark
    if level is None and load:
        level, mark = row.peak or next(iter(row.limited), None), "" if row.peak else AT_LEAST
    if level is None:
        return [NONE] * (len(RANKED) + 1)
    first, *times = (number(figure.shown(figure.of(level.summary))) for figure in RANKED)
    return [mark + first, level.label, *times]
