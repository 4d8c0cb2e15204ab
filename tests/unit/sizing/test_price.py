"""What a fleet costs."""

import pytest

from pipelines.predict.config import PriceSettings
from pipelines.predict.sizing.fleet import Layout, cost, fleet, server_year

BOUGHT = {"server_usd": 320_000, "years": 4, "licence_usd": 4_500, "hosting_usd": 3_000}
"""NVIDIA's example: 320,000 / 4 + 8 x 4,500 + 3,000 = 119,000 USD a year."""
DAY = 86400


def priced(given, *, servers=1, capacity=10.0, average=None):
    """Return the cost of servers of 8 GPUs, each of which is one instance."""
    daily = None if average is None else average * DAY
    sized = fleet(capacity, capacity / servers, Layout(8, 8))
    load = {"tdp_w": 700.0, "isl": 2000.0, "osl": 200.0, "input_share": 0.25}
    return cost(PriceSettings(**given), sized, requests_per_day=daily, **load)


def test_a_thousand_prompts_of_the_published_example():
    """119,000 USD / (41.6/s x 31,536,000 s) = 0.0907 USD per thousand, with the server full all year."""
    found = priced({**BOUGHT, "utilisation": 1.0}, capacity=41.6)
    assert found.per_year == 119_000
    assert round(found.per_1k_requests, 4) == 0.0907


def test_power_is_that_of_the_gpus_at_full_load_and_of_the_building():
    """0.7 kW x 8 x 1.5 x 8,760 h x 0.10 USD = 7,358.40 USD."""
    parts, missing = server_year(PriceSettings(server_usd=100, years=1, kwh_usd=0.10, pue=1.5), 8, 700.0)
    assert dict(parts)["power"] == pytest.approx(7358.40)
    assert missing == ["licences", "hosting"]


def test_what_is_not_given_is_named_and_not_counted():
    found = priced({"server_usd": 100_000, "years": 5}, servers=2, average=5)
    assert found.per_year == 40_000
    assert found.missing == ("licences", "hosting", "power")


def test_renting_counts_every_gpu_of_the_servers():
    assert priced({"gpu_hour_usd": 2.0}, servers=2, average=5).per_year == 2.0 * 16 * 8760


def test_tokens_share_the_cost_by_the_time_they_take():
    """Half of 10/s over a year is 157.68 M requests; a quarter of the money buys 2,000 input tokens of each."""
    found = priced({"gpu_hour_usd": 1.0}, average=5)
    requests = 5 * 365 * DAY
    assert found.utilisation == 0.5
    assert found.per_million_input == pytest.approx(1e6 * 70_080 * 0.25 / (requests * 2000))
    assert found.per_million_output == pytest.approx(1e6 * 70_080 * 0.75 / (requests * 200))
    spent = (found.per_million_input * 2000 + found.per_million_output * 200) * requests / 1e6
    assert spent == pytest.approx(found.per_year)


def test_without_an_average_nothing_is_said_per_token():
    found = priced(BOUGHT)
    assert found.utilisation is None
    assert found.per_1k_requests is None


def test_no_price_of_the_gpus_is_no_price():
    assert priced({"licence_usd": 4500}) is None
