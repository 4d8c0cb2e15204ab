"""Measure one server under every level of load."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.domain.benchmark import RESULT, BenchmarkResult, Level, Slo
from pipelines.domain.errors import UserError
from pipelines.domain.summary import summarise
from pipelines.domain.timing import to_columns
from pipelines.host.files import replacing, write_json
from pipelines.loadgen.client_processes import ClientProcesses, cpu_count, processes_for
from pipelines.loadgen.columns import columns_of
from pipelines.loadgen.health import growth_note, judge, tail_note
from pipelines.loadgen.level import INTERRUPTED, REFUSED, BenchmarkContext, LevelOutcome, run_level
from pipelines.loadgen.live import View, default_view
from pipelines.loadgen.plan import PlannedLevel, loads
from pipelines.loadgen.prompts import PromptMaker
from pipelines.loadgen.result_header import ServerIdentity, empty_result
from pipelines.loadgen.server import Server
from pipelines.loadgen.table import level_line
from pipelines.settings.load import BenchmarkSettings, WorkloadSettings, load_faults

__all__ = ["ServerIdentity", "ServerTarget", "run_benchmark"]


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """The server to measure.

    Attributes:
        url: host:port of its gRPC.
        model_name: model to ask, e.g. "ensemble".
        metrics_url: its Prometheus page, or None.
    """

    url: str
    model_name: str
    metrics_url: str | None = None


def run_benchmark(
    target: ServerTarget,
    workload: WorkloadSettings,
    settings: BenchmarkSettings,
    *,
    tokenizer_dir: Path,
    identity: ServerIdentity,
    out_dir: Path,
    note: Callable[[str], None] = lambda _line: None,
    view: Callable[[], View] = default_view,
) -> BenchmarkResult:
    """Measure every level and write `benchmark.json` and `requests-<n>.json.gz` into `out_dir` as each finishes.

    Args:
        target: the server.
        workload: requests to send.
        settings: of the measurement.
        tokenizer_dir: folder with the model's tokenizer.json.
        identity: of the server.
        out_dir: an existing folder.
        note: called with one line per finished level, e.g. `pipelines.host.screen.say`.
        view: makes the live view of a level.

    Returns:
        the result; if it was interrupted (Ctrl-C) or the server died, `complete` is False and the result holds
        everything until then.

    Raises:
        UserError: contradicting settings, no server, unknown model, a model without the interface, no tokenizer, or a
            server that refuses every request.
    """
    if faults := load_faults(workload, settings):
        raise UserError.of(faults)
    server = Server(target.url)
    try:
        interface = server.describe(target.model_name, streaming=settings.streaming)
        maker = PromptMaker(tokenizer_dir, add_special_tokens=interface.add_special_tokens)
        header = empty_result(server, interface, workload, settings, identity)
        processes = processes_for(workload, settings, cpu_count())
        with ClientProcesses(processes) as clients:
            bench = BenchmarkContext(clients, server, interface, maker, workload, settings, target.metrics_url, view)
            return _measure(bench, header, out_dir, note)
    finally:
        server.close()


def _measure(
    bench: BenchmarkContext, result: BenchmarkResult, out_dir: Path, note: Callable[[str], None]
) -> BenchmarkResult:
    """Measure all levels, writing the result after each."""
    for load in loads(bench.workload, bench.settings):
        try:
            outcome = run_level(bench, load, _title(load))
        except KeyboardInterrupt:  # between two levels
            result = replace(result, complete=False, reason=INTERRUPTED)
            break
        if outcome.window is not None:
            level = _level(bench, load, outcome, result.slo)
            keep_requests(out_dir / level.requests_file, outcome)
            result = replace(result, levels=(*result.levels, level))
            note(level_line(level))
        _check_answers(load, outcome)
        if outcome.reason:
            result = replace(result, complete=False, reason=f"{outcome.reason} at {_title(load)}")
            break
        write_json(out_dir / RESULT, result.to_json())
    write_json(out_dir / RESULT, result.to_json())
    return result


def _level(bench: BenchmarkContext, load: PlannedLevel, outcome: LevelOutcome, slo: Slo) -> Level:
    assert outcome.window is not None
    summary = summarise(columns_of(outcome.timings), outcome.window, slo)
    client = judge(outcome.reports, outcome.timings, summary, outcome.machine)
    return Level(
        arrival=load.arrival,
        concurrency=load.concurrency,
        request_rate=load.request_rate,
        summary=summary,
        client=client,
        server={**outcome.server, "tokens_per_response": _tokens_per_response(outcome)},
        requests_file=f"requests-{load.number}.json.gz",
        complete=not outcome.reason,
        reason=outcome.reason,
        notes=tuple(filter(None, [tail_note(client, summary), *_notes(bench, load, outcome)])),
    )


def _tokens_per_response(outcome: LevelOutcome) -> float | None:
    """Return the mean tokens per response; above 1, gaps are between responses, not tokens. None without streaming."""
    streamed = [timing for timing in outcome.timings if timing.ok and timing.chunk_ns]
    responses = sum(len(timing.chunk_ns) for timing in streamed)
    return sum(timing.osl for timing in streamed) / responses if responses else None


def _notes(bench: BenchmarkContext, load: PlannedLevel, outcome: LevelOutcome) -> list[str]:
    assert outcome.window is not None
    notes = []
    if load.concurrency is None and (grown := growth_note(outcome.timings, outcome.window)):
        notes.append(grown)
    notes += [f"First error of kind {kind}: {text[:200]}" for kind, text in sorted(outcome.messages.items())]
    if not all(report.distinct for report in outcome.reports):
        notes.append("Prompts were repeated, which favours a server that reuses KV blocks (workload.prompts).")
    done = [timing for timing in outcome.timings if timing.ok]
    if bench.workload.ignore_eos and not bench.interface.stop_input:
        notes.append("The model has no input that prevents it from stopping early, so output lengths vary.")
    if not done:
        notes.append("No request finished.")
    return notes


def _check_answers(load: PlannedLevel, outcome: LevelOutcome) -> None:
    """Refuse a load without a single finished request: it measures nothing.

    Raises:
        UserError: no request finished, and the server gave a reason.
    """
    if outcome.reason not in ("", REFUSED) or not outcome.timings or any(timing.ok for timing in outcome.timings):
        return
    kind, text = next(iter(sorted(outcome.messages.items())), ("unknown", "it gave no reason"))
    todo = "Compare workload.isl and workload.osl with the engine's max_input_len and max_seq_len."
    sent = len(outcome.timings)
    requests = "The only request" if sent == 1 else f"All {sent:,} requests"
    raise UserError(
        f"{requests} at {_title(load)} failed ({kind}): {text[:300].rstrip('.')}.",
        todo=todo if kind == "invalid" else "See the server's log.",
    )


def _title(load: PlannedLevel) -> str:
    """Describe the load, as `Level.load` does."""
    if load.concurrency is not None:
        return f"concurrency {load.concurrency}"
    if load.request_rate is not None:
        return f"{load.request_rate:g} requests/s ({load.arrival})"
    return "all at once" if load.arrival == "burst" else "trace"


def keep_requests(path: Path, outcome: LevelOutcome) -> None:
    """Write one level's records: columns of `pipelines.domain.timing.to_columns`, the window, the clock's zero."""
    data = {**to_columns(outcome.timings), "window_ns": outcome.window, "start_monotonic_ns": outcome.start_ns}
    with replacing(path) as fresh, gzip.open(fresh, "wt", compresslevel=3) as file:
        json.dump(data, file, separators=(",", ":"))
