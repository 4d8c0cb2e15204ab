"""Due times of open loops."""

from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from pipelines.loadgen.plan import offsets


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
