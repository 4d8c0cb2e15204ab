"""What holds of every summary, whatever the requests."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.domain.benchmark import Slo
from pipelines.domain.summary import distribution, percentile, summarise, whole_window
from tests.support.load_records import RequestTiming, columns_of

DAY = 86_400 * 10**9
spans = st.integers(0, 10**10)


@st.composite
def timings(draw: st.DrawFn) -> RequestTiming:
    """One request as a server and a client could have made it."""
    due = draw(st.integers(0, 10**11))
    sent = due + draw(st.integers(0, 10**8))
    if draw(st.integers(0, 9)) == 0:
        return RequestTiming(0, due, sent, None, sent + draw(spans), 5, 0, (), "timeout")
    isl = draw(st.integers(1, 5000))
    if draw(st.booleans()):
        return RequestTiming(0, due, sent, None, sent + draw(spans), isl, draw(st.integers(1, 500)))
    stamps = [sent + draw(spans)]
    for gap in draw(st.lists(st.integers(0, 10**9), max_size=12)):
        stamps.append(stamps[-1] + gap)
    tokens = len(stamps) + draw(st.integers(0, 3)) * draw(st.integers(0, 1))
    return RequestTiming(0, due, sent, stamps[0], stamps[-1], isl, tokens, tuple(stamps))


loads = st.lists(timings(), min_size=1, max_size=25)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60))
def test_percentiles_are_ordered_and_numpys(values: list[float]) -> None:
    """Minimum <= p50 <= p90 <= p95 <= p99 <= max, mean between the ends, equal to numpy's default."""
    found = distribution(values)
    row = [found.min, found.p50, found.p90, found.p95, found.p99, found.max]
    assert row == sorted(row)  # type: ignore[type-var]
    assert found.min <= found.mean <= found.max  # type: ignore[operator]
    assert percentile(sorted(values), 0.9) == pytest.approx(float(np.percentile(values, 90)), rel=1e-9, abs=1e-9)


@given(loads, st.floats(0.1, 10_000), st.floats(0.1, 1000))
def test_goodput_is_never_above_the_request_rate(load: list[RequestTiming], ttft: float, itl: float) -> None:
    """And tighter limits never give more of it."""
    window = whole_window(columns_of(load))
    loose = summarise(columns_of(load), window, Slo("x", ttft, itl))
    tight = summarise(columns_of(load), window, Slo("x", ttft / 2, itl))
    assert tight.goodput_per_s <= loose.goodput_per_s <= loose.requests_per_s  # type: ignore[operator]


@given(loads)
def test_the_first_token_is_never_after_the_last(load: list[RequestTiming]) -> None:
    """TTFT <= E2E for each request, hence for their means and extremes."""
    streamed = [t for t in load if t.first_token_ns is not None]
    if streamed:
        summary = summarise(columns_of(streamed), whole_window(columns_of(streamed)))
        assert summary.ttft_s.max <= summary.e2e_s.max  # type: ignore[operator]
        assert summary.ttft_s.min <= summary.e2e_s.min  # type: ignore[operator]


@given(loads, st.lists(st.integers(1, 2 * 10**11), max_size=4))
def test_neighbouring_windows_add_up(load: list[RequestTiming], cuts: list[int]) -> None:
    """Requests and tokens are neither lost nor counted twice, wherever time is cut."""
    edges = [0, *sorted(set(cuts)), DAY]
    parts = [summarise(columns_of(load), window) for window in pairwise(edges)]
    fine = [t for t in load if t.ok]
    assert sum(p.requests for p in parts) == len(fine)
    tokens = sum(p.output_tokens_per_s * p.window_s for p in parts)
    total = sum(p.total_tokens_per_s * p.window_s for p in parts)
    assert tokens == pytest.approx(sum(t.osl for t in fine))
    assert total == pytest.approx(sum(t.osl + t.isl for t in fine))
    assert sum(sum(p.errors.values()) for p in parts) == len(load) - len(fine)


@given(loads)
def test_over_all_requests_rates_and_latencies_are_of_the_same(load: list[RequestTiming]) -> None:
    """System throughput: output tokens / (last response - first request)."""
    window = whole_window(columns_of(load))
    summary = summarise(columns_of(load), window)
    assert summary.requests == summary.e2e_s.count == sum(t.ok for t in load)
    assert summary.output_tokens_per_s * summary.window_s == pytest.approx(sum(t.osl for t in load if t.ok))
