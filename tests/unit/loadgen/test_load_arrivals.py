"""Due times of open loops and of traces."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from pipelines.domain.errors import UserError
from pipelines.loadgen.plan import TraceItem, offsets, read_trace


def gaps(arrival: str, rate: float, cv: float = 1.0) -> list[float]:
    """20,000 gaps in units of the mean gap."""
    times = [0, *islice(offsets(arrival, rate, cv, Random(3)), 20_000)]
    return [(after - before) / 1e9 * rate for before, after in pairwise(times)]


def test_constant_is_exact_and_does_not_drift() -> None:
    """The third request of 3 per second is due at 1 s exactly."""
    assert list(islice(offsets("constant", 3, 1, Random(0)), 3)) == [333_333_333, 666_666_667, 1_000_000_000]


@pytest.mark.parametrize(("arrival", "cv", "expected"), [("poisson", 1, 1), ("gamma", 3, 3), ("gamma", 0.5, 0.5)])
def test_gaps_have_the_mean_and_the_variation_asked_for(arrival: str, cv: float, expected: float) -> None:
    """Poisson gaps vary as much as their mean; gamma as cv says."""
    found = gaps(arrival, 40, cv)
    assert fmean(found) == pytest.approx(1, rel=0.07)
    assert pstdev(found) / fmean(found) == pytest.approx(expected, rel=0.07)


def test_a_trace_starts_at_zero_in_order_of_time(tmp_path: Path) -> None:
    """Twice as fast halves the times."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 12, "prompt": "hi", "osl": 4}\n{"time": 10, "isl": 8, "osl": 2}\n')
    assert read_trace(path, speed=2) == [TraceItem(0, 2, isl=8), TraceItem(1_000_000_000, 4, prompt="hi")]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '{"time": 1, "osl": 4}',
        '{"time": 1, "isl": 3, "prompt": "both", "osl": 4}',
        '{"time": "1", "isl": 3, "osl": 4}',
        '{"time": 1, "isl": 3, "osl": 0}',
        '{"time": NaN, "isl": 3, "osl": 1}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """With its number and what it says."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 1, "isl": 3, "osl": 4}\n' + line)
    with pytest.raises(UserError, match="line 2: '" + line[:5].replace("{", "\\{")):
        read_trace(path, speed=1)


def test_an_empty_or_missing_trace_is_refused(tmp_path: Path) -> None:
    """There is nothing to send."""
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="empty is empty"):
        read_trace(tmp_path / "empty", speed=1)
    with pytest.raises(UserError, match="missing cannot be read"):
        read_trace(tmp_path / "missing", speed=1)
