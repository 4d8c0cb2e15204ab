"""A fleet from a benchmark: the best load that was measured and meets the limits."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import UserError
from pipelines.predict.config import SizingSettings
from pipelines.predict.performance.read_measured import read_measured
from pipelines.predict.sizing.answer import over_limit
from pipelines.predict.sizing.fleet import Layout
from pipelines.predict.sizing.measured import from_measured
from tests.support.sizing_questions import demand

FILE = Path(__file__).parents[2] / "reference" / "benchmarks" / "aiperf_1_5.json"


def spread(p95):
    return Distribution(100, p95 / 2, 0.0, p95 / 2, p95 * 0.9, p95, p95 * 1.1, p95 * 1.2)


@pytest.fixture
def measured():
    """Loads of 2, 2.4 and 3 requests/s with TTFT P95 of 1, 2.9 and 5 s; TP 8."""
    one = read_measured([FILE])
    levels = [
        replace(one.levels[0], concurrency=users, requests_per_s=rate, ttft_s=spread(ttft), itl_s=spread(0.02))
        for users, rate, ttft in ((32, 2.4, 2.9), (64, 3.0, 5.0), (8, 2.0, 1.0))
    ]
    return replace(one, levels=tuple(levels))


def size(measured, percentile=95, ttft_ms=3000):
    sizing = SizingSettings(slo={"ttft_ms": ttft_ms, "percentile": percentile})
    return from_measured(measured, demand(31.0), sizing, Layout(8, 8))


def test_the_published_example_needs_13_servers(measured):
    """31/s over the 2.4/s that one server does within 3 s to the first token."""
    found = size(measured)
    assert found.best.requests_per_s == 2.4
    assert (found.fleet.servers, found.fleet.gpus) == (13, 104)
    assert [bool(each.missed) for each in found.levels] == [False, False, True]
    assert "TTFT P95 is 5,000 ms, the limit is 3,000 ms" in found.levels[-1].missed


def test_no_load_within_the_limits_says_the_nearest(measured):
    with pytest.raises(UserError, match=r"at the lowest \(concurrency 8, .*TTFT P95 is 1,000 ms, the limit is 10 ms"):
        size(measured, ttft_ms=10)
    slow = replace(measured.levels[0], ttft_s=replace(measured.levels[0].ttft_s, p95=17.7614))
    with pytest.raises(UserError, match=r"TTFT P95 is 17,761\.4 ms, the limit is 10 ms"):
        size(replace(measured, levels=(slow,)), ttft_ms=10)


@pytest.mark.parametrize(("ms", "shown"), [(4.1123, "4.12"), (16.21, "16.21"), (5.002, "5"), (1135.6, "1,135.6")])
def test_a_latency_over_its_limit_is_shown_above_it(ms, shown):
    """Rounded to the nearest, 4.1123 ms was "4.11 ms, the limit is 4.11 ms"."""
    assert over_limit("itl", 95, ms / 1000, 4.11) == f"ITL P95 is {shown} ms, the limit is 4.11 ms"


def test_a_percentile_that_was_not_measured_is_refused(measured):
    with pytest.raises(
        UserError, match=r"sizing\.slo\.percentile=97 is not stored in a benchmark\. Stored are 50, 90, 95, 99"
    ):
        size(measured, 97)


def test_a_limit_of_something_not_measured_is_refused(measured):
    blind = replace(measured, levels=tuple(replace(level, ttft_s=Distribution(0)) for level in measured.levels))
    with pytest.raises(UserError, match=r"has no P95 of TTFT at concurrency 8"):
        size(blind)
