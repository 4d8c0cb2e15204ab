"""A day's load on instances that come and go. The instance serves 10/s at most; TTFT is 0.1 s plus 0.01 s per load."""

import numpy as np
import pytest

from pipelines.domain.benchmark import Slo
from pipelines.predict.config import AutoscalingSettings
from pipelines.predict.sizing.autoscale import BUSINESS, LoadCurve, counted_rates, day_rates
from pipelines.predict.sizing.autoscale import replay as replay_day

LOADS = np.array([0.0, 5.0, 10.0])
TTFT = np.repeat((0.1 + 0.01 * LOADS)[:, None], 100, axis=1)
CURVE = LoadCurve(LOADS, TTFT, TTFT * 0, TTFT + 1, queue=0.02 * LOADS, kv_use=LOADS / 10, kv_limit=1.0, most=10.0)
SLO = Slo("given", ttft_ms=250)


def replay(rates, *, slo=SLO, least=1, most=10, seed=1, drawn=True, **changes):
    """Replay a day; not drawn is a trace."""
    given = {
        "day": "auto", "cold_start_s": 100, "signal": "ttft", "up_at": 0.7, "down_at": 0.5, "up_after_s": 20,
        "down_after_s": 300, "least": 1, "step_s": 10,
    }  # fmt: skip
    scaling = AutoscalingSettings(**given | changes)
    return replay_day(rates, CURVE, scaling, slo, least=least, most=most, seed=seed if drawn else None)


def steady(rate, hours=1.0, step=10.0):
    return np.full(int(hours * 3600 / step), float(rate))


def test_a_fixed_fleet_pays_for_every_hour():
    found = replay(steady(20, hours=2), least=4, most=4, seed=1)
    assert found.instance_hours == pytest.approx(8.0)
    assert (found.starts, found.over) == (0, 0.0)
    assert found.requests == pytest.approx(2 * 3600 * 20, rel=0.02)


def test_what_cannot_be_served_waits_and_is_late():
    """12/s on one instance of 10/s: the queue grows by 2/s, and after 10 s everyone waits longer than the limit."""
    found = replay(steady(12), most=1, seed=1)
    assert found.over > 0.95


def test_an_instance_comes_after_the_cold_start_and_not_before():
    """35/s needs four; the first decision is after more than 20 s above, and is ready 100 s later."""
    quiet = np.concatenate([steady(1, hours=0.1), steady(35)])
    found = replay(quiet, seed=1, drawn=False)
    assert found.ready[:48].max() == 1
    assert found.ready.max() >= 4
    first = int(np.argmax(found.starting > 0))
    ready = int(np.argmax(found.ready > 1))
    assert (ready - first) * 10 == 100
    assert found.ready[-1] * 10 >= 35


def test_a_longer_cold_start_makes_more_requests_late():
    rates = day_rates(BUSINESS, 60.0, 10.0)
    shares = [replay(rates, cold_start_s=cold, seed=3).over for cold in (0, 120, 1200)]
    assert shares[0] <= shares[1] <= shares[2]
    assert shares[2] > shares[0]


def test_instances_go_when_the_load_does_and_do_not_swing():
    rates = np.concatenate([steady(35), steady(1, hours=3)])
    found = replay(rates, seed=1, drawn=False)
    assert found.ready[-1] == 1
    assert found.starts <= 10
    late = found.ready[len(steady(35)) + 1 :]
    assert (np.diff(late) <= 0).all()


@pytest.mark.parametrize("rate", [10, 14])
def test_a_signal_at_its_bound_changes_nothing(rate):
    """Two instances of 10/s use 0.5 of their KV cache at 10/s and 0.7 at 14/s: not below down_at, not above up_at."""
    assert set(replay(steady(rate), signal="kv_use", drawn=False).ready) == {2}


def test_a_day_costs_less_than_the_fixed_fleet():
    rates = day_rates(BUSINESS, 60.0, 10.0)
    fixed = replay(rates, least=8, most=8, seed=3)
    moving = replay(rates, most=8, seed=3)
    assert fixed.instance_hours == pytest.approx(24 * 8)
    assert moving.instance_hours < fixed.instance_hours
    assert moving.requests == fixed.requests


@pytest.mark.parametrize("signal", ["ttft", "queue_time", "kv_use"])
def test_every_signal_brings_enough_instances(signal):
    rates = np.concatenate([steady(1, hours=0.1), steady(35, hours=2)])
    found = replay(rates, signal=signal, up_at=0.6, down_at=0.2, seed=1)
    assert found.ready[0] == 1
    assert found.ready[-1] >= 4


def test_a_day_begins_with_what_its_first_load_needs():
    """20/s over 10/s, at 0.7 of it: three."""
    assert replay(steady(20), seed=1).ready[0] == 3


def test_the_same_seed_gives_the_same_day():
    rates = day_rates(BUSINESS, 60.0, 10.0)
    one, two, other = (replay(rates, seed=seed) for seed in (3, 3, 4))
    assert (one.rate == two.rate).all()
    assert one.instance_hours == two.instance_hours
    assert (one.rate != other.rate).any()


def test_the_busiest_hour_has_the_rate_that_was_asked_for():
    rates = day_rates(BUSINESS, 53.0, 10.0)
    assert len(rates) == 8640
    assert rates.max() == pytest.approx(53.0, rel=1e-3)
    assert rates.mean() == pytest.approx(53 * sum(BUSINESS) / 24 / 100, rel=1e-3)


def test_a_trace_is_counted_and_not_drawn_again():
    rates = counted_rates(np.array([0.0, 1.0, 2.0, 25.0]), 10.0)
    assert list(rates * 10) == [3, 0, 1]
    found = replay(rates, least=1, most=1, seed=1, drawn=False)
    assert found.requests == 4


def test_a_signal_of_ttft_needs_its_limit():
    with pytest.raises(ValueError, match="'queue_time' needs a TTFT limit"):
        replay(steady(1), signal="queue_time", slo=Slo("given", itl_ms=50), seed=1)
