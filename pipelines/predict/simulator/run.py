"""Simulate an engine under a load."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, get_args

import numpy as np

from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.predict.simulator.backend import Backend, loop_of
from pipelines.predict.simulator.interface import (
    Admission,
    Iterations,
    OfferedLoad,
    Policy,
    Requests,
    SchedulerLimits,
    SimulatedRun,
    Stays,
)
from pipelines.predict.simulator.loop import iteration_seconds
from pipelines.predict.simulator.scheduler import Request, Rules, RunTotals, record_of

MOST_TICKS = 1_000_000
"""With a table of iterations, which has a row for each tick."""
# Duration of one engine iteration, as numbers that a tight loop can evaluate.
#
# An engine works in iterations. Each processes T tokens (one per decoding request and the tokens of the prompts, or of
# their chunks) and takes
#
#     t = ((token_compute T + row_compute n + padding some(T))^p                               compute
#          + (weights active(T) + head_weights)^p)^(1/p)                                       or memory
#       + prefill_attention sum(q ctx) + prefill_window sum(q min(ctx, window))                attention of prompts
#       + kv_token sum(kv) + kv_window_token sum(min(kv, window))   attention of decoding requests: KV traffic
#       + beside sum(kv), where n_prefill > 0                 kernels that pack heads only where no prompt is computed
#       + token T                                             norms, activations, all-reduce traffic
#       + fixed + sequence n_seq + prefill n_prefill          launches, all-reduce latency, scheduler, sampling
#       + prompts, where n_prefill > 0                        cost of preparing a batch of a new size
#       + end n_ended, before the next iteration              last answers sent, blocks freed, next requests admitted
#
# with n = n_seq = requests that yield a token or are prefilled in the iteration, some(T) = 1 - (1 - expert_share)^T the
# share of the experts that T tokens reach, and active(T) = dense_share + (1 - dense_share) some(T) the share of the
# weights (1 for a dense model). KV traffic is its own term, because it stays memory-bound at any batch
# (arXiv:2503.08311).


@dataclass(frozen=True, slots=True)
class IterationCost:
    """Coefficients of the formula above: seconds per named quantity, for one rank, with pipeline stages folded in.

    Attributes:
        token_compute: per token in the linears when compute-bound.
        row_compute: per row of logits when compute-bound.
        weights: to read the linears' weights once.
        head_weights: to read the output head once.
        knee: p; about 3 gives the smooth knee near the ridge batch, infinity a hard maximum.
        dense_share: share of `weights` that every token uses (1 for a dense model).
        expert_share: experts per token / experts (1 for a dense model).
        prefill_attention: per (query token x context token).
        kv_token: per KV token read, for all layers with full attention together.
        kv_window_token: per KV token read, for all layers with a sliding window together.
        window: tokens of that window; 0 means none. For prompts, if the window is a chunk: what half of it has.
        token: per token, whatever the bound.
        fixed: per iteration.
        sequence: per request in the iteration.
        prefill: per prompt, or chunk of one, in the iteration.
        prompts: per iteration with prompts: the CPU engine prepares its kernels for each new number of tokens, and the
            PyTorch backend has CUDA graphs only of decoding.
        end: per request that ended, before the next iteration: the CPU engine's server does it in the same thread.
        prefill_window: as `prefill_attention`, for all layers with a sliding window together.
        padding: to compute the rows that fill up the tiles of all experts.
        chunk: tokens of a chunk that begins anew, which decoding reads instead of a window; 0 means none.
        beside: per KV token read in an iteration with prompts, in addition to `kv_token`.
    """

    token_compute: float
    row_compute: float
    weights: float
    head_weights: float
    knee: float = 3.0
    dense_share: float = 1.0
    expert_share: float = 1.0
    prefill_attention: float = 0.0
    kv_token: float = 0.0
    kv_window_token: float = 0.0
    window: int = 0
    token: float = 0.0
    fixed: float = 0.0
    sequence: float = 0.0
    prefill: float = 0.0
    prompts: float = 0.0
    end: float = 0.0
    prefill_window: float = 0.0
    padding: float = 0.0
    chunk: int = 0
    beside: float = 0.0

    def slower(self, factor: float) -> IterationCost:
        """Return the cost of an engine whose every iteration takes `factor` times as long."""
        same = ("knee", "dense_share", "expert_share", "window", "chunk")
        return replace(
            self, **{each.name: factor * getattr(self, each.name) for each in fields(self) if each.name not in same}
        )

    def array(self) -> Any:
        """Return float64[21]: the fields in order, for the loop."""
        return np.array(_numbers(self), dtype=np.float64)

    def seconds(
        self, tokens: Any, sequences: Any, *, q_ctx: Any = 0.0, kv: Any = 0.0, kv_window: Any = 0.0, prefills: Any = 0.0
    ) -> Any:
        """Return the seconds of an iteration, without `end`; arrays of equal shape give an array.

        Args:
            tokens: T.
            sequences: requests in the iteration.
            q_ctx: sum over prompts of query tokens x mean context they attend to.
            kv: sum over decoding requests of KV tokens read.
            kv_window: the same, with each request capped at the window, or its part in the newest chunk.
            prefills: prompts or chunks.
        """
        return iteration_seconds(_numbers(self), tokens, sequences, q_ctx, kv, kv_window, prefills)


_numbers = attrgetter(*(field.name for field in fields(IterationCost)))  # astuple copies each of them deeply


@dataclass(frozen=True, slots=True)
class TickCost:
    """The didactic time base: an iteration lasts max(sum of its prefill times, its decode time, 1 tick).

    Attributes:
        prefill: ticks of one whole prompt; a chunk costs its proportion.
        decode: ticks of a decode step, however many requests decode.
        chunks: iterations a prompt is spread over.
    """

    prefill: float = 2.0
    decode: float = 1.0
    chunks: int = 1


Cost = IterationCost | TickCost

POLICIES, ADMISSIONS = get_args(Policy), get_args(Admission)
NO_LIMIT = 1 << 40
KINDS = (Request, RunTotals)


def simulate(
    engine: SchedulerLimits,
    load: OfferedLoad,
    cost: Cost,
    *,
    until: float | None = None,
    iterations: bool = False,
    backend: Backend = "auto",
) -> SimulatedRun:
    """Run a load through an engine, iteration by iteration.

    At each boundary between iterations, tokens come and requests end, new arrivals enter the queue, requests are
    admitted as far as slots, token budget and KV blocks allow, and the next iteration begins. It yields a token for
    every decoding request and the first token of every request whose prefill it completes.

    Args:
        engine: limits of the scheduler.
        load: the requests.
        cost: cost of an iteration; its type sets the unit of time.
        until: the run ends at the first boundary at or after this time, and events at that boundary are not
            counted; None lets all requests end.
        iterations: also return the table of iterations and the stays in slots (slower: one step per iteration).
        backend: "auto" uses numba if it is installed. Results differ only by rounding (1e-9 at most).

    Raises:
        UserError: a request can never run, or a value is out of range.
    """
    isl, osl = np.asarray(load.isl, dtype=np.int64), np.asarray(load.osl, dtype=np.int64)
    _check(engine, load, isl, osl)
    if iterations and isinstance(cost, TickCost) and load.arrival is not None and len(isl):
        _check_ticks(min(float(np.max(load.arrival)), math.inf if until is None else until))
    loop, name = loop_of(backend)
    rules = _rules(engine, load, cost, until, record=iterations)
    numbers = np.array([cost.prefill, cost.decode], dtype=np.float64) if isinstance(cost, TickCost) else cost.array()
    requests = np.array([_values(Request)(Request())], dtype=record_of(Request)).repeat(len(isl))
    requests["isl"], requests["osl"] = isl, osl
    requests["cached"] = np.minimum(engine.prefix_tokens if load.cached is None else load.cached, isl - 1)
    arrivals = len(isl) if load.arrival is not None else min(load.users, len(isl))
    requests["arrival"][:arrivals] = 0.0 if load.arrival is None else load.arrival
    records = [requests, np.array([_values(RunTotals)(RunTotals(known=arrivals))], dtype=record_of(RunTotals))]
    if name == "numpy":
        objects = [[kind(*row) for row in record.tolist()] for kind, record in zip(KINDS, records, strict=True)]
        end, rows, stays = loop(rules, numbers.tolist(), *objects)
        records = [
            np.array(list(map(_values(kind), states)), dtype=record_of(kind))
            for kind, states in zip(KINDS, objects, strict=True)
        ]
    else:
        end, rows, stays = loop(rules, numbers, *records)
    return _run(rules, records, (float(end), rows, stays), name)


@cache
def _values(kind: type) -> attrgetter[Any]:
    return attrgetter(*(field.name for field in fields(kind)))


def _run(rules: Rules, records: Any, result: tuple[float, Any, Any], backend: str) -> SimulatedRun:
    r, counters = records
    end, rows, stays = result
    names = ("arrival", "admitted", "first", "end", "isl", "osl", "produced", "preemptions", "slot")
    requests = Requests(*(np.ascontiguousarray(r[name]) for name in names))
    iterations = Iterations(*_columns(rows, Iterations)) if rules.record else None
    stay = Stays(*_columns(stays.astype(np.int64), Stays)) if rules.record else None
    return SimulatedRun(requests, iterations, stay, end, int(counters["worked"][0]), backend)


def _columns(flat: Any, kind: type) -> Any:
    return np.ascontiguousarray(flat.reshape(-1, len(fields(kind))).T)


def _rules(engine: SchedulerLimits, load: OfferedLoad, cost: Cost, until: float | None, *, record: bool) -> Rules:
    return Rules(
        policy=POLICIES.index(engine.policy),
        slots=engine.slots,
        max_tokens=NO_LIMIT if engine.max_num_tokens is None else engine.max_num_tokens,
        on_demand=engine.admission == "MAX_UTILIZATION",
        pool=NO_LIMIT if engine.kv_blocks is None else engine.kv_blocks - engine.shared_blocks,
        block=engine.tokens_per_block,
        ahead=engine.ahead,
        shared=engine.shared_blocks,
        chunks=cost.chunks if isinstance(cost, TickCost) else 1,
        window=cost.window if isinstance(cost, IterationCost) else 0,
        chunk=cost.chunk if isinstance(cost, IterationCost) else 0,
        ticks=isinstance(cost, TickCost),
        delay=float(load.client_delay),
        until=math.inf if until is None else float(until),
        record=record,
    )


def _check(engine: SchedulerLimits, load: OfferedLoad, isl: Any, osl: Any) -> None:
    refuse([*_engine_faults(engine), *_load_faults(load, isl, osl)])
    if engine.kv_blocks is None:
        return
    own, pool = engine.own_blocks(isl, isl + osl, load.cached), engine.kv_blocks - engine.shared_blocks
    if len(isl) and int(own.max()) > pool:
        worst = int(own.argmax())
        raise UserError(
            f"Request {worst} with {isl[worst]} input and {osl[worst]} output tokens needs {own[worst]} KV blocks of "
            f"{engine.tokens_per_block} tokens.",
            allowed=f"The cache has {max(pool, 0)} of them.",
            todo="Give the engine more kv_blocks, or shorten the request.",
        )


def _check_ticks(last: float) -> None:
    if last > MOST_TICKS:
        raise UserError(
            f"The last request arrives at tick {last:,.0f}.",
            allowed=f"At most {MOST_TICKS:,}: each tick, idle or not, is a row of the table of iterations.",
            todo="Raise benchmark.request_rate, or set simulator.until.",
        )


def _engine_faults(engine: SchedulerLimits) -> list[Fault]:
    counts = {
        "slots": engine.slots,
        "max_num_tokens": engine.max_num_tokens,
        "kv_blocks": engine.kv_blocks,
        "tokens_per_block": engine.tokens_per_block,
    }
    faults = [
        Fault(f"The simulated engine has {name}={value}.", allowed="At least 1.")
        for name, value in counts.items()
        if value is not None and value < 1
    ]
    if engine.prefix_tokens < 0:
        faults.append(Fault(f"The simulated engine has prefix_tokens={engine.prefix_tokens}.", allowed="0 or more."))
    for name, value, allowed in (("policy", engine.policy, POLICIES), ("admission", engine.admission, ADMISSIONS)):
        if value not in allowed:
            faults.append(Fault(f"The simulated engine has {name}='{value}'.", allowed=", ".join(allowed) + "."))
    return faults


def _load_faults(load: OfferedLoad, isl: Any, osl: Any) -> list[Fault]:
    faults = []
    if len(isl) != len(osl):
        faults.append(Fault(f"The load has {len(isl)} input and {len(osl)} output lengths.", allowed="One each."))
    if load.cached is not None and (np.shape(load.cached) != isl.shape or (np.asarray(load.cached) < 0).any()):
        faults.append(Fault(f"The load does not state {len(isl)} cached lengths.", allowed="One each, 0 or more."))
    for name, lengths in (("isl", isl), ("osl", osl)):
        if len(lengths) and int(lengths.min()) < 1:
            faults.append(Fault(f"The load has {name}={int(lengths.min())}.", allowed="At least 1 token."))
    if load.arrival is None:
        if load.users < 1:
            faults.append(Fault(f"The closed loop has users={load.users}.", allowed="At least 1."))
        if not 0 <= load.client_delay < math.inf:
            faults.append(Fault(f"The closed loop has client_delay={load.client_delay}.", allowed="0 or more."))
        return faults
    arrival = np.asarray(load.arrival, dtype=np.float64)
    if arrival.shape != isl.shape:
        faults.append(Fault(f"The load has {len(arrival)} arrivals for {len(isl)} requests.", allowed="One each."))
    if not (np.isfinite(arrival).all() and (arrival >= 0).all() and (np.diff(arrival) >= 0).all()):
        faults.append(Fault("The arrivals of the load are not ascending from 0.", todo="Sort them."))
    return faults
