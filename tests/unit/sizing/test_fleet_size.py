"""From a peak to instances, GPUs and servers."""

import json

import pytest

from pipelines.predict.sizing.fleet import Layout, fleet
from tests.conftest import REFERENCE

SEED = json.loads((REFERENCE / "seed_cases.json").read_text())
SERVER = Layout(8, 8)


def test_31_requests_per_second_over_2_4_per_server_are_13_servers():
    case = SEED["sizing"][0]
    found = fleet(case["peak_rps"], case["rps_per_server"], SERVER)
    assert found.servers == case["servers"]
    assert round(found.raw, 2) == 12.92


def test_requests_in_a_server_are_its_rate_times_their_time():
    """Little's law: 2.4/s x (2.606 s + 500 x 21.4 ms) = 31.9, the 32 slots."""
    case = SEED["sizing"][0]
    assert case["osl"] * case["itl_ms"] == case["gen_ms"]
    slots = case["rps_per_server"] * (case["ttft_ms"] + case["gen_ms"]) / 1000
    assert round(slots) == case["slots_per_server_implied"]
    assert case["ttft_ms"] < case["ttft_limit_ms"]


@pytest.mark.parametrize(("peak", "raw"), [(199.77, 4.80), (200, 4.81)])
def test_almost_five_servers_are_five(peak, raw):
    """The published 4.81 is 200 / 41.6; 199.77 / 41.6 is 4.80. Both are 5 servers."""
    found = fleet(peak, 41.6, SERVER)
    assert round(found.servers_raw, 2) == raw
    assert found.servers == 5


@pytest.mark.parametrize(
    ("tp", "instances", "servers"), [(1, 9, 2), (2, 9, 3), (4, 9, 5), (8, 9, 9), (16, 3, 6), (3, 5, 3), (12, 2, 4)]
)
def test_instances_do_not_straddle_servers(tp, instances, servers):
    """TP 3 on 8 GPUs: two instances each, two GPUs idle; TP 12: two whole servers each."""
    found = fleet(instances, 1.0, Layout(tp, 8))
    assert (found.instances, found.servers, found.gpus) == (instances, servers, tp * instances)


def test_headroom_and_spares():
    """10 / (2 x 0.8) = 6.25 -> 7, and one more."""
    found = fleet(10, 2.0, Layout(1, 8), headroom=0.2, spare=1)
    assert (found.raw, found.needed, found.instances) == (6.25, 7, 8)


def test_whole_numbers_stay_whole_in_floating_point():
    assert fleet(0.3, 0.1, SERVER).needed == 3


@pytest.mark.parametrize("wrong", [{"peak": 0}, {"rate": 0}, {"rate": -1}, {"headroom": 1.0}, {"spare": -1}])
def test_nonsense_is_no_fleet(wrong):
    given = {"peak": 1.0, "rate": 1.0, "headroom": 0.0, "spare": 0} | wrong
    peak, rate = given.pop("peak"), given.pop("rate")
    with pytest.raises(ValueError, match="headroom"):
        fleet(peak, rate, SERVER, **given)
