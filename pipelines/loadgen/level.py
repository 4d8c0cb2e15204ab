"""Run one level: warm-up, measured window, end. Directs the client processes and measures nothing itself.

Closed loop, steady window: all users start at once; after the warm-up the window begins, under load; at its end no more
requests are sent, and running ones are followed to their end.
Open loop, steady window: the schedule covers warm-up and window.
Whole: a closed loop warms the server up and ends; then users or schedule start on an idle server; the window spans the
first request to the last response.
"""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from secrets import randbits
from time import monotonic_ns
from types import TracebackType
from typing import Any

from pipelines.domain.summary import SECOND, RequestTiming, Window, whole_window
from pipelines.loadgen.client_processes import ClientProcesses
from pipelines.loadgen.health import MachineLoad, MachineWatch
from pipelines.loadgen.live import Meter, View, default_view
from pipelines.loadgen.plan import WARMUP_USERS, LevelPlan, PlannedLevel, is_whole
from pipelines.loadgen.prompts import PromptMaker
from pipelines.loadgen.request_stream import CONNECTION, ERRORS, LAST_OK, OK, ClientJob, ClientReport
from pipelines.loadgen.server import Interface, Server, statistics_between
from pipelines.settings.load import BenchmarkSettings, WorkloadSettings

# Sample the server's Prometheus page every second of a window: the state of KV cache and scheduler.

_PERIOD_S = 1.0
_FAMILIES = {
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block", "kv_cache_block_type"),
    "nv_trt_llm_runtime_memory_metrics": ("memory", "memory_type"),
    "nv_trt_llm_request_metrics": ("requests", "request_type"),
    "nv_trt_llm_inflight_batcher_metrics": ("batcher", "inflight_batcher_specific_metric"),
}
"""Family -> prefix of our names, label that distinguishes its series (TensorRT-LLM's custom metrics reporter)."""


def read_metrics(text: str) -> dict[str, float]:
    """Read the gauges of TensorRT-LLM's families from a Prometheus page, e.g. {"kv_cache_block_used": 12.0}.

    Series of several models or versions are summed.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name in _FAMILIES:
            prefix, label = _FAMILIES[family.name]
            for sample in family.samples:
                name = f"{prefix}_{sample.labels.get(label, 'unnamed')}"
                found[name] = found.get(name, 0.0) + sample.value
    return found


class MetricsWatch:
    """Samples the page in a thread of its own inside a `with` block."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._samples: list[dict[str, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.fault = ""
        """Why there are no values, for messages."""

    def __enter__(self) -> MetricsWatch:
        if self._url is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def summary(self) -> dict[str, Any]:
        """Return mean and maximum of every gauge over the samples, and the number of samples."""
        if not self._samples:
            return {"samples": 0} | ({"fault": self.fault} if self.fault else {})
        names = sorted(set().union(*self._samples))
        columns = {name: [sample[name] for sample in self._samples if name in sample] for name in names}
        gauges = {name: {"mean": sum(row) / len(row), "max": max(row)} for name, row in columns.items()}
        return {"samples": len(self._samples), **gauges}

    def _watch(self) -> None:
        while True:
            try:
                with urllib.request.urlopen(str(self._url), timeout=5) as page:
                    self._samples.append(read_metrics(page.read().decode()))
            except (OSError, HTTPException, ValueError) as error:  # unreachable; cut short; a page without metrics
                self.fault = f"{self._url}: {error}"
            if self._stop.wait(_PERIOD_S):
                return


_POLL_S = 0.05
_WARMUP_PROMPTS = 256
_SILENCE_NS = 3 * SECOND
_HOPELESS = 100
INTERRUPTED, GONE, REFUSED = "interrupted", "the server stopped answering", "every request was refused"


@dataclass(frozen=True, slots=True)
class BenchmarkContext:
    """State shared by all levels of a benchmark."""

    clients: ClientProcesses
    server: Server
    interface: Interface
    maker: PromptMaker
    workload: WorkloadSettings
    settings: BenchmarkSettings
    metrics_url: str | None
    view: Callable[[], View] = default_view


@dataclass
class LevelOutcome:
    """Outcome of one level.

    Attributes:
        timings: of all requests, including the warm-up, ns from the start of the level.
        window: the measured part, same clock; None if the level ended before the window began.
        start_ns: when the level started, on CLOCK_MONOTONIC of the client's machine.
        reports: of the client processes.
        machine: CPU load of the machine.
        server: counters of the server over the window.
        reason: why it was cut short; empty if it was not.
    """

    timings: list[RequestTiming]
    window: Window | None
    start_ns: int
    reports: list[ClientReport]
    machine: MachineLoad
    server: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def messages(self) -> dict[str, str]:
        """One example of the server's message per kind of error."""
        return {kind: text for report in self.reports for kind, text in report.messages.items()}


def run_level(bench: BenchmarkContext, load: PlannedLevel, title: str) -> LevelOutcome:
    """Apply one load to the server.

    Args:
        bench: server, client processes, settings.
        load: the level.
        title: the load as text, for the live view.
    """
    plan = LevelPlan(load, bench.workload, bench.settings, bench.maker)
    if is_whole(bench.workload, bench.settings):
        warmed = _warm_up(bench, load, title)
        if warmed is not None:
            return warmed
    return _Run(bench, load, plan, title).go()


def _warm_up(bench: BenchmarkContext, load: PlannedLevel, title: str) -> LevelOutcome | None:
    """Run a closed loop before a whole window; return its outcome only if it was cut short."""
    settings = bench.settings
    if not settings.warmup_s and not settings.warmup_requests:
        return None
    users = load.concurrency or WARMUP_USERS
    inner = settings.model_copy(
        update={"window": "steady", "warmup_s": 0.0, "warmup_requests": 0, "duration_s": max(settings.warmup_s, 0.001)}
        | {"min_requests": max(settings.warmup_requests or users, 1), "num_requests": None}
    )
    workload = bench.workload.model_copy(update={"arrival": "closed", "trace": None, "prompts": _WARMUP_PROMPTS})
    closed = PlannedLevel(load.number, "closed", users, None)
    plan = LevelPlan(closed, workload, inner, bench.maker, salt=1)
    warm = replace(bench, workload=workload, settings=inner, metrics_url=None)
    outcome = _Run(warm, closed, plan, f"{title}, warm-up").go()
    outcome.window = None
    return outcome if outcome.reason else None


class _Run:
    """One run of the client processes, followed to its end."""

    def __init__(self, bench: BenchmarkContext, load: PlannedLevel, plan: LevelPlan, title: str) -> None:
        self._bench, self._load, self._settings = bench, load, bench.settings
        self._whole = is_whole(bench.workload, bench.settings)
        self._meter = Meter(bench.clients.board, title)
        self._jobs, self._planned = self._share(plan)
        self._start = 0
        self._begin: int | None = None
        self._end: int | None = None
        self._done_before = 0
        self._before: dict[str, dict[str, int]] = {}
        self._after: dict[str, dict[str, int]] = {}
        self._reason = ""

    def go(self) -> LevelOutcome:
        clients = self._bench.clients
        watch = MetricsWatch(self._bench.metrics_url)
        machine = MachineWatch()
        self._start = clients.start(self._jobs)
        with self._bench.view() as view, watch:
            try:
                self._follow(view)
            except KeyboardInterrupt:
                self._cut(INTERRUPTED)
                while not clients.finished(_POLL_S):
                    pass
        reports = clients.collect()
        timings = sorted(self._timings(reports), key=lambda timing: timing.index)
        server = {"statistics": statistics_between(self._before, self._after), "metrics": watch.summary()}
        return LevelOutcome(timings, self._window(timings), self._start, reports, machine.load(), server, self._reason)

    def _follow(self, view: View) -> None:
        clients = self._bench.clients
        while not clients.finished(_POLL_S):
            now = monotonic_ns()
            if self._begin is None and self._warm(now):
                self._before = self._bench.server.counters()
                self._done_before = self._done()
                self._begin = self._planned[0] + self._start if self._planned else monotonic_ns()
            elif self._begin is not None and self._end is None and self._over(now):
                self._close()
            if not self._reason and (trouble := self._trouble(now)):
                self._cut(trouble)
            view.show(self._meter.state(self._phase(), self._left(now)))
        if self._begin is not None and self._end is None:
            self._close()

    def _close(self) -> None:
        """End the window: no more requests are sent."""
        self._end = self._planned[1] + self._start if self._planned else monotonic_ns()
        self._bench.clients.board.stop_at(self._end)
        self._after = self._bench.server.counters()

    def _cut(self, reason: str) -> None:
        """End the level early."""
        self._reason = reason
        now = monotonic_ns()
        self._end = min(self._end or now, now)
        if reason.startswith(GONE):  # the measurement ends with the last response, not with the silence after it
            self._end = min(self._end, self._bench.clients.board.latest(LAST_OK) + 1)
        self._after = self._after or self._bench.server.counters()
        self._bench.clients.board.stop_at(now)
        self._bench.clients.abort()

    def _done(self) -> int:
        return self._bench.clients.board.total(OK) + self._bench.clients.board.total(ERRORS)

    def _warm(self, now: int) -> bool:
        if self._whole:
            return True
        if self._planned:
            return now >= self._start + self._planned[0]
        least = self._settings.warmup_requests
        least = (self._load.concurrency or 0) if least is None and self._settings.warmup_s else least or 0
        return now >= self._start + self._settings.warmup_s * SECOND and self._done() >= least

    def _over(self, now: int) -> bool:
        if self._planned:
            return now >= self._start + self._planned[1]
        if self._begin is None or (
            self._whole and self._jobs[0].limit is not None and self._settings.duration_s is None
        ):
            return False
        done, asked = self._done() - self._done_before, self._settings.num_requests
        end = self._expected_end(now)
        late = end is not None and now >= end
        enough = asked is not None and done >= asked
        return enough or (late and done >= min(self._settings.min_requests, asked or self._settings.min_requests))

    def _expected_end(self, now: int) -> float | None:
        """Return when a window of a closed loop will end if requests go on to finish as they did so far."""
        if self._begin is None:
            return None
        rate = (self._done() - self._done_before) * SECOND / max(now - self._begin, 1)
        seconds = self._settings.seconds(rate, self._load.concurrency or 0)
        return None if seconds is None else self._begin + seconds * SECOND

    def _trouble(self, now: int) -> str:
        """Return why continuing is pointless: no connection and no response for seconds, or everything is refused."""
        board = self._bench.clients.board
        if board.total(CONNECTION) and now - max(board.latest(LAST_OK), self._start) > _SILENCE_NS:
            return GONE + (", though it is still there" if self._bench.server.is_live() else "")
        return REFUSED if not board.total(OK) and board.total(ERRORS) >= _HOPELESS else ""

    def _phase(self) -> str:
        return "warm-up" if self._begin is None else "measuring" if self._end is None else "finishing"

    def _left(self, now: int) -> float | None:
        if self._begin is None or self._end is not None:
            return None
        end = self._start + self._planned[1] if self._planned else self._expected_end(now)
        return None if end is None or end < now else (end - now) / SECOND  # a window may wait for its requests

    def _window(self, timings: Sequence[RequestTiming]) -> Window | None:
        """Return the measured window, ns from the start."""
        if self._whole:
            return whole_window(timings) if timings else None
        if self._begin is None or self._end is None or self._end <= self._begin:
            return None
        begin, end = self._begin - self._start, self._end - self._start
        asked = self._settings.num_requests
        if asked is not None and not self._planned and not self._reason:
            ends = sorted(t.end_ns for t in timings if begin <= t.end_ns < end)
            end = min(end, ends[asked - 1] + 1) if len(ends) >= asked else end  # exactly as many as configured
        return begin, end

    def _timings(self, reports: Sequence[ClientReport]) -> list[RequestTiming]:
        t0 = self._start
        return [
            RequestTiming(
                index,
                due - t0,
                sent - t0,
                None if first is None else first - t0,
                end - t0,
                isl,
                osl,
                tuple(stamp - t0 for stamp in chunks),
                error,
            )
            for report in reports
            for index, due, sent, first, end, isl, osl, chunks, error in report.rows
        ]

    def _share(self, plan: LevelPlan) -> tuple[list[ClientJob], tuple[int, int] | None]:
        """Return each process's part, and the steady window of an open loop."""
        size, base = self._bench.clients.size, self._base()
        if self._load.arrival == "closed":
            users, asked = self._load.concurrency or 1, self._settings.num_requests
            limit = asked if self._whole else None
            pool = plan.pool(None if limit is None else limit + users * self._bench.workload.turns)
            return [
                ClientJob(
                    **base,
                    first_index=k,
                    step=size,
                    users=_part(users, k, size),
                    think_ns=round(self._bench.workload.think_time_s * SECOND),
                    limit=None if limit is None else _part(limit, k, size),
                    pool=pool[k::size] or pool,
                )
                for k in range(size)
            ], None
        schedule = plan.schedule()
        times = [due for due, _ in schedule]
        gap = (times[-1] - times[0]) / max(len(times) - 1, 1) * size
        jobs = [
            ClientJob(**base, first_index=k, step=size, schedule=schedule[k::size], mean_gap_ns=gap)
            for k in range(size)
        ]
        return jobs, None if self._whole else plan.window_ns(times)

    def _base(self) -> dict[str, Any]:
        return {
            "url": self._bench.server.url,
            "interface": self._bench.interface,
            "streaming": self._settings.streaming,
            "ignore_eos": self._bench.workload.ignore_eos,
            "timeout_ns": round(self._settings.timeout_s * SECOND),
            "id_base": randbits(30) << 32,
        }


def _part(whole: int, number: int, parts: int) -> int:
    """Return the share of one process, so that the shares add up."""
    return (whole + parts - 1 - number) // parts
