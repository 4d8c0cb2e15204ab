"""Measure one server under every level of load."""

import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count as count_from
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from string import ascii_letters
from typing import Any

from scipy.special import stdtrit

from pipelines.document.show import count, number, percent
from pipelines.domain.benchmark import RESULT, BenchmarkResult, LargestLoad, LoadPoint, Slo
from pipelines.domain.errors import UserError, refuse
from pipelines.domain.metrics import PROGRESS, TERMINAL, MetricStatistic
from pipelines.domain.summary import CONVENTIONS, summarise
from pipelines.host.files import replacing, write_json
from pipelines.host.machine import cpu_count, library_versions
from pipelines.host.screen import table, width, wrapped
from pipelines.loadgen.client_processes import ClientProcesses, processes_for
from pipelines.loadgen.config import (
    AUTO_PER_USER,
    AUTO_REQUESTS,
    AUTO_SECONDS,
    DEFAULT_MODEL,
    SEEING_MODEL,
    BenchmarkSettings,
    WorkloadSettings,
    load_faults,
)
from pipelines.loadgen.health import cold_note, growth_note, judge, other_work, stored, tail_note
from pipelines.loadgen.level import INTERRUPTED, REFUSED, BenchmarkContext, LevelOutcome, run_level, three_digits
from pipelines.loadgen.openai_endpoint import OpenAiEndpoint
from pipelines.loadgen.plan import PlannedLevel, is_whole, loads
from pipelines.loadgen.prompts import PromptMaker
from pipelines.loadgen.request_stream import Interface
from pipelines.loadgen.search import LoadSearch, judged
from pipelines.loadgen.server import Server
from pipelines.loadgen.trace import read_trace
from pipelines.loadgen.triton_stream import TritonInterface

# The header of a result: what was measured, where and how.


UNKNOWN: Mapping[str, Any] = {"engine": "unknown", "tp_size": 1, "world_size": 1, "machine": {}, "versions": {}}
"""Labels of a server of which nothing is said."""
_HITS = 0.01
"""Share of input tokens from the KV cache above which a load without planned reuse is marked."""
_TOGETHER = 1.01
"""Tokens per response above which that is said."""
LIBRARIES = ("tritonclient", "grpcio", "uvloop", "tokenizers")
SEARCHED: Mapping[str, Any] = {"concurrency": (512,), "request_rate": (4000.0,)}
"""Loads for which a search without a range has enough client processes."""


def empty_result(
    server: Server | OpenAiEndpoint,
    interface: Interface,
    workload: WorkloadSettings,
    settings: BenchmarkSettings,
    labels: Mapping[str, Any],
) -> BenchmarkResult:
    """Return the result before anything is measured."""
    values = {**UNKNOWN, **labels}
    return BenchmarkResult(
        **{**values, "versions": {**library_versions(LIBRARIES), **values["versions"]}},
        workload=workload.model_dump(mode="json"),
        protocol=protocol(interface, workload, settings),
        server=server.facts(interface.model_name) | _identity(interface, str(values.get("model", ""))),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        slo=settings.slo.to_slo(),
        levels=(),
    )


def _identity(interface: Interface, model: str) -> dict[str, str]:
    """Say so if an endpoint's name for its model does not confirm that it is the one of the result's label."""
    ours, theirs = (set(re.findall(r"[a-z]+|\d+[a-z]*", name.lower())) for name in (model, interface.model_name))
    if isinstance(interface, TritonInterface) or ours <= theirs:
        return {}
    checked = "its counts of input tokens fit" if interface.counted_by[0] == "server" else "it does not count tokens"
    return {
        "model_check": f"The server calls its model {interface.model_name}; that it is {model} is unknown: {checked}."
    }


def protocol(interface: Interface, workload: WorkloadSettings, settings: BenchmarkSettings) -> dict[str, Any]:
    """Describe how it was measured, as far as the numbers depend on it."""
    whole = is_whole(workload, settings)
    keys = ("streaming", "warmup_s", "warmup_requests", "num_requests", "min_requests", "timeout_s")
    exact = f"{interface.stop_input} forbids to stop before" if interface.stop_input else "the model may stop before"
    return {
        **{key: getattr(settings, key) for key in keys},
        **_duration(workload, settings),
        "window": "whole" if whole else "steady",
        "start_burst_in_window": workload.arrival == "closed" and (whole or not _warms(settings)),
        "after_error": "a user pauses 0.2 s",
        "after_window": "nobody sends; what is under way is followed to its end",
        "osl": exact if workload.ignore_eos else "the model may stop before",
        "osl_counted_by": interface.counted_by[1],
        "isl_counted_by": interface.counted_by[0],
        "special_tokens_in_isl": interface.add_special_tokens,
        "streams": interface.connection,
        "conventions": CONVENTIONS,
    }


def _duration(workload: WorkloadSettings, settings: BenchmarkSettings) -> dict[str, Any]:
    """Return the length of a window; of one that may end early with enough requests, the shortest and the longest."""
    if workload.arrival == "burst":
        return {"duration_s": None}
    if settings.duration_s != "auto":
        return {"duration_s": settings.duration_s}
    if workload.arrival == "trace":
        return {"duration_s": None}
    least, most = AUTO_SECONDS
    return {
        "duration_s": least,
        "most_duration_s": most,
        "enough_requests": AUTO_REQUESTS,
        "enough_per_user": AUTO_PER_USER,
    }


def _warms(settings: BenchmarkSettings) -> bool:
    """Return whether users are already sending before a steady window begins."""
    return bool(settings.warmup_s or settings.warmup_requests)


# A benchmark as text for a terminal.


def benchmark_table(result: BenchmarkResult) -> str:
    """Render one row per level, times in ms, and below it notes that qualify the numbers."""
    summaries = [level.summary for level in result.levels]
    columns = [each for each in TERMINAL if not each.metric.optional or any(each.of(s) is not None for s in summaries)]
    marks: dict[str, str] = {}
    head = (_load_name(result), *_headings(columns), "err", "")
    rows = [head, *(_row(level, columns, marks) for level in result.levels)]
    lines = [_heading(result), *table(rows, left=0, repeated=1)]
    lines += [wrapped(f"{mark} {text}") for text, mark in marks.items()]
    limits = result.slo.text + ("" if result.slo.name == "given" else f" ({result.slo.name})")
    if result.slo.name != "none":
        lines.append(wrapped(f"good/s: requests per second within {limits}."))
    if result.search is not None:
        lines.append(wrapped(largest_load(result.search, limits)))
    if doubt := result.server.get("model_check"):
        lines.append(wrapped(doubt))
    if not result.complete:
        lines.append(wrapped(f"Incomplete: {result.reason}."))
    return "\n".join(lines)


def largest_load(search: LargestLoad, limits: str) -> str:
    """Render the answer of a search in a few sentences."""
    text = f"Largest load with {search.attainment:.3g} of the requests within {limits}: {search.text}."
    if search.binding is not None:
        name = {"errors": "failed requests"}.get(search.binding, search.binding.upper())
        missed = percent(search.missed[search.binding], 1)
        text += f" The limit is {name}: {missed} % of the requests near that load " + (
            "failed." if search.binding == "errors" else "missed it."
        )
    text += f" {count(search.probes, 'probe')}, {count(search.requests, 'request')}, {number(search.seconds)} s."
    return text + (f" Note: {search.reason}." if search.reason else "")


def level_line(level: LoadPoint) -> str:
    """Render one level on one line, for when it has just finished."""
    parts = [f"{level.load}:"]
    if errors := sum(level.summary.errors.values()):
        parts.append(count(errors, "error"))
    for figure in PROGRESS:
        value, metric = figure.shown(figure.of(level.summary)), figure.metric
        if value is not None:
            latency = f"{metric.title} {three_digits(value)} {metric.unit.shown}"
            parts.append(latency if figure.statistic else f"{value:.4g} {figure.narrow}")
    while len("  ".join(parts)) > width() - 2 and len(parts) > 1:
        parts.pop()  # half a number would be another one
    return "  ".join(parts)


def _heading(result: BenchmarkResult) -> str:
    sizes = f"TP {result.tp_size}" + (f" of {result.gpus} GPUs" if result.gpus != result.tp_size else "")
    lengths = ", ".join(f"{name.upper()} {_lengths(result, name)}" for name in ("isl", "osl"))
    return wrapped(f"{result.model} {result.precision}, {result.engine}, {sizes}, {lengths}; times in ms")


def _load_name(result: BenchmarkResult) -> str:
    arrival = str(result.workload.get("arrival"))
    return {"closed": "concurrency", "burst": "load", "trace": "load"}.get(arrival, arrival)


def _headings(columns: Sequence[MetricStatistic]) -> Iterable[str]:
    """Render the headings; a metric is named once if several of its statistics follow each other."""
    for before, figure in zip((None, *columns), columns, strict=False):
        yield figure.statistic if before is not None and before.metric is figure.metric else figure.narrow


def _row(level: LoadPoint, columns: Sequence[MetricStatistic], marks: dict[str, str]) -> tuple[str, ...]:
    texts = list(level.notes)
    if level.client.bottleneck:
        texts.append(f"The client was the limit: {level.client.reason}.")
    if not level.complete:
        texts.append(f"Cut short: {level.reason}.")
    signs = "".join(_mark(text, marks) for text in texts)
    values = [figure.shown(figure.of(level.summary)) for figure in columns]
    cells = ("-" if value is None else three_digits(value) for value in values)
    return (level.label, *cells, str(sum(level.summary.errors.values())), signs)


def _mark(text: str, marks: dict[str, str]) -> str:
    """Return the footnote letter of a text, a number after the alphabet; the same text always has the same one."""
    place = len(marks)
    number = f"({place - len(ascii_letters) + 1})"
    return marks.setdefault(text, ascii_letters[place] if place < len(ascii_letters) else number)


def _lengths(result: BenchmarkResult, name: str) -> str:
    """Describe a distribution briefly: "128", "lognormal 48+-24"; where one does not tell all, the measured range."""
    work, length = result.workload, result.workload.get(name)
    measured = [each for level in result.levels if (each := getattr(level.summary, name)).count]
    low, high = min((each.min for each in measured), default=0), max((each.max for each in measured), default=0)
    fixed = length.get("mean") if isinstance(length, dict) and length.get("distribution") == "fixed" else length
    missed = not isinstance(fixed, dict) and {low, high} != {fixed}
    if measured and (missed or work.get("trace") or work.get("mix") or work.get("turns", 1) > 1):
        return f"{low:g}" if low == high else f"{low:g} to {high:g}"
    if not isinstance(length, dict):
        return str(length)
    kind = str(length.get("distribution"))
    if kind == "fixed":
        return f"{length['mean']:g}"
    if kind == "uniform":
        return f"uniform {length['min']}-{length['max']}"
    return kind if length.get("mean") is None else f"{kind} {length['mean']:g}+-{length['stdev']:g}"


def run_benchmark(
    url: str,
    workload: WorkloadSettings,
    settings: BenchmarkSettings,
    *,
    labels: Mapping[str, Any],
    tokenizer_dir: Path,
    out_dir: Path,
    metrics_url: str | None = None,
    visual_tokens: int | None = None,
    note: Callable[[str], None] = lambda _line: None,
) -> BenchmarkResult:
    """Measure every level and write `benchmark.json` and `requests-<n>.json.gz` into `out_dir` as each finishes.

    Args:
        url: host:port of the server's gRPC, or an OpenAI endpoint up to and with /v1.
        workload: requests to send.
        settings: of the measurement.
        labels: fields of the result that say what is served where: model and precision, and the others if known.
        tokenizer_dir: folder with the model's tokenizer.json.
        out_dir: an existing folder.
        metrics_url: the server's Prometheus page.
        visual_tokens: input tokens of a picture; None if the model sees none, or the server counts them.
        note: called with one line per finished level, e.g. `pipelines.host.screen.say`.

    Returns:
        the result; if it was interrupted (Ctrl-C) or the server died, `complete` is False and the result holds
        everything until then.

    Raises:
        UserError: contradicting settings, no server, unknown model, a model without the interface, no tokenizer, or a
            server that refuses every request.
    """
    refuse(load_faults(workload, settings))
    openai, images, model_name = settings.is_openai, workload.images, settings.model_name
    server: Server | OpenAiEndpoint
    if openai:
        server = OpenAiEndpoint(url, settings.api or "completions", tokenizer_dir, images, workload.image_side)
    else:
        server = Server(url, images, visual_tokens or 1)
        model_name = SEEING_MODEL if images and model_name == DEFAULT_MODEL else model_name
    try:
        interface = server.describe(model_name, streaming=settings.streaming)
        maker = PromptMaker(
            tokenizer_dir,
            add_special_tokens=interface.add_special_tokens,
            added_tokens=interface.added_tokens or 0,
            turn_tokens=interface.turn_tokens,
            images=0 if openai else images,
        )
        header = empty_result(server, interface, workload, settings, labels)
        most = settings.model_copy(update={key: getattr(settings, key) or value for key, value in SEARCHED.items()})
        busiest = settings if settings.search == "none" else most
        with ClientProcesses(processes_for(workload, busiest, cpu_count())) as clients:
            bench = BenchmarkContext(clients, server, interface, maker, workload, settings, metrics_url)
            return _measure(bench, header, out_dir, note)
    finally:
        server.close()


def _measure(
    bench: BenchmarkContext, result: BenchmarkResult, out_dir: Path, note: Callable[[str], None]
) -> BenchmarkResult:
    """Measure all levels, in turns if each is measured several times, writing the result after each."""
    settings = bench.settings
    search = LoadSearch(settings, closed=bench.workload.arrival == "closed") if settings.search != "none" else None
    runs: dict[int, list[LoadPoint]] = {}
    for turn, load, each in _turns(bench, search):
        try:
            busy = other_work(wait=settings.on_busy == "wait", note=note)
            if busy and settings.on_busy == "refuse":
                raise _too_busy(busy, result, out_dir)
            outcome = run_level(each, load)
        except KeyboardInterrupt:  # between two levels
            result = replace(result, complete=False, reason=INTERRUPTED)
            break
        if outcome.window is not None:
            level = _level(bench, load, outcome, result.slo, turn, busy)
            keep_requests(out_dir / level.requests_file, outcome)
            runs.setdefault(load.number, []).append(level)
            result = replace(result, levels=tuple(_together(levels) for levels in runs.values()))
            note(level_line(level))
            if level.client.bottleneck and settings.on_busy == "refuse" and not outcome.reason:
                outcome.reason = f"the client was the limit, {level.client.reason} (benchmark.on_busy=refuse)"
        searching = search is not None and bool(search.probes)
        if not searching:
            _check_answers(load, outcome)
        if outcome.reason and not (searching and outcome.reason == REFUSED and outcome.window):
            result = replace(result, complete=False, reason=f"{outcome.reason} at {load.title}")
            break
        if search is not None and outcome.window is not None:
            good, missed = judged(outcome.requests, outcome.window, result.slo)
            rate, e2e_s = level.summary.requests_per_s, level.summary.e2e_s.mean
            search.add(good, missed, rate=rate, e2e_s=e2e_s, client_bound=level.client.bottleneck)
            result = replace(result, search=search.answer())
        write_json(out_dir / RESULT, result.to_json())
    write_json(out_dir / RESULT, result.to_json())
    return result


def _turns(bench: BenchmarkContext, search: LoadSearch | None) -> Iterator[tuple[int, PlannedLevel, BenchmarkContext]]:
    """Yield each turn and load and how it is measured; the loads of a search follow from what was measured before."""
    if search is None:
        turns = range(1, bench.settings.repeats + 1)
        yield from ((turn, load, bench) for turn, load in product(turns, loads(bench.workload, bench.settings)))
        return
    arrival = bench.workload.arrival
    for place in count_from(1):
        if (plan := search.following()) is None:
            return
        update = {"duration_s": plan.seconds, "warmup_s": plan.warmup_s}
        users, rate = (round(plan.load), None) if arrival == "closed" else (None, plan.load)
        settings = bench.settings.model_copy(update=update)
        yield 1, PlannedLevel(place, arrival, users, rate), replace(bench, settings=settings)


def _too_busy(busy: str, result: BenchmarkResult, out_dir: Path) -> UserError:
    """Keep finished loads, and report that this machine is busy."""
    if result.levels:
        write_json(out_dir / RESULT, replace(result, complete=False, reason=busy).to_json())
    return UserError(
        f"Before a load, {busy} (benchmark.on_busy=refuse).",
        todo="Stop it, wait for a quiet machine with benchmark.on_busy=wait, or have loads marked with =mark.",
    )


def _together(levels: Sequence[LoadPoint]) -> LoadPoint:
    """Return the run with the median output tokens/s, and 95 % intervals of the mean of all runs (Student's t).

    A run that was cut short counts only if it is the first.
    """
    levels = [level for level in levels if level.complete] or levels
    if len(levels) == 1:
        return levels[0]
    median = sorted(levels, key=lambda level: level.summary.output_tokens_per_s)[(len(levels) - 1) // 2]
    intervals, ranges = {}, []
    for figure in TERMINAL:
        values = [value for level in levels if (value := figure.of(level.summary)) is not None]
        if len(values) == len(levels):
            half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
            intervals[figure.key] = ends = (max(mean(values) - half, 0.0), mean(values) + half)
            name = f"{figure.metric.narrow or figure.metric.title} {figure.statistic}".strip()
            ranges.append(name + " to".join(f" {three_digits(end * figure.metric.unit.scale)}" for end in ends))
    note = f"{len(levels)} runs, 95 % intervals: {', '.join(ranges)}."
    return replace(median, intervals=intervals, runs=len(levels), notes=(note, *median.notes))


def _level(
    bench: BenchmarkContext, load: PlannedLevel, outcome: LevelOutcome, slo: Slo, turn: int, busy: str
) -> LoadPoint:
    assert outcome.window is not None
    summary = summarise(outcome.requests, outcome.window, slo)
    limits = None if bench.settings.search == "none" else slo
    client = judge(outcome.reports, outcome.requests, summary, outcome.machine, limits)
    return LoadPoint(
        arrival=load.arrival,
        concurrency=load.concurrency,
        request_rate=load.request_rate,
        summary=summary,
        client=client,
        server={**outcome.server, "tokens_per_response": _tokens_per_response(outcome)},
        requests_file=f"requests-{load.number}{f'-{turn}' if turn > 1 else ''}.json.gz",
        complete=not outcome.reason,
        reason=outcome.reason,
        notes=tuple(
            filter(
                None,
                [busy and f"Before this load, {busy}.", tail_note(client, summary), *_notes(bench, load, outcome)],
            )
        ),
    )


def _tokens_per_response(outcome: LevelOutcome) -> float | None:
    """Return the mean tokens per response; above 1, gaps are between responses, not tokens. None without streaming."""
    assert outcome.requests.responses is not None
    count = outcome.requests.responses.count
    streamed = outcome.requests.fine() & (count > 0)
    responses = int(count[streamed].sum())
    return int(outcome.requests.osl[streamed].sum()) / responses if responses else None


def _notes(bench: BenchmarkContext, load: PlannedLevel, outcome: LevelOutcome) -> list[str]:
    assert outcome.window is not None
    notes = [f"{note}." for note in read_trace(bench.workload).notes] if load.arrival == "trace" else []
    if outcome.saturated:
        notes.append("The window ended early: the queue grew without bound, so the server does not keep up.")
    elif load.concurrency is None and (grown := growth_note(outcome.requests, outcome.window)):
        notes.append(grown)
    elif load.concurrency is None and not is_whole(bench.workload, bench.settings):
        notes += filter(None, [cold_note(outcome.requests, outcome.window)])
    notes += [f"First error of kind {kind}: {text[:200]}" for kind, text in sorted(outcome.messages.items())]
    if fault := outcome.server["metrics"].get("fault"):
        notes.append(f"The server's metrics could not be read: {fault}.")
    if unsent := sum(report.unsent for report in outcome.reports):
        what = "a later turn of its session was" if unsent == 1 else "later turns of their sessions were"
        notes.append(f"{unsent:,} {what} not sent, because the turn before failed.")
    planned = len(read_trace(bench.workload).osl[: bench.settings.num_requests]) if load.arrival == "trace" else 0
    if (left := planned - unsent - len(outcome.requests.due)) > 0 and not outcome.reason:
        notes.append(f"{left:,} of the trace's {planned:,} requests were not sent, because its window had ended.")
    if not all(report.distinct for report in outcome.reports):
        notes.append("Prompts were repeated, which favours a server that reuses KV blocks (workload.prompts).")
    if (share := _unplanned_hits(bench, outcome)) > _HITS:
        notes.append(
            f"{share:.0%} of the input tokens came from the server's KV cache, which new prompts would not: TTFT and "
            "throughput are better than without it. Start the server anew, or switch reuse of KV blocks off."
        )
    return notes + _counting_notes(bench, outcome)


def _counting_notes(bench: BenchmarkContext, outcome: LevelOutcome) -> list[str]:
    """Return what a reader should know of the tokens that were counted."""
    notes, fine = [], outcome.requests.fine()
    done = int(fine.sum())
    if off := sum(report.off for report in outcome.reports):
        notes.append(
            f"The server counted other input tokens than the tokenizer of model= in {off:,} of {done:,} requests: "
            "it has another model, or its chat template does not grow with each message. ISL is as it counted."
        )
    if bench.interface.counted_by[1] == "tokenizer":
        notes.append("The server counts no tokens: input and output tokens are as the tokenizer of model= counts them.")
    if (together := _tokens_per_response(outcome) or 1) > _TOGETHER:
        notes.append(
            f"There were {together:.2f} tokens in each response: gaps between responses are not gaps between tokens."
        )
    without = fine & (outcome.requests.first_token != outcome.requests.first_token)  # NaN
    if silent := int(without.sum()) if bench.settings.streaming else 0:
        notes.append(f"{silent:,} of {done:,} answers had no text, so they have no TTFT.")
    short = sum(report.short for report in outcome.reports) if bench.interface.counted_by[1] == "server" else 0
    if bench.workload.ignore_eos and bench.interface.stop_input and short:
        notes.append(
            f"{short:,} of {done:,} answers are shorter than asked for, though the server takes "
            f"{bench.interface.stop_input}: output lengths vary."
        )
    if bench.workload.ignore_eos and not bench.interface.stop_input:
        notes.append("The model has no input that prevents it from stopping early, so output lengths vary.")
    if not done:
        notes.append("No request finished.")
    return notes


def _unplanned_hits(bench: BenchmarkContext, outcome: LevelOutcome) -> float:
    """Return the share of input tokens from the KV cache in a load that repeats nothing on purpose; 0 if unknown."""
    work = bench.workload
    if work.shared_prefix_share or work.turns > 1 or work.arrival == "trace":
        return 0.0
    fine = outcome.requests.fine()
    same = 0 if work.images else bench.interface.added_tokens or 0  # a chat template is the same for all
    planned = int(fine.sum()) * same
    hits = (outcome.server.get("cached_tokens") or 0) - planned
    return max(hits, 0) / (int(outcome.requests.isl[fine].sum()) or 1)


def _check_answers(load: PlannedLevel, outcome: LevelOutcome) -> None:
    """Refuse a load without a single finished request, with the server's reason: it measures nothing."""
    sent = len(outcome.requests.due)
    if outcome.reason not in ("", REFUSED) or not sent or outcome.requests.fine().any():
        return
    kind, text = next(iter(sorted(outcome.messages.items())), ("unknown", "it gave no reason"))
    todo = "Compare workload.isl and workload.osl with the engine's max_input_len and max_seq_len."
    requests = "The only request" if sent == 1 else f"All {sent:,} requests"
    raise UserError(
        f"{requests} at {load.title} failed ({kind}): {text[:300].rstrip('.')}.",
        todo=todo if kind == "invalid" else "See the server's log.",
    )


def keep_requests(path: Path, outcome: LevelOutcome) -> None:
    """Write one level's records as columns (`pipelines.loadgen.health.from_stored`), the window, the clock's zero."""
    dumps = partial(json.dumps, separators=(",", ":"))
    with replacing(path) as fresh, gzip.open(fresh, "wt", compresslevel=3) as file:
        for place, (name, parts) in enumerate(stored(outcome.requests)):
            file.write(f'{"," if place else "{"}"{name}":[')
            for number, part in enumerate(parts):
                file.write("," * (number > 0) + dumps(part)[1:-1])
            file.write("]")
        file.write(f',"window_ns":{dumps(outcome.window)},"start_monotonic_ns":{outcome.start_ns}}}')
