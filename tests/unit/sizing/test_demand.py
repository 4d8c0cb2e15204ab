"""How many requests per second a fleet is sized for."""

import json

import pytest
from scipy.stats import poisson

from pipelines.domain.units import rate_of_users
from pipelines.predict.sizing.question import Demand, poisson_percentile, requests_per_day
from tests.conftest import REFERENCE

SEED = json.loads((REFERENCE / "seed_cases.json").read_text())


@pytest.mark.parametrize("case", [*SEED["poisson"], {"lam": 200, "p": 0.95, "k": 224}], ids=lambda case: case["lam"])
def test_published_percentiles_of_poisson(case):
    assert poisson_percentile(case["lam"], 100 * case["p"]) == case["k"]


@pytest.mark.parametrize("average", [0.01, 0.5, 1, 3.7, 53, 800, 20_000])
@pytest.mark.parametrize("percent", [1, 50, 90, 95, 99, 99.9])
def test_the_percentile_is_that_of_scipy(average, percent):
    assert poisson_percentile(average, percent) == poisson.ppf(percent / 100, average)


def test_a_rate_over_eight_hours_serves_so_many_daily_users():
    """70.7/s x 8 h x 3600 = 2,036,160 requests, at 3 each 678,720 users."""
    case = SEED["sizing"][1]
    daily = requests_per_day(case["rps_per_server"], case["hours"])
    assert daily == pytest.approx(case["requests_per_day"], rel=1e-12)
    assert rate_of_users(case["dau"], case["requests_per_user"], case["hours"]) == pytest.approx(70.7)
    assert Demand(70.7, 80, 8, "").requests_per_day == pytest.approx(2_036_160)


def test_tokens_of_a_day_are_those_of_the_lengths_they_are_told_with():
    """The published 4.2e9 and 261e6 tokens belong to 2048/128, not to the 2000/200 beside them."""
    case = SEED["sizing"][1]
    assert case["requests_per_day"] * case["isl"] == case["tokens_in_correct"]
    assert case["requests_per_day"] * case["osl"] == case["tokens_out_correct"]
    assert case["requests_per_day"] * 2048 == pytest.approx(case["tokens_in_stated"], rel=0.01)
    assert case["requests_per_day"] * 128 == pytest.approx(case["tokens_out_stated"], rel=0.01)
