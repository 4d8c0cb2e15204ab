"""The numbers of a window, worked out by hand. Times in the comments are milliseconds."""

import pytest

from pipelines.domain.benchmark import Distribution, Slo
from pipelines.domain.summary import SECOND, distribution, percentile, summarise, whole_window
from tests.support.load_records import RequestTiming, columns_of

MS = 1_000_000


def request(index: int, due: int, *chunks: int, osl: int | None = None, isl: int = 10, lag: int = 0) -> RequestTiming:
    """A request due at `due` ms, sent `lag` ms later, with responses at these ms."""
    stamps = tuple(at * MS for at in chunks)
    sent = (due + lag) * MS
    return RequestTiming(index, due * MS, sent, stamps[0], stamps[-1], isl, osl or len(chunks), stamps)


def failed(index: int, due: int, end: int, kind: str) -> RequestTiming:
    return RequestTiming(index, due * MS, due * MS, None, end * MS, 10, 0, (), kind)


A = request(0, 0, 100, 120, 140, 160, 180)  # TTFT 100, E2E 180, ITL 80/4 = 20
B = request(1, 100, 300, 310, 320)  # TTFT 200, E2E 220, ITL 20/2 = 10


def test_two_requests_by_hand() -> None:
    """8 output and 20 input tokens in 320 ms, from the first request to the last response."""
    summary = summarise(columns_of([A, B]), (0, 320 * MS + 1), None)
    assert summary.window_s == pytest.approx(0.320)
    assert summary.requests == 2
    assert summary.requests_per_s == pytest.approx(2 / 0.320)
    assert summary.output_tokens_per_s == pytest.approx(8 / 0.320)
    assert summary.total_tokens_per_s == pytest.approx(28 / 0.320)
    assert (summary.ttft_s.min, summary.ttft_s.p50, summary.ttft_s.max) == pytest.approx((0.1, 0.15, 0.2))
    assert (summary.itl_s.mean, summary.itl_s.count) == pytest.approx((0.015, 2))
    assert summary.e2e_s.mean == pytest.approx(0.2)
    # gaps: 20, 20, 20, 20, 10, 10 -> mean 100/6
    assert (summary.token_gap_s.count, summary.token_gap_s.mean) == pytest.approx((6, 0.1 / 6))
    assert summary.goodput_per_s is None


def test_whole_window_is_first_request_to_last_response() -> None:
    """0 to 320 ms, the last response inside."""
    assert whole_window(columns_of([B, A])) == (0, 320 * MS + 1)
    with pytest.raises(ValueError, match="no requests"):
        whole_window(columns_of([]))


def test_latency_counts_from_when_the_request_was_due() -> None:
    """Sent 50 ms late: the wait belongs to TTFT and E2E."""
    summary = summarise(columns_of([request(0, 0, 80, 90, lag=50)]), (0, SECOND), None)
    assert (summary.ttft_s.p50, summary.e2e_s.p50) == pytest.approx((0.080, 0.090))


def test_rates_count_what_arrives_and_latencies_what_was_due() -> None:
    """Window 110-310: of A the tokens at 120, 140, 160, 180, of B those at 300; only B was due, only A ended."""
    summary = summarise(columns_of([A, B]), (100 * MS, 310 * MS), None)
    assert summary.output_tokens_per_s == pytest.approx(6 / 0.210)  # A at 100 as well: the start is inside
    assert summary.requests == 1
    assert summary.ttft_s.count == 1
    assert summary.ttft_s.p50 == pytest.approx(0.2)
    assert summary.total_tokens_per_s == pytest.approx((6 + 20) / 0.210)  # both prompts were done inside


def test_errors_are_counted_by_kind_and_give_no_latency() -> None:
    """A rejected request is no fast request."""
    summary = summarise(
        columns_of([A, failed(1, 10, 11, "rejected"), failed(2, 20, 21, "rejected")]), (0, SECOND), None
    )
    assert summary.errors == {"rejected": 2}
    assert (summary.requests, summary.e2e_s.count, summary.e2e_s.min) == (1, 1, pytest.approx(0.18))


def test_an_error_that_was_due_before_the_window_is_not_counted() -> None:
    """Warm-up is not measured."""
    assert summarise(columns_of([A, failed(1, 0, 500, "timeout")]), (100 * MS, SECOND), None).errors == {}


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo("x", ttft_ms=100), 1),  # A's TTFT is exactly 100
        (Slo("x", ttft_ms=200, itl_ms=10), 1),  # only B
        (Slo("x", ttft_ms=99, itl_ms=10), 0),
        (Slo("x", e2e_ms=220), 2),
    ],
)
def test_goodput_counts_requests_that_met_every_limit(slo: Slo, met: int) -> None:
    """A limit that is just reached is met."""
    assert summarise(columns_of([A, B]), (0, SECOND), slo).goodput_per_s == met


def test_one_token_has_no_itl_and_no_streaming_has_no_ttft() -> None:
    """No value is not 0."""
    summary = summarise(columns_of([request(0, 0, 50)]), (0, SECOND), None)
    assert (summary.itl_s, summary.ttft_s.count) == (Distribution(0), 1)
    whole = RequestTiming(0, 0, 0, None, 60 * MS, 10, 7)
    summary = summarise(columns_of([whole]), (0, SECOND), None)
    assert (summary.ttft_s, summary.itl_s) == (Distribution(0), Distribution(0))
    assert summary.output_tokens_per_s == 7


def test_responses_of_several_tokens_are_spread_over_windows() -> None:
    """Two responses, 5 tokens: the first window gets floor(5/2), the second the rest."""
    merged = request(0, 0, 100, 300, osl=5)
    first = summarise(columns_of([merged]), (0, 200 * MS), None)
    second = summarise(columns_of([merged]), (200 * MS, 400 * MS), None)
    assert (first.output_tokens_per_s * 0.2, second.output_tokens_per_s * 0.2) == pytest.approx((2, 3))


def test_percentiles_are_numpys() -> None:
    """Of 1, 2, 3, 4: p50 is 2.5, p90 is 1 + 0.9 * 3 = 3.7."""
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile([1, 2, 3, 4], 0.9) == pytest.approx(3.7)
    assert distribution([7.0]) == Distribution(1, 7, 7, 7, 7, 7, 7, 7)


def test_an_empty_window_is_refused() -> None:
    """A rate over no time is no number."""
    with pytest.raises(ValueError, match="window of -5 ns"):
        summarise(columns_of([A]), (10, 5), None)
