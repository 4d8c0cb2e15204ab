"""When the client is called the limit, and when an open loop is called too fast."""

import re

import pytest

from pipelines.domain.benchmark import ClientHealth, Slo
from pipelines.domain.summary import summarise, whole_window
from pipelines.loadgen.health import MachineLoad, growth_note, judge, tail_note
from pipelines.loadgen.request_stream import ClientReport, PackedRows
from tests.support.load_records import RequestTiming, columns_of

MS = 1_000_000
IDLE = MachineLoad(busy=0.3, steal=0.0, cpus=2)


def request(index: int, due_ms: float, ttft_ms: float, lag_ms: float = 0.0) -> RequestTiming:
    due = int(due_ms * MS)
    first = due + int(ttft_ms * MS)
    return RequestTiming(index, due, due + int(lag_ms * MS), first, first + MS, 8, 2, (first, first + MS))


def health(
    ttft_ms: float = 50,
    lag_ms: float = 0.1,
    loop_ms: float = 0.5,
    cpu: float = 0.2,
    machine: MachineLoad = IDLE,
    slo: Slo | None = None,
) -> ClientHealth:
    """100 requests that all look alike."""
    requests = columns_of([request(k, 10 * k, ttft_ms, lag_ms) for k in range(100)])
    report = ClientReport(PackedRows(), {}, [int(loop_ms * MS)] * 50, cpu, 3, True)
    return judge([report], requests, summarise(requests, whole_window(requests)), machine, slo)


def test_a_client_with_room_is_no_limit() -> None:
    """The facts are kept all the same."""
    found = health()
    assert (found.bottleneck, found.reason) == (False, "")
    assert found.facts["send_lag_p99_ms"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpu": 0.95}, r"filled CPU 3 \(95%\): set benchmark\.processes=2 or more"),
        (
            {"cpu": 0.95, "machine": MachineLoad(0.96, 0, 2)},
            r"\(95%\): this machine has no other to spare \(2 in all\); ask from a larger one, with benchmark\.url",
        ),
        ({"cpu": 0.95, "machine": MachineLoad(0.6, 0, 1)}, r"no other to spare \(1 in all\)"),
        ({"lag_ms": 6}, r"left 6\.0 ms late \(p99\), 12% of the p99 latency"),
        ({"loop_ms": 8}, r"stamps were 8\.0 ms late \(p90\), 16% of the p90 latency"),
        ({"loop_ms": 8, "machine": MachineLoad(0.97, 0, 2)}, "all 2 CPUs were 97% busy"),
        ({"machine": MachineLoad(0.3, 0.2, 2)}, "the host took 20% of the machine's CPU time away"),
    ],
)
def test_a_client_at_its_limit_is_named_with_the_reason(changes: dict[str, float], words: str) -> None:
    """CPU, lateness in sending, lateness in stamping, a host that takes time away."""
    found = health(**changes)  # type: ignore[arg-type]
    assert found.bottleneck
    with pytest.raises(ValueError, match=words):
        raise ValueError(found.reason)


def test_lateness_that_is_small_beside_the_latency_is_no_limit() -> None:
    """6 ms against a p99 TTFT of 500 ms."""
    assert not health(ttft_ms=500, lag_ms=6, loop_ms=8).bottleneck


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        (Slo("given", ttft_ms=500), ""),
        (Slo("given", ttft_ms=500, itl_ms=90), r"left 12\.0 ms late \(p99\), 13% of the limit, which is above the p99"),
        (Slo("given", e2e_ms=20), r"left 12\.0 ms late \(p99\), 24% of the p99 latency"),
    ],
)
def test_a_search_is_disturbed_only_by_what_could_change_its_verdict(slo: Slo, words: str) -> None:
    """12 ms are much of a TTFT of 50 ms, and nothing to a limit of 500; one token after the first is allowed 90 ms."""
    found = health(lag_ms=12, loop_ms=8 if not words else 0.5, slo=slo)
    assert found.bottleneck == bool(words)
    assert re.search(words, found.reason)


def test_a_late_tail_is_a_note_and_no_limit() -> None:
    """3 of 100 stamps 20 ms late: p90 is right, p99 is not."""
    requests = columns_of([request(k, 10 * k, 50) for k in range(100)])
    summary = summarise(requests, whole_window(requests))
    report = ClientReport(PackedRows(), {}, [MS // 10] * 97 + [20 * MS] * 3, 0.2, 0, True)
    found = judge([report], requests, summary, IDLE)
    assert not found.bottleneck
    assert "p99 may be too high" in tail_note(found, summary)
    assert tail_note(health(), summary) == ""


def test_a_queue_that_grows_is_noted() -> None:
    """TTFT 100 ms at first and 10 ms more with each request: medians 340 and 840 ms."""
    growing = [request(k, 20 * k, 100 + 10 * k) for k in range(100)]
    assert "345 ms in the first half of the window, 845 ms" in growth_note(columns_of(growing), (0, 2000 * MS))


def test_a_steady_queue_and_few_requests_are_not() -> None:
    """No trend, or too little to tell one."""
    steady = [request(k, 20 * k, 100 + k % 7) for k in range(100)]
    assert growth_note(columns_of(steady), (0, 2000 * MS)) == ""
    assert growth_note(columns_of([request(k, 20 * k, 100 * k + 1) for k in range(10)]), (0, 200 * MS)) == ""
