"""Lengths are drawn as their distribution says."""

from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import Any

import pytest

from pipelines.domain.errors import UserError
from pipelines.loadgen.config import LengthSettings
from pipelines.loadgen.plan import sampler


def draws(count: int = 20_000, **length: Any) -> list[int]:
    draw = sampler(LengthSettings.model_validate(length), Random(1), key="workload.isl")
    return [draw() for _ in range(count)]


def test_fixed_is_always_the_same() -> None:
    """No chance in it."""
    assert set(draws(distribution="fixed", mean=128)) == {128}


@pytest.mark.parametrize("family", ["normal", "lognormal"])
def test_mean_and_deviation_are_those_of_the_tokens(family: str) -> None:
    """Also for lognormal: the arithmetic mean, not that of the logarithm. Standard error of the mean is 0.35."""
    found = draws(distribution=family, mean=200, stdev=50)
    assert fmean(found) == pytest.approx(200, abs=1.5)
    assert pstdev(found) == pytest.approx(50, abs=1.5)


def test_uniform_reaches_both_ends() -> None:
    """Every length from min to max, both included."""
    assert set(draws(1000, distribution="uniform", min=3, max=6)) == {3, 4, 5, 6}


def test_draws_outside_the_limits_become_the_limits() -> None:
    """A normal draw may be negative; a length may not."""
    found = draws(distribution="normal", mean=10, stdev=20, min=4, max=12)
    assert (min(found), max(found)) == (4, 12)
    assert min(draws(distribution="normal", mean=2, stdev=9)) == 1


def test_the_same_seed_gives_the_same_lengths() -> None:
    """A workload can be repeated."""
    assert draws(9, distribution="normal", mean=99, stdev=9) == draws(9, distribution="normal", mean=99, stdev=9)


def test_empirical_draws_what_was_seen(tmp_path: Path) -> None:
    """Values of the configuration or lines of a file."""
    assert set(draws(500, distribution="empirical", values=[7, 70])) == {7, 70}
    (tmp_path / "isl.txt").write_text("5\n\n50\n")
    assert set(draws(500, distribution="empirical", file=tmp_path / "isl.txt")) == {5, 50}


@pytest.mark.parametrize(
    ("text", "words"), [("5\nfive\n", "line 2: 'five' is not a positive number"), ("\n", "holds no numbers")]
)
def test_a_file_without_numbers_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """File and line are named."""
    (tmp_path / "isl.txt").write_text(text)
    with pytest.raises(UserError, match=words):
        draws(distribution="empirical", file=tmp_path / "isl.txt")


def test_a_missing_file_is_refused() -> None:
    """With the key it was given under."""
    with pytest.raises(UserError, match=r"workload.isl.file=/no/such cannot be read"):
        draws(distribution="empirical", file="/no/such")
