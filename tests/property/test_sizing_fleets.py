"""What must hold for every fleet, whatever the numbers."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.domain.benchmark import Slo
from pipelines.predict.sizing.document import front
from pipelines.predict.sizing.fleet import Layout, fleet
from pipelines.predict.sizing.instance import InstanceUnderLoad, OutOfReachError, instance
from pipelines.predict.sizing.question import poisson_percentile
from tests.support.sizing_questions import made_up, question

rates = st.floats(0.01, 1e5)
layouts = st.builds(Layout, st.integers(1, 32), st.integers(1, 16))


@given(rates, rates, layouts, st.floats(0, 0.9), st.integers(0, 5), st.floats(1, 10))
def test_more_load_never_needs_fewer_servers(peak, rate, layout, headroom, spare, more):
    one = fleet(peak, rate, layout, headroom=headroom, spare=spare)
    two = fleet(peak * more, rate, layout, headroom=headroom, spare=spare)
    assert two.servers >= one.servers
    assert two.instances >= one.instances


@given(rates, rates, layouts, st.integers(0, 5))
def test_spares_add_exactly(peak, rate, layout, spare):
    assert fleet(peak, rate, layout, spare=spare).instances == fleet(peak, rate, layout).instances + spare


@given(rates, rates, layouts, st.floats(0, 0.9), st.floats(0, 0.9))
def test_more_headroom_never_needs_fewer(peak, rate, layout, one, two):
    low, high = sorted((one, two))
    assert fleet(peak, rate, layout, headroom=low).instances <= fleet(peak, rate, layout, headroom=high).instances


@given(rates, rates, layouts, st.floats(0, 0.9), st.integers(0, 3))
def test_fleets_serve_the_peak_and_one_instance_fewer_does_not(peak, rate, layout, headroom, spare):
    found = fleet(peak, rate, layout, headroom=headroom, spare=spare)
    usable = rate * (1 - headroom)
    assert found.needed * usable >= peak * (1 - 1e-6)
    assert found.needed == 1 or (found.needed - 1) * usable < peak
    assert found.needed - 1 < max(found.raw, 1e-9) <= found.needed * (1 + 1e-6)


@given(st.integers(1, 500), layouts)
def test_instances_lie_whole_on_servers(instances, layout):
    servers = layout.servers(instances)
    if layout.instances_per_server:
        assert layout.instances_per_server * (servers - 1) < instances <= layout.instances_per_server * servers
    else:
        assert servers == instances * layout.servers_per_instance
    assert servers * layout.gpus_per_server >= instances * layout.gpus_per_instance


@given(st.floats(0.01, 1e4), st.floats(1, 99.9), st.floats(1, 99.9))
def test_a_higher_percentile_is_never_a_lower_peak(average, one, two):
    low, high = sorted((one, two))
    assert poisson_percentile(average, low) <= poisson_percentile(average, high)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=40), st.booleans())
def test_the_front_is_what_nothing_beats(points, less_x):
    sign = -1 if less_x else 1
    kept = {points[index] for index in front(points, less_x=less_x)}
    for x, y in points:
        beaten = any(sign * a >= sign * x and b >= y and (a, b) != (x, y) for a, b in points)
        assert ((x, y) in kept) == (not beaten)


def rate_of(asked):
    setup = next(asked.setups())
    try:
        return InstanceUnderLoad(asked, instance(asked, setup, made_up(setup))).capacity(asked.slo).rate
    except OutOfReachError:
        return 0.0


@settings(max_examples=15)
@given(
    ttft=st.floats(40, 3000), itl=st.floats(8, 80), tighter=st.floats(0.5, 1.0), isl=st.integers(50, 3000),
    osl=st.integers(2, 300),
)  # fmt: skip
def test_a_tighter_limit_never_serves_more(ttft, itl, tighter, isl, osl):
    """Within the precision the rate is found to."""
    asked = question(isl=np.full(1000, isl), osl=np.full(1000, osl), slo=Slo("given", ttft_ms=ttft, itl_ms=itl))
    strict = replace(asked, slo=Slo("given", ttft_ms=ttft * tighter, itl_ms=itl * tighter))
    # the rate is found by simulating 1,000 requests, and limits that differ by 1 % gave rates 4 % apart
    assert rate_of(strict) <= rate_of(asked) * 1.06


@settings(max_examples=10)
@given(percentile=st.floats(50, 98), isl=st.integers(200, 2000))
def test_a_higher_percentile_never_serves_more(percentile, isl):
    asked = question(isl=np.full(1000, isl), slo=Slo("given", ttft_ms=150), percentile=percentile)
    assert rate_of(replace(asked, percentile=99.0)) <= rate_of(asked) * 1.02
