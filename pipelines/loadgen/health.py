"""Judge after each level whether the client was the limit, from reports of the client processes and the machine."""

import math
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from pipelines.domain.benchmark import ClientHealth, Slo, Summary
from pipelines.domain.summary import RECORD_FIELDS, SECOND, RequestColumns, Window, ordered, percentile
from pipelines.host.lifetimes import repeated

if TYPE_CHECKING:
    from pipelines.loadgen.request_stream import ClientReport

BUSY = 0.9
"""Share of one CPU above which a client process, being one Python thread, counts as saturated."""
STEAL = 0.05
LAG_SHARE = 0.1
"""Tolerated lateness of the client as a share of the measured latency (p99 of both, p90 for the event loop) ..."""
SEND_LAG_S, LOOP_LAG_S = 1e-3, 3e-3
"""... or this many seconds, the cost of timers and schedulers on a busy machine."""
_PART = 4096
_GROWTH = 1.5
_GROWTH_LEAST_NS = 20_000_000
_HALF_LEAST = 8
_ENDED = 0.98


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


_BEFORE_S, _BEFORE_BUSY, _LONGEST_WAIT_S = 0.25, 0.2, 60.0


def other_work(*, wait: bool, note: Callable[[str], None]) -> str:
    """Check the idle machine, with `wait` for up to a minute; return the problems, empty if it is quiet."""
    end = time.monotonic() + (_LONGEST_WAIT_S if wait else 0)
    waits = False
    while True:
        watch = MachineWatch()
        time.sleep(_BEFORE_S)
        load = watch.load()
        share = load.busy + load.steal
        if share <= _BEFORE_BUSY:
            return ""
        fault = f"other work kept the {load.cpus} CPUs of this machine {share:.0%} busy"
        if time.monotonic() >= end:
            return f"{fault}, for a minute" if wait else fault
        if not waits:
            note(f"waiting for a quiet machine: {fault}")
        waits = True


def judge(
    reports: "Sequence[ClientReport]",
    requests: RequestColumns,
    summary: Summary,
    machine: MachineLoad,
    slo: Slo | None = None,
) -> ClientHealth:
    """Judge whether the numbers of a level say more about the client than about the server.

    Args:
        reports: of the client processes.
        requests: of the level.
        summary: of its window.
        machine: CPU load while it ran.
        slo: limits by which a search judges the level: lateness then matters beside them, not beside shorter times.
    """
    limit_s = 0.0 if slo is None else _shortest_s(slo, summary)
    latency = summary.ttft_s if summary.ttft_s.count else summary.e2e_s
    busiest = max(reports, key=lambda report: report.cpu_share)
    send_lag = _percentile(requests.sent - requests.due, 0.99)
    lags = [lag for report in reports for lag in report.loop_lag_ns]
    loop_lag, loop_tail = _percentile(lags, 0.90), _percentile(lags, 0.99)
    reasons = []
    if busiest.cpu_share >= BUSY:
        advice = _more_clients(len(reports), machine)
        reasons.append(f"a client process filled CPU {busiest.cpu} ({busiest.cpu_share:.0%}): {advice}")
    if _matters(send_lag, max(latency.p99 or 0.0, limit_s), SEND_LAG_S):
        reasons.append(
            f"requests left {send_lag * 1e3:.1f} ms late (p99), {_against(send_lag, latency.p99, limit_s)} p99 latency"
        )
    if _matters(loop_lag, max(latency.p90 or 0.0, limit_s), LOOP_LAG_S):
        full = f"; all {machine.cpus} CPUs were {machine.busy:.0%} busy" if machine.busy >= BUSY else ""
        reasons.append(
            f"stamps were {loop_lag * 1e3:.1f} ms late (p90), "
            f"{_against(loop_lag, latency.p90, limit_s)} p90 latency{full}"
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


def growth_note(requests: RequestColumns, window: Window) -> str:
    """Return a note if the second half of an open loop waited much longer than the first; empty otherwise."""
    middle = (window[0] + window[1]) // 2
    waits, fine = np.where(np.isnan(requests.ttft()), requests.e2e(), requests.ttft()), requests.fine()
    first = ordered(waits[fine & (window[0] <= requests.due) & (requests.due < middle)])
    second = ordered(waits[fine & (middle <= requests.due) & (requests.due < window[1])])
    if min(len(first), len(second)) < _HALF_LEAST:
        return ""
    early, late = percentile(first, 0.5), percentile(second, 0.5)
    if late < _GROWTH * early or late - early < _GROWTH_LEAST_NS:
        return ""
    return (
        f"The queue grew: median wait {early / 1e6:.0f} ms in the first half of the window, {late / 1e6:.0f} ms in the "
        "second. The server does not keep up with this rate."
    )


def cold_note(requests: RequestColumns, window: Window) -> str:
    """Return a note if requests of an open loop took longer than its warm-up, so that fewer ended than were sent."""
    fine, begin = requests.fine(), window[0]
    sent = fine & (begin <= requests.due) & (requests.due < window[1])
    ended, count = int((fine & (begin <= requests.end) & (requests.end < window[1])).sum()), int(sent.sum())
    if ended >= _ENDED * count or float(requests.e2e()[sent].mean()) <= begin:
        return ""
    slowest = math.ceil(float(requests.e2e()[sent].max()) / SECOND)
    return (
        f"Requests took longer than the warm-up of {begin / SECOND:.3g} s: {count:,} were sent in the window and "
        f"{ended:,} ended in it, so rates are too low. Set benchmark.warmup_s={slowest} or more."
    )


def _percentile(values_ns: Any, share: float) -> float:
    """Return a percentile in seconds; 0 without values."""
    return percentile(ordered(values_ns), share) / 1e9 if len(values_ns) else 0.0


def _more_clients(processes: int, machine: MachineLoad) -> str:
    """Return the remedy for a saturated client, by whether another process finds a free CPU here."""
    if machine.busy >= BUSY or processes >= machine.cpus:
        return f"this machine has no other to spare ({machine.cpus} in all); ask from a larger one, with benchmark.url"
    return f"set benchmark.processes={processes + 1} or more"


def _matters(lag_s: float, latency_s: float | None, least_s: float) -> bool:
    return lag_s > max(least_s, LAG_SHARE * (latency_s or 0.0))


def _against(lag_s: float, latency_s: float | None, limit_s: float) -> str:
    if limit_s > (latency_s or 0.0):
        return f"{lag_s / limit_s:.0%} of the limit, which is above the"
    return f"{lag_s / latency_s:.0%} of the" if latency_s else "with no"


def _shortest_s(slo: Slo, summary: Summary) -> float:
    """Return the shortest time that the limits allow, seconds; a limit of ITL allows so much for each token."""
    steps = max((summary.osl.mean or 0.0) - 1, 1.0)
    times = (slo.ttft_ms, slo.e2e_ms, slo.itl_ms and slo.itl_ms * steps)
    return min((time for time in times if time), default=0.0) / 1e3


# Convert request records to columns, the form that `pipelines.domain.summary` reads.


class Chunks:
    """Arrival times of the responses of requests, ns."""

    def __init__(self, stamps: Any, count: Any, order: Any) -> None:
        """Take the stamps of all requests.

        Args:
            stamps: number[total], of one request after the other.
            count: int64[n], how many each of these has.
            order: int64[n], which of these is the first request, the second ...
        """
        self.count, self._stamps = count[order], stamps
        self._start: Any = (np.cumsum(count) - count)[order]
        place = np.empty(len(order), dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        self._request: Any = np.repeat(place, count)

    def before(self, time: float) -> Any:
        """See `pipelines.domain.summary.Responses.before`."""
        return np.bincount(self._request[self._stamps < time], minlength=len(self.count))

    def gaps(self, which: Any) -> Any:
        """See `pipelines.domain.summary.Responses.gaps`."""
        same = self._request[1:] == self._request[:-1]
        return np.diff(self._stamps)[same & which[self._request[1:]]]

    def of(self, request: int) -> list[int]:
        """Return the stamps of one request."""
        start = self._start[request]
        stamps: list[int] = self._stamps[start : start + self.count[request]].tolist()
        return stamps


def collected(reports: "Sequence[ClientReport]", start_ns: int) -> RequestColumns:
    """Take the rows of all reports, which are empty afterwards; in the order of the load, ns from its start."""
    rows = [report.rows for report in reports]
    numbers = np.concatenate([np.frombuffer(each.numbers, np.int64) for each in rows]).reshape(-1, rows[0].WIDE)
    stamps = np.concatenate([np.frombuffer(each.stamps, np.int64) for each in rows])
    stamps -= start_ns
    order = np.argsort(numbers[:, 0])
    index, due, sent, first, end, isl, osl, _ = numbers[order].T
    failed = any(each.errors for each in rows)
    kinds = [each.errors.get(place) for each in rows for place in range(len(each))] if failed else []
    for each in rows:
        each.clear()
    return RequestColumns(
        due=(due - start_ns).astype(np.float64),
        first_token=np.where(first < 0, np.nan, first - start_ns),
        end=(end - start_ns).astype(np.float64),
        isl=isl,
        osl=osl,
        errors=tuple(kinds[place] for place in order) if failed else (),
        responses=Chunks(stamps, numbers[:, -1], order),
        sent=(sent - start_ns).astype(np.float64),
        index=index,
        per_second=SECOND,
    )


def stored(requests: RequestColumns) -> Iterator[tuple[str, Iterator[list[Any]]]]:
    """Yield the names of `RECORD_FIELDS` and their values, some thousands at a time: all at once are large."""

    def parts(value: Callable[[slice], list[Any]]) -> Iterator[list[Any]]:
        return (value(slice(start, start + _PART)) for start in range(0, len(requests.due), _PART))

    def whole(column: Any) -> Iterator[list[Any]]:
        return parts(lambda part: [None if value != value else int(value) for value in column[part].tolist()])

    assert isinstance(requests.responses, Chunks)
    of, places, errors = requests.responses.of, range(len(requests.due)), requests.errors or (None,) * len(requests.due)
    names = ("index", "due", "sent", "first_token", "end", "isl", "osl")
    for field, name in zip(RECORD_FIELDS, names, strict=False):
        yield field, whole(getattr(requests, name))
    yield RECORD_FIELDS[-2], parts(lambda part: [*map(of, places[part])])
    yield RECORD_FIELDS[-1], parts(lambda part: [*errors[part]])


def from_stored(columns: Mapping[str, Sequence[Any]]) -> RequestColumns:
    """Read what `stored` yielded. A float64 holds ns exactly for 104 days.

    Raises:
        ValueError: a column is missing or of another length.
    """
    if missing := [name for name in RECORD_FIELDS if name not in columns]:
        raise ValueError(f"request records lack the columns {', '.join(missing)}")
    index, due, sent, first, end, isl, osl, chunks, errors = lists = [columns[name] for name in RECORD_FIELDS]
    if len(set(map(len, lists))) > 1:
        raise ValueError("the columns of request records are not of equal length")
    count = np.array([len(stamps) for stamps in chunks], dtype=np.int64)
    stamps = np.fromiter(chain.from_iterable(chunks), np.float64, int(count.sum()))
    return RequestColumns(
        due=np.array(due, dtype=np.float64),
        first_token=np.array(first, dtype=np.float64),  # NaN for None
        end=np.array(end, dtype=np.float64),
        isl=np.array(isl, dtype=np.int64),
        osl=np.array(osl, dtype=np.int64),
        errors=tuple(errors),
        responses=Chunks(stamps, count, np.arange(len(count))),
        sent=np.array(sent, dtype=np.float64),
        index=np.array(index, dtype=np.int64),
        per_second=SECOND,
    )


# Sample the server's Prometheus page every second of a window: the state of KV cache and scheduler.

_PERIOD_S = 1.0
_FAMILIES = {
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block", "kv_cache_block_type"),
    "nv_trt_llm_runtime_memory_metrics": ("memory", "memory_type"),
    "nv_trt_llm_request_metrics": ("requests", "request_type"),
    "nv_trt_llm_inflight_batcher_metrics": ("batcher", "inflight_batcher_specific_metric"),
}
"""Family -> prefix of our names, label that distinguishes its series (TensorRT-LLM's custom metrics reporter)."""


_CACHED = ("vllm:prefix_cache_hits", "trtllm_prompt_cached_tokens")
"""Counters of input tokens that came from the KV cache: vLLM's, and trtllm-serve's."""


def read_metrics(text: str) -> dict[str, float]:
    """Read TensorRT-LLM's families and the KV cache's hits from a Prometheus page, e.g. {"kv_cache_block_used": 12.0}.

    Series of several models or versions are summed.
    """
    from prometheus_client.parser import text_string_to_metric_families

    gauges: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name in _FAMILIES:
            prefix, label = _FAMILIES[family.name]
            for sample in family.samples:
                name = f"{prefix}_{sample.labels.get(label, 'unnamed')}"
                gauges[name] = gauges.get(name, 0.0) + sample.value
        elif family.name in _CACHED:
            gauges["cached_tokens"] = gauges.get("cached_tokens", 0.0) + sum(each.value for each in family.samples)
    return gauges


class MetricsWatch:
    """Samples the page while a level runs."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._samples: list[dict[str, float]] = []
        self.fault = ""
        """Why there are no values, for messages."""

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Read the page before the block, every second of it, and after it."""
        if self._url is None:
            yield
            return
        self._sample()
        with repeated(self._sample, _PERIOD_S, "metrics"):
            yield

    def summary(self) -> dict[str, Any]:
        """Return mean and maximum of every gauge over the samples, and the number of samples."""
        if not self._samples:
            return {"samples": 0} | ({"fault": self.fault} if self.fault else {})
        names = sorted(set().union(*self._samples))
        columns = {name: [sample[name] for sample in self._samples if name in sample] for name in names}
        gauges = {name: {"mean": sum(row) / len(row), "max": max(row)} for name, row in columns.items()}
        return {"samples": len(self._samples), **gauges}

    @property
    def cached_tokens(self) -> float | None:
        """Input tokens that came from the KV cache between the first and the last sample; None if not reported."""
        if not self._samples:
            return None
        first, last = self._samples[0], self._samples[-1]
        for name, tokens in (("cached_tokens", 1.0), ("kv_cache_block_reused", last.get("kv_cache_block_tokens_per"))):
            if name in first and name in last and tokens:
                return max(last[name] - first[name], 0.0) * tokens
        return None

    def _sample(self) -> None:
        try:
            with urllib.request.urlopen(str(self._url), timeout=5) as page:
                self._samples.append(read_metrics(page.read().decode()))
        except (OSError, HTTPException, ValueError) as error:  # unreachable; cut short; a page without metrics
            self.fault = f"{self._url}: {error}"
