"""Simulate loads as published benchmarks generated them, because the protocol affects the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.domain.summary import rates
from pipelines.predict.published.cases import PublishedCase
from pipelines.predict.simulator.cost import IterationCost
from pipelines.predict.simulator.interface import Admission, OfferedLoad, Policy, SchedulerLimits
from pipelines.predict.simulator.records import request_columns
from pipelines.predict.simulator.run import simulate

BLOCK = 32
"""Tokens of a KV block."""
NIM_TOKEN_S = 8e-6
"""Seconds that NIM's front end takes per token of a prompt: 5,000 tokens wait 407 ms with one user, of which the fitted
prefill explains about 350, while 500 tokens of an 8B model leave no room for that much (`parameters.EXPECTED`)."""
TRACE_RATE, TRACE_REQUESTS = 10.0, 300
"""Rate (requests per second) and number of requests of the replayed traces."""
TRACE_SPREAD = 0.8
"""Standard deviation of the logarithm of their lengths (assumed)."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """Protocol by which a closed loop was measured.

    Attributes:
        per_user: requests measured per user, including the burst at the start.
        shortest: lengths are uniform between this share of the nominal ones and the nominal ones.
        policy: batching policy of the engine.
        admission: admission policy of the engine.
        max_num_tokens: tokens of an iteration.
        in_turn: whether one front end takes the requests in turn, so that the client delay counts once per user.
        always_busy: rates are for a window without start and end; a user then waits half the client delay on average.
        token_overhead_s: network and tokenizer, per prompt token, added to TTFT.
    """

    per_user: int
    shortest: float
    policy: Policy
    admission: Admission
    max_num_tokens: int
    in_turn: bool = False
    always_busy: bool = False
    token_overhead_s: float = 0.0


def protocol_of(case: PublishedCase) -> Protocol:
    """Return the protocol of a source, from its documentation and from the errors that other choices cause.

    NIM's published rates equal its users over the time of a request within 0.6 %, and the difference grows with the
    users, up to 3 ms for each: they include no start and no end, and a front end passes requests on one at a time.
    """
    framework = case.setup.runs_on
    nim = framework.family == "nim"
    return Protocol(
        per_user=5 if nim else 10,
        shortest=0.8 if case.randomised else 1.0,
        policy="inflight_chunked" if framework.chunked else "inflight",
        admission=framework.admission if nim else "MAX_UTILIZATION",
        max_num_tokens=2048 if framework.chunked else 8192,
        in_turn=nim,
        always_busy=nim,
        token_overhead_s=NIM_TOKEN_S if nim else 0.0,
    )


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Result of a load: seconds per request without the network, and overall rates.

    Attributes:
        ttft: float64[requests].
        itl: float64[requests]; NaN below two tokens.
        e2e: float64[requests].
        output_tok_s: over the whole run.
        requests_s: over the whole run.
        cycle_s: mean time from a user's request to the next one, without the network, between start and end of the
            run; rates are then users over it (Little's law). None: rates are those of the run.
    """

    ttft: Any
    itl: Any
    e2e: Any
    output_tok_s: float
    requests_s: float
    cycle_s: float | None = None


def closed_loop(case: PublishedCase, cost: IterationCost, delay: float, kv_tokens: int) -> LoopResult:
    """Run the closed loop of a case.

    Args:
        case: the measured case.
        cost: cost of an iteration.
        delay: delay of the client, or of each user if a front end takes them in turn.
        kv_tokens: tokens that the KV cache holds.
    """
    protocol = protocol_of(case)
    count = max(protocol.per_user * case.users, 2)
    draw = np.random.default_rng(case.users).uniform(protocol.shortest, 1.0, (2, count))
    isl = np.maximum(np.rint(case.isl * draw[0]), 1).astype(np.int64)
    osl = np.maximum(np.rint(case.osl * draw[1]), 1).astype(np.int64)
    delay *= case.users if protocol.in_turn else 1
    load = OfferedLoad(isl, osl, users=case.users, client_delay=delay)
    return _serve(protocol, load, cost, kv_tokens)


def trace(case: PublishedCase, cost: IterationCost, kv_tokens: int) -> LoopResult:
    """Simulate a stand-in for a replayed trace: Poisson arrivals, lognormal lengths with the data's means (assumed)."""
    draws = np.random.default_rng(0)
    factors = np.exp(draws.normal(-(TRACE_SPREAD**2) / 2, TRACE_SPREAD, (2, TRACE_REQUESTS)))
    isl, osl = (np.clip(mean * factor, 4, 4 * mean) for mean, factor in zip((case.isl, case.osl), factors, strict=True))
    arrival = np.cumsum(draws.exponential(1 / TRACE_RATE, TRACE_REQUESTS))
    load = OfferedLoad(isl.astype(np.int64), osl.astype(np.int64), arrival=arrival)
    protocol = Protocol(1, 1.0, "inflight_chunked", "MAX_UTILIZATION", 2048)
    return _serve(protocol, load, cost, kv_tokens)


def _serve(protocol: Protocol, load: OfferedLoad, cost: IterationCost, kv_tokens: int) -> LoopResult:
    longest = int((load.isl + load.osl).max())
    engine = SchedulerLimits(
        policy=protocol.policy,
        slots=1024,
        max_num_tokens=protocol.max_num_tokens,
        admission=protocol.admission,
        kv_blocks=max(kv_tokens // BLOCK, longest // BLOCK + 2),
        tokens_per_block=BLOCK,
    )
    requests = request_columns(simulate(engine, load, cost).requests)
    found, e2e = rates(requests, requests.whole()), requests.e2e()
    middle = e2e[load.users : -load.users]
    return LoopResult(
        ttft=requests.ttft(),
        itl=requests.itl(),
        e2e=e2e,
        output_tok_s=found.output_tokens_per_s,
        requests_s=found.requests_per_s,
        cycle_s=float(middle.mean()) + load.client_delay / 2 if protocol.always_busy else None,
    )
