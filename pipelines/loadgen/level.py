"""Run one level: warm-up, measured window, end. Directs the client processes and measures nothing itself.

Closed loop, steady window: all users start at once; after the warm-up the window begins, under load; at its end no more
requests are sent, and running ones are followed to their end.
Open loop, steady window: the schedule covers warm-up and window.
Whole: a closed loop warms the server up and ends; then users or schedule start on an idle server; the window spans the
first request to the last response.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from secrets import randbits, token_hex
from time import monotonic, monotonic_ns
from typing import Any

from pipelines.document.show import count
from pipelines.domain.summary import SECOND, RequestColumns, Window, whole_window
from pipelines.host.screen import redraws, wrapped
from pipelines.loadgen.client_processes import ClientProcesses
from pipelines.loadgen.config import BenchmarkSettings, WorkloadSettings
from pipelines.loadgen.health import MachineLoad, MachineWatch, MetricsWatch, collected
from pipelines.loadgen.openai_endpoint import OpenAiEndpoint
from pipelines.loadgen.plan import WARMUP_USERS, LevelPlan, PlannedLevel, is_whole
from pipelines.loadgen.prompts import PromptMaker
from pipelines.loadgen.request_stream import (
    CONNECTION,
    ERRORS,
    ITL_N,
    ITL_US,
    LAST_OK,
    OK,
    SENT,
    TTFT_N,
    TTFT_US,
    ClientJob,
    ClientReport,
    Interface,
    SharedCounters,
)
from pipelines.loadgen.server import Server, statistics_between

_POLL_S = 0.05
_WARMUP_PROMPTS = 256
_SILENCE_NS = 3 * SECOND
_HOPELESS = 100
_GROWS_S = 5.0
_CERTAIN, _WAITS = 6.0, 0.3
"""A queue grows without bound if it grew by more standard deviations, and first tokens came later by more of the time
that the queue takes."""
INTERRUPTED, GONE, REFUSED = "interrupted", "the server stopped answering", "every request was refused"


@dataclass(frozen=True, slots=True)
class BenchmarkContext:
    """State shared by all levels of a benchmark."""

    clients: ClientProcesses
    server: Server | OpenAiEndpoint
    interface: Interface
    maker: PromptMaker
    workload: WorkloadSettings
    settings: BenchmarkSettings
    metrics_url: str | None


@dataclass
class LevelOutcome:
    """Outcome of one level.

    Attributes:
        requests: all, including the warm-up, ns from the start of the level.
        window: the measured part, same clock; None if the level ended before the window began.
        start_ns: when the level started, on CLOCK_MONOTONIC of the client's machine.
        server: counters of the server over the window.
        reason: why it was cut short; empty if it was not.
        saturated: whether the window ended early, because the queue grew without bound.
    """

    requests: RequestColumns
    window: Window | None
    start_ns: int
    reports: list[ClientReport]
    machine: MachineLoad
    server: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    saturated: bool = False

    @property
    def messages(self) -> dict[str, str]:
        """One example of the server's message per kind of error."""
        return {kind: text for report in self.reports for kind, text in report.messages.items()}


def run_level(bench: BenchmarkContext, load: PlannedLevel) -> LevelOutcome:
    """Apply one load to the server."""
    plan = LevelPlan(load, bench.workload, bench.settings, bench.maker, nonce=token_hex(8))
    if is_whole(bench.workload, bench.settings):
        warmed = _warm_up(bench, load)
        if warmed is not None:
            return warmed
    return _Run(bench, load, plan, load.title).go()


def _warm_up(bench: BenchmarkContext, load: PlannedLevel) -> LevelOutcome | None:
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
    plan = LevelPlan(closed, workload, inner, bench.maker, salt=1, nonce=token_hex(8))
    warm = replace(bench, workload=workload, settings=inner, metrics_url=None)
    outcome = _Run(warm, closed, plan, f"{load.title}, warm-up").go()
    outcome.window = None
    return outcome if outcome.reason else None


class _Run:
    """One run of the client processes, followed to its end."""

    def __init__(self, bench: BenchmarkContext, load: PlannedLevel, plan: LevelPlan, title: str) -> None:
        self._bench, self._load, self._settings = bench, load, bench.settings
        self._whole = is_whole(bench.workload, bench.settings)
        self._meter, self._title = Meter(bench.clients.board), title
        self._start = self._last = 0
        self._jobs, self._planned = self._share(plan)
        self._begin: int | None = None
        self._end: int | None = None
        self._done_before = 0
        self._before: dict[str, dict[str, int]] = {}
        self._after: dict[str, dict[str, int]] = {}
        self._reason = ""
        self._flow: list[tuple[int, int, int, int, int]] = []
        self._saturated = False

    def go(self) -> LevelOutcome:
        clients = self._bench.clients
        watch = MetricsWatch(self._bench.metrics_url)
        machine = MachineWatch()
        with live_view(self._title) as show, watch.sampling():
            self._start = clients.start(self._jobs)
            try:
                self._follow(show)
            except KeyboardInterrupt:
                self._cut(INTERRUPTED)
                while not clients.finished(_POLL_S):
                    pass
        reports = clients.collect()
        requests = collected(reports, self._start)
        stated = [report.cached_tokens for report in reports if report.cached_tokens is not None]
        server = {
            "statistics": statistics_between(self._before, self._after),
            "metrics": watch.summary(),
            "cached_tokens": sum(stated) if stated else watch.cached_tokens,
        }
        window, load = self._window(requests), machine.load()
        return LevelOutcome(requests, window, self._start, reports, load, server, self._reason, self._saturated)

    def _follow(self, show: "View") -> None:
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
            show(self._meter.line(self._phase(), self._left(now)))
        if self._begin is not None and self._end is None:
            self._close()

    def _close(self) -> None:
        """End the window: no more requests are sent."""
        end = monotonic_ns()
        if self._planned:
            end = min(end, self._planned[1] + self._start) if self._saturated else self._planned[1] + self._start
        self._end = end
        self._bench.clients.board.stop_at(end)
        self._after = self._bench.server.counters()

    def _cut(self, reason: str) -> None:
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
            self._saturated = self._saturated or (now < self._start + self._planned[1] and self._grows(now))
            return self._saturated or now >= self._start + self._planned[1]
        if self._begin is None or (
            self._whole and self._jobs[0].limit is not None and self._settings.duration_s is None
        ):
            return False
        done, goal = self._done() - self._done_before, self._settings.num_requests
        end = self._expected_end(now)
        late = end is not None and now >= end
        enough = goal is not None and done >= goal
        return enough or (late and done >= min(self._settings.min_requests, goal or self._settings.min_requests))

    def _grows(self, now: int) -> bool:
        """Return whether chance cannot explain how an open loop's queue has grown within the window.

        A server that just keeps up lets the number in flight wander like a sum of random steps. It also grows while the
        first long answers are under way, but then first tokens do not come later and later.
        """
        total = self._bench.clients.board.total
        self._flow.append((now, total(SENT), self._done(), total(TTFT_US), total(TTFT_N)))
        since, sent, done, *_ = self._flow[0]
        if now - since < _GROWS_S * SECOND:
            return False
        new, grown = total(SENT) - sent, total(SENT) - self._done() - (sent - done)
        _, _, _, ttft_us, ttft_n = self._flow[len(self._flow) // 2]
        ttft_s = _mean(total(TTFT_US) - ttft_us, total(TTFT_N) - ttft_n) or 0.0
        cv = self._bench.workload.cv if self._load.arrival == "gamma" else 1.0
        certain = max(_CERTAIN * math.sqrt((1 + cv**2) * new), sent - done, 0.1 * new)
        return grown > certain and ttft_s > _WAITS * grown * (now - since) / SECOND / new

    def _expected_end(self, now: int) -> float | None:
        """Return when a window without a schedule will end if requests go on to finish as they did so far."""
        if self._begin is None or (self._load.arrival == "trace" and self._settings.duration_s == "auto"):
            return None  # a trace ends with its last request
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
        end = self._start + self._planned[1] if self._planned else self._expected_end(now) or self._start + self._last
        return None if end is None or end < now else (end - now) / SECOND  # a window may wait for its requests

    def _window(self, requests: RequestColumns) -> Window | None:
        """Return the measured window, ns from the start."""
        if self._whole:
            return whole_window(requests) if len(requests.due) else None
        if self._begin is None or self._end is None or self._end <= self._begin:
            return None
        begin, end = self._begin - self._start, self._end - self._start
        goal = self._settings.num_requests
        if goal is not None and not self._planned and not self._reason:
            ends = sorted(requests.end[(begin <= requests.end) & (requests.end < end)].tolist())
            end = min(end, int(ends[goal - 1]) + 1) if len(ends) >= goal else end  # exactly as many as configured
        return begin, end

    def _share(self, plan: LevelPlan) -> tuple[list[ClientJob], tuple[int, int] | None]:
        """Return each process's part, and the steady window of an open loop."""
        size, base = self._bench.clients.size, self._base()
        if self._load.arrival == "closed":
            users, num_requests = self._load.concurrency or 1, self._settings.num_requests
            limit, words = num_requests if self._whole else None, self._bench.maker.words
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
                    words=words,
                )
                for k in range(size)
            ], None
        schedule = plan.schedule()
        times = [due for due, _ in schedule]
        self._last = times[-1]
        requests = sum(1 + len(request.then) for _, request in schedule)
        gap = (times[-1] - times[0]) / max(requests - 1, 1) * size
        jobs = [
            ClientJob(**base, first_index=k, step=size, schedule=schedule[k::size], mean_gap_ns=gap)
            for k in range(size)
        ]
        return jobs, None if self._whole else plan.window_ns(times)

    def _base(self) -> dict[str, Any]:
        return {
            "url": self._bench.server.url,
            "tokenizer_dir": self._bench.maker.folder,
            "interface": self._bench.interface,
            "streaming": self._settings.streaming,
            "ignore_eos": self._bench.workload.ignore_eos,
            "timeout_ns": round(self._settings.timeout_s * SECOND),
            "id_base": randbits(30) << 32,
        }


def _part(whole: int, number: int, parts: int) -> int:
    """Return the share of one process, so that the shares add up."""
    return (whole + parts - 1 - number) // parts


# Live view of a running level: an updating line on a terminal, a line every few seconds elsewhere.

_EVERY_S = 5.0
_RATE_OVER_S = 2.0


class Meter:
    """Computes the line that shows the progress of a level from the shared counters."""

    def __init__(self, board: SharedCounters) -> None:
        self._board = board
        self._past: list[tuple[float, int]] = [(monotonic(), 0)]

    def line(self, phase: str, left_s: float | None) -> str:
        """Read the counters now and render them on one line.

        Args:
            phase: "warm-up", "measuring" or "finishing".
            left_s: seconds to the end of the window, None if unknown.
        """
        total = self._board.total
        at, ok, errors = monotonic(), total(OK), total(ERRORS)
        self._past.append((at, ok))
        while len(self._past) > 2 and self._past[1][0] < at - _RATE_OVER_S:
            self._past.pop(0)
        since, ok_then = self._past[0]
        rate = (ok - ok_then) / max(at - since, 1e-9)  # over the last seconds
        parts = [] if phase == "measuring" else [phase]
        parts += [f"{three_digits(rate)} req/s", f"{max(total(SENT) - ok - errors, 0)} in flight"]
        for name, value_us, number in (("TTFT", TTFT_US, TTFT_N), ("ITL", ITL_US, ITL_N)):
            if (mean_s := _mean(total(value_us), total(number))) is not None:  # None without streaming
                parts.append(f"{name} {three_digits(mean_s * 1e3)} ms")
        if errors:
            parts.append(count(errors, "error"))
        if left_s is not None:
            parts.append(f"{left_s:.0f} s left")
        return "  ".join(parts)


View = Callable[[str], object]
"""Shows the line of a level; called several times a second."""


def plain_view(title: str, write: Callable[[str], Any] = sys.stderr.write) -> View:
    """Return a view for logs: a line every few seconds, below the load it belongs to."""
    due, head = monotonic() + _EVERY_S, f"  {title}\n"

    def show(line: str) -> None:
        nonlocal due, head
        if monotonic() >= due:
            due = monotonic() + _EVERY_S
            write(f"{head}{wrapped(f'  {line}', 4)}\n")
            head = ""

    return show


@contextmanager
def live_view(title: str) -> Iterator[View]:
    """Yield the view that suits standard error: two lines that change in place on a terminal, or lines for logs."""
    if not redraws(sys.stderr):
        yield plain_view(title)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live("", console=Console(stderr=True), transient=True, auto_refresh=False) as live:
        yield lambda line: live.update(Text(f"  {title}\n{wrapped(f'  {line}', 4)}"), refresh=True)


def _mean(total_us: int, count: int) -> float | None:
    return total_us / count / 1e6 if count else None


def three_digits(value: float) -> str:
    """Format with three significant digits, without exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
