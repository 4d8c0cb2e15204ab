"""Judge after each level whether the client was the limit, from reports of the client processes and the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from pipelines.domain.benchmark import ClientHealth, Summary
from pipelines.domain.summary import RequestTiming, Window, ordered, percentile
from pipelines.loadgen.columns import columns_of
from pipelines.loadgen.request_stream import ClientReport

BUSY = 0.9
"""Share of one CPU above which a client process, being one Python thread, counts as saturated."""
STEAL = 0.05
LAG_SHARE = 0.1
"""Tolerated lateness of the client as a share of the measured latency (p99 of both, p90 for the event loop) ..."""
SEND_LAG_S, LOOP_LAG_S = 1e-3, 3e-3
"""... or this many seconds, the cost of timers and schedulers on a busy machine."""
_GROWTH = 1.5
_GROWTH_LEAST_NS = 20_000_000
_HALF_LEAST = 8


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """CPU time of the whole machine between two readings: the busy share, and the share stolen by the host."""

    busy: float
    steal: float
    cpus: int


class MachineWatch:
    """Reads the machine's CPU times when created and when asked."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def load(self) -> MachineLoad:
        """Return the load since creation."""
        after = psutil.cpu_times()
        delta = {name: getattr(after, name) - getattr(self._before, name) for name in after._fields}
        # Linux counts guest time inside user time.
        total = sum(value for name, value in delta.items() if not name.startswith("guest")) or 1.0
        idle = delta.get("idle", 0.0) + delta.get("iowait", 0.0)
        steal = delta.get("steal", 0.0) / total
        return MachineLoad(busy=1 - idle / total - steal, steal=steal, cpus=psutil.cpu_count() or 1)


def judge(
    reports: Sequence[ClientReport], timings: Sequence[RequestTiming], summary: Summary, machine: MachineLoad
) -> ClientHealth:
    """Judge whether the numbers of a level say more about the client than about the server.

    Args:
        reports: of the client processes.
        timings: requests of the level.
        summary: of its window.
        machine: CPU load while it ran.
    """
    latency = summary.ttft_s if summary.ttft_s.count else summary.e2e_s
    busiest = max(reports, key=lambda report: report.cpu_share)
    send_lag = _percentile([t.sent_ns - t.intended_ns for t in timings], 0.99)
    lags = [lag for report in reports for lag in report.loop_lag_ns]
    loop_lag, loop_tail = _percentile(lags, 0.90), _percentile(lags, 0.99)
    reasons = []
    if busiest.cpu_share >= BUSY:
        advice = _more_clients(len(reports), machine)
        reasons.append(f"a client process filled CPU {busiest.cpu} ({busiest.cpu_share:.0%}): {advice}")
    if _matters(send_lag, latency.p99, SEND_LAG_S):
        reasons.append(
            f"requests left {send_lag * 1e3:.1f} ms late (p99), {_against(send_lag, latency.p99)} p99 latency"
        )
    if _matters(loop_lag, latency.p90, LOOP_LAG_S):
        full = f"; all {machine.cpus} CPUs were {machine.busy:.0%} busy" if machine.busy >= BUSY else ""
        reasons.append(
            f"stamps were {loop_lag * 1e3:.1f} ms late (p90), {_against(loop_lag, latency.p90)} p90 latency{full}"
        )
    if machine.steal >= STEAL:
        reasons.append(f"the host took {machine.steal:.0%} of the machine's CPU time away")
    facts = {
        "cpu_share": busiest.cpu_share,
        "cpu": float(busiest.cpu),
        "send_lag_p99_ms": send_lag * 1e3,
        "loop_lag_p90_ms": loop_lag * 1e3,
        "loop_lag_p99_ms": loop_tail * 1e3,
        "machine_busy_share": machine.busy,
        "machine_steal_share": machine.steal,
        "machine_cpus": float(machine.cpus),
        "processes": float(len(reports)),
        "nice": float(busiest.nice),
    }
    return ClientHealth(bool(reasons), "; ".join(reasons), facts)


def tail_note(client: ClientHealth, summary: Summary) -> str:
    """Return a note if only the last percent of the stamps is late: then p99 cannot be trusted, but the rest can."""
    latency = summary.ttft_s.p99 if summary.ttft_s.count else summary.e2e_s.p99
    if client.bottleneck or not _matters(client.facts["loop_lag_p99_ms"] / 1e3, latency, LOOP_LAG_S):
        return ""
    return "p99 may be too high: the client shared its CPUs with other work (see loop_lag_p99_ms)."


def growth_note(timings: Sequence[RequestTiming], window: Window) -> str:
    """Return a note if the second half of an open loop waited much longer than the first; empty otherwise."""
    middle = (window[0] + window[1]) // 2
    requests = columns_of([timing for timing in timings if timing.ok])
    waits = np.where(np.isnan(requests.ttft()), requests.e2e(), requests.ttft())
    first = ordered(waits[(window[0] <= requests.due) & (requests.due < middle)])
    second = ordered(waits[(middle <= requests.due) & (requests.due < window[1])])
    if min(len(first), len(second)) < _HALF_LEAST:
        return ""
    early, late = percentile(first, 0.5), percentile(second, 0.5)
    if late < _GROWTH * early or late - early < _GROWTH_LEAST_NS:
        return ""
    return (
        f"The queue grew: median wait {early / 1e6:.0f} ms in the first half of the window, {late / 1e6:.0f} ms in the "
        "second. The server does not keep up with this rate."
    )


def _percentile(values_ns: list[int], share: float) -> float:
    """Return a percentile in seconds; 0 without values."""
    return percentile(sorted(values_ns), share) / 1e9 if values_ns else 0.0


def _more_clients(processes: int, machine: MachineLoad) -> str:
    """Say what helps a saturated client: another process finds a free CPU here, or it does not."""
    if machine.busy >= BUSY or processes >= machine.cpus:
        return f"this machine has no other to spare ({machine.cpus} in all); ask from a larger one, with benchmark.url"
    return f"set benchmark.processes={processes + 1} or more"


def _matters(lag_s: float, latency_s: float | None, least_s: float) -> bool:
    return lag_s > max(least_s, LAG_SHARE * (latency_s or 0.0))


def _against(lag_s: float, latency_s: float | None) -> str:
    return f"{lag_s / latency_s:.0%} of the" if latency_s else "with no"
