"""Build the trend report from verdict and history, using the blocks shared by all reports."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eval.verdict import Verdict
from pipelines.document import blocks as doc
from pipelines.document.canvas import Theme, dash, marker, plot
from pipelines.document.show import NONE, count, machine_text, number, percent, versions_text, when
from pipelines.domain.metrics import NIGHTLY_TABLE, TRENDS
from pipelines.nightly.accuracy import Record, limit_verdict, measured_loss, named, scale, shown, title
from pipelines.nightly.config import NightlySettings
from pipelines.nightly.sentences import History, HistoryContents, by_reason, causes, headline
from pipelines.nightly.verdict import LEAST_NIGHTS, NightVerdict, Series

if TYPE_CHECKING:
    from pipelines.document.canvas import Axes, Drawing

# Draw one picture per cell: throughput, latencies and accuracy over the nights, with the limits.

SHOWN_NIGHTS = 60
_PANELS = tuple(figure.key for figure in TRENDS)
Line = tuple[str, list[float | None], Series | None]


def cell_trend(record: Record, lines: Sequence[Series], name: str) -> doc.Figure | None:
    """Draw the trend of one cell; return None if none of its metrics is judged."""
    if not lines:
        return None
    nights = lines[0].nights[-SHOWN_NIGHTS:]
    panels = [(base, drawn) for base in _PANELS if (drawn := _lines(base, record, lines, nights))]
    if not panels:
        return None

    loads = [str(load["load"]) for load in record.measurements[-1]]

    def draw(figure: "Drawing", theme: Theme) -> None:
        rows = (len(panels) + 1) // 2
        grid = figure.subplots(rows, 2, squeeze=False)
        for place in range(2 * rows):
            axes = grid[place // 2][place % 2]
            if place < len(panels):
                _panel(axes, *panels[place], nights, theme, loads)
            else:
                axes.set_axis_off()
        names = {
            name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if len(names) > 1:
            figure.legend(names.values(), names, loc="outside lower center", ncols=5, fontsize=7, frameon=False)

    run_label = (
        f"model {record.model}; precision {record.precision}; ISL {_mean(record, 'isl')}; OSL {_mean(record, 'osl')}; "
        f"{', '.join(loads)}; TP {record.tp_size}"
    )
    return plot(
        name,
        (7.2, 2.1 * ((len(panels) + 1) // 2)),
        draw,
        title=record.cell,
        caption=(
            f"{count(len(nights), 'night')} on {record.machine_class}. Dashed: limit beyond which tonight counts as "
            f"worse. Cross: judged worse. Measured: {run_label}; engine {record.engine}."
        ),
        alt=f"Trend of {record.cell}: "
        + "; ".join(_in_words(line) for line in lines if line.metric.split()[0] in _PANELS),
    )


def _lines(base: str, record: Record, lines: Sequence[Series], nights: Sequence[Record]) -> list[Line]:
    """Return (load, values over the nights shown, series) of one panel."""
    if base == "accuracy":
        return [("", [night.metrics.get("accuracy") for night in nights], None)] if record.accuracy else []
    named_lines = [(line.metric.partition(" at "), line) for line in lines]
    return [(load, list(line.values[-len(nights) :]), line) for (name, _, load), line in named_lines if name == base]


def _panel(
    axes: "Axes", base: str, lines: Sequence[Line], nights: Sequence[Record], theme: Theme, loads: Sequence[str]
) -> None:
    """Draw one metric; a load has the same look in every panel."""
    factor = scale(base)
    for load, values, line in lines:
        index = loads.index(load) if load in loads else 0
        points = [(x, factor * value) for x, value in enumerate(values) if value is not None]
        colour = theme.series(index)
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=colour, linewidth=1.3, linestyle=dash(index),
            marker=marker(index), markersize=3.2, label=load or None,
        )  # fmt: skip
        if line is None:
            continue
        limit = line.judged[-1].limit
        if limit is not None:
            axes.axhline(factor * limit, color=theme["bad"], linewidth=0.8, linestyle=(0, (4, 3)))
        bad = [(x, y) for x, y in points if line.judged[len(line.judged) - len(values) + x].state == "worse"]
        axes.plot([x for x, _ in bad], [y for _, y in bad], linestyle="", marker="x", color=theme["bad"], markersize=7)
    axes.set_title(title(base))
    axes.margins(x=0.03, y=0.15)
    if base == "accuracy":
        shares = [100 * value for _, values, _ in lines for value in values if value is not None]
        axes.set_ylim(min(shares) - 1, min(max(shares) + 1, 100.2))
    else:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    last = len(nights) - 1
    ticks = sorted({round(last * part / 3) for part in range(4)})
    axes.set_xticks(ticks, [nights[tick].at[5:10] for tick in ticks])


def _mean(record: Record, name: str) -> str:
    values = [float(load[name]) for load in record.measurements[-1] if load[name] is not None]
    return f"{sum(values) / len(values):.0f}" if values else "–"


def _in_words(line: Series) -> str:
    before = line.judged[-1].before
    was = f", {shown(line.metric, before)} before" if before is not None else ""
    return f"{title(line.metric)} {shown(line.metric, line.values[-1])}{was}"


def trend_document(
    history: History, read: HistoryContents, verdict: NightVerdict, settings: NightlySettings
) -> doc.Document:
    """Build the trend report of one run."""
    first = verdict.records[0]
    versions = versions_text({"this project": record.commit, **record.versions} for record in verdict.records)
    machines = [("machine", text) for text in dict.fromkeys(machine_text(each.machine) for each in verdict.records)]
    sections = (
        doc.Section("tonight", "Tonight", tuple(_tonight(verdict, settings))),
        doc.Section("trends", "Trends", tuple(_trends(verdict))),
        doc.Section("not-measured", "Not measured", tuple(_not_measured(verdict))),
        doc.Section("judged", "Every comparison", tuple(_judged(verdict))),
        doc.Section("method", "How a night is judged", (doc.Terms(_method(settings, verdict)),)),
        doc.Section("versions", "Versions and machine", (doc.Terms((*versions, *machines)),)),
    )
    commits = ", ".join(dict.fromkeys(record.commit[:12] for record in verdict.records))
    return doc.Document(
        title=f"Nightly {settings.name}",
        subtitle=f"{when(max(r.at for r in verdict.records))} · commit {commits} · {first.machine_class}",
        cards=_cards(verdict, settings),
        lead=tuple(_lead(history, read, verdict)),
        sections=tuple(section for section in sections if section.blocks),
        kind="Nightly report",
        source="the history",
    )


def _cards(verdict: NightVerdict, settings: NightlySettings) -> tuple[doc.Card, ...]:
    done = [record for record in verdict.records if record.status == "done"]
    rates = [
        line for line in verdict.series if line.metric.startswith(NIGHTLY_TABLE[0].key) and _change(line) is not None
    ]
    refused = sum(record.status == "not possible" for record in verdict.records)
    worst = min(rates, key=lambda line: _change(line) or 0.0, default=None)
    measured = {record.cell: measured_loss(record, settings.expect, verdict.chance(settings)) for record in done}
    losses = {cell: loss for cell, loss in measured.items() if loss is not None}
    cell = max(losses, key=losses.__getitem__, default=None)
    return (
        doc.Card("Regressions", str(len(verdict.regressions)), "", f"{verdict.questions} comparisons", "measured"),
        doc.Card(
            "Cells measured", f"{len(done)} of {len(verdict.records)}", "",
            f"{len(verdict.failures)} failed, {refused} not possible here", "recorded",
        ),
        doc.Card("Lowest throughput against before", f"{_change(worst):+z.1f}", "%", worst.cell, "measured")
        if worst
        else doc.Card("Throughput against before", "not yet known", "", "too few nights", ""),
        doc.Card("Largest accuracy loss", f"{losses[cell]:.2f}", "%", f"{cell}, against 16 bit", "measured")
        if cell
        else doc.Card("Accuracy", "not measured", "", "", ""),
    )  # fmt: skip


def _lead(history: History, read: HistoryContents, verdict: NightVerdict) -> list[doc.Block]:
    blocks: list[doc.Block] = []
    for cause in causes(history, verdict.regressions):
        blocks.append(doc.Callout("warning", cause.text))
        blocks += [doc.BulletList(cause.items)] if cause.items else []
    blocks += [doc.Callout("warning", f"{cells}: {reason}") for cells, reason in by_reason(verdict.failures)]
    blocks.append(doc.Callout("note" if blocks else "good", headline(verdict)))
    return blocks + [doc.Callout("note", note) for note in read.notes]


def _tonight(verdict: NightVerdict, settings: NightlySettings) -> list[doc.Block]:
    done = [record for record in verdict.records if record.status == "done"]
    if not done:
        return [doc.Text("No cell was measured.")]
    lines = {(line.cell, line.metric): line for line in verdict.series}
    worse = {regression.cell for regression in verdict.regressions}
    columns = (
        *doc.left("cell", ""), *doc.right("ISL", "OSL"), *doc.left("load"),
        doc.Column("%", "accuracy"), doc.Column("loss %", "accuracy"), doc.Column("limit", "accuracy", right=False),
        *(doc.Column(name, figure.title) for figure in NIGHTLY_TABLE for name in ("now", "change %")),
        *doc.right("engine, MiB"),
    )  # fmt: skip
    verdicts = {record.key: limit_verdict(record, settings.expect, verdict.chance(settings)) for record in done}
    rows = [row for record in done for row in _rows(record, lines, record.cell in worse, verdicts[record.key])]
    note = (
        "Change is relative to the median of earlier nights; a dash means not yet known. Of repeated measurements the"
        " median is shown."
    )
    tps = ", ".join(str(tp) for tp in dict.fromkeys(record.tp_size for record in done))
    caption = f"Every cell of this run, by model, precision and workload; TP {tps}; engine {done[0].engine}"
    return [doc.Table(caption, "measured", columns, tuple(rows), None, (note,))]


def _rows(
    record: Record, lines: dict[tuple[str, str], Series], worse: bool, word: Verdict | None
) -> list[tuple[str, ...]]:
    """Make one row per load; the first row also contains the values that the loads share."""
    rows = []
    for place, load in enumerate(record.measurements[-1]):
        cells = []
        for figure in NIGHTLY_TABLE:
            metric = f"{figure.key} at {load['load']}"
            value = record.metrics.get(metric)
            change = _change(lines.get((record.cell, metric)))
            cells += [number(figure.shown(value)), NONE if change is None else f"{change:+z.1f}"]
        accuracy = record.accuracy or {}
        lost = None if word is Verdict.NOT_MEASURED else accuracy.get("loss_percent")
        loss = (percent(accuracy.get("accuracy")), NONE if lost is None else f"{lost:.2f}", str(word or NONE))
        shared = loss if not place else ("",) * len(loss)
        size = number(record.sizes.get("engine_bytes", 0) / 2**20 or None) if not place else ""
        state = ("worse" if worse else "") if not place else ""
        name = record.cell if not place else ""
        lengths = tuple(NONE if load[name] is None else f"{load[name]:.0f}" for name in ("isl", "osl"))
        rows.append((name, state, *lengths, str(load["load"]), *shared, *cells, size))
    return rows


def _change(line: Series | None) -> float | None:
    """Return the change of the last night relative to the median before, in percent."""
    if line is None or line.judged[-1].before is None or line.values[-1] is None:
        return None
    return 100 * (line.values[-1] / line.judged[-1].before - 1)


def _trends(verdict: NightVerdict) -> list[doc.Block]:
    """Draw a picture per cell: cells that got worse are shown, the others folded by model."""
    worse = {regression.cell for regression in verdict.regressions}
    figures: dict[str, list[doc.Figure]] = {}
    blocks: list[doc.Block] = []
    for number_, record in enumerate((r for r in verdict.records if r.status == "done"), 1):
        figure = cell_trend(record, [line for line in verdict.series if line.cell == record.cell], f"trend-{number_}")
        if figure is not None and record.cell in worse:
            blocks.append(figure)
        elif figure is not None:
            figures.setdefault(record.model, []).append(figure)
    for model, plots in figures.items():
        if len(plots) == 1:
            blocks += plots
        else:
            blocks.append(doc.Fold(f"{model}: {len(plots)} cells", tuple(plots)))
    return blocks


def _not_measured(verdict: NightVerdict) -> list[doc.Block]:
    """List the cells without a result, cells with the same reason together."""
    rows = []
    for status in ("failed", "not possible"):
        cells = [(record.cell, record.reason) for record in verdict.records if record.status == status]
        rows += [(names, status, reason) for names, reason in by_reason(cells)]
    if not rows:
        return []
    columns = doc.left("cells", "status", "reason")
    return [doc.Table("Cells without a result", "recorded", columns, tuple(rows))]


def _judged(verdict: NightVerdict) -> list[doc.Block]:
    columns = (*doc.left("cell", "metric"), *doc.right("nights", "before", "now", "limit"), *doc.left(""))  # fmt: skip
    rows = tuple(
        (
            line.cell,
            named(line.metric),
            str(sum(value is not None for value in line.values)),
            shown(line.metric, line.judged[-1].before),
            shown(line.metric, line.values[-1]),
            shown(line.metric, line.judged[-1].limit),
            line.judged[-1].state,
        )
        for line in verdict.series
    )
    if not rows:
        return []
    table = doc.Table("Tonight against the nights before", "measured", columns, rows)
    return [doc.Fold(f"{len(rows)} series", (table,))]


def _method(settings: NightlySettings, verdict: NightVerdict) -> tuple[tuple[str, str], ...]:
    expect = settings.expect
    floors = ", ".join(f"{named(name)} {value:g} %" for name, value in expect.floor_percent.items())
    limits = ", ".join(f"{name} {value:g} %" for name, value in expect.accuracy_loss_percent.items())
    accepted = "; ".join(f"{a.cell}, {a.metric}, since {a.since}: {a.reason}" for a in expect.accepted)
    return (
        ("compared", "Only with nights of the same cell, machine class and protocol."),
        (
            "noise",
            f"Student's t of logarithms over the first {settings.window} nights of a level, at least "
            f"{LEAST_NIGHTS}. All "
            f"{verdict.questions} comparisons of this run together report an unchanged system as worse in "
            f"{100 * settings.false_alarms:g} % of runs. A cell that looks worse is measured up to "
            f"{settings.confirmations} times more, and the median counts.",
        ),
        ("jump, shift", "Worse means that tonight alone, or the last four nights together, are beyond their limit."),
        ("until repaired", "Later nights are not compared with a worse night."),
        ("floors", f"Smaller changes never count: {floors}."),
        ("accuracy loss", f"Limits against 16 bit, for losses proven to be larger (NO-GO): {limits or 'none'}."),
        ("accepted", accepted or "nothing"),
        ("pinned", "; ".join(f"{p.cell}, {p.metric}: {p.worst:g} ({p.reason})" for p in expect.pinned) or "nothing"),
    )
