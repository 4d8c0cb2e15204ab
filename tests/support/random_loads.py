"""Hypothesis strategy for random small simulations."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import Cost, IterationCost, TickCost

SECONDS = IterationCost(
    token_compute=1.3e-4,
    row_compute=2.1e-5,
    weights=8.1e-3,
    head_weights=1.2e-4,
    dense_share=0.4,
    expert_share=0.25,
    prefill_attention=3.1e-7,
    kv_token=2.3e-6,
    kv_window_token=4.7e-6,
    window=24,
    token=1.1e-6,
    fixed=9e-4,
    sequence=3.3e-5,
    prefill=1.7e-4,
    prompts=4.1e-4,
    end=2.3e-4,
    beside=1.9e-6,
)

IN_CHUNKS = replace(SECONDS, window=5, chunk=9)


@st.composite
def simulations(draw: st.DrawFn) -> tuple[SchedulerLimits, OfferedLoad, Cost]:
    n = draw(st.integers(1, 14))
    isl = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    osl = draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    block = draw(st.sampled_from([1, 4, 8]))
    prefix = draw(st.sampled_from([0, 0, 5, 16]))
    cached = draw(
        st.none() if prefix else st.none() | st.lists(st.integers(0, 40), min_size=n, max_size=n).map(np.array)
    )
    largest = max(-(-(i + o) // block) - min(prefix, i - 1) // block for i, o in zip(isl, osl, strict=True))
    engine = SchedulerLimits(
        policy=draw(st.sampled_from(["static", "inflight", "inflight_chunked", "one_prefill"])),
        slots=draw(st.integers(1, 6)),
        max_num_tokens=draw(st.sampled_from([None, 3, 16, 64])),
        admission=draw(st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])),
        kv_blocks=draw(st.one_of(st.none(), st.integers(0, 20).map(lambda spare: largest + prefix // block + spare))),
        tokens_per_block=block,
        prefix_tokens=prefix,
        ahead=draw(st.booleans()),
    )
    cost: Cost = draw(
        st.one_of(
            st.sampled_from([SECONDS, IN_CHUNKS]),
            st.builds(TickCost, st.sampled_from([1, 2, 3]), st.just(1), st.integers(1, 3)),
        )
    )
    if draw(st.booleans()):
        delay = draw(st.sampled_from([0.0, 0.013, 2.7]))
        return (
            engine,
            OfferedLoad(np.array(isl), np.array(osl), users=draw(st.integers(1, 8)), client_delay=delay, cached=cached),
            cost,
        )
    unit = 1.0 if isinstance(cost, TickCost) else 0.01
    gaps = draw(st.lists(st.floats(0, 20), min_size=n, max_size=n))
    return engine, OfferedLoad(np.array(isl), np.array(osl), arrival=np.cumsum(gaps) * unit, cached=cached), cost
