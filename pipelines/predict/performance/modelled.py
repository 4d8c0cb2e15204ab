"""Simulate a load under the protocol of its measurement: the values shown beside "measured"."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipelines.domain.benchmark import Summary
from pipelines.domain.summary import Percentiles, RequestColumns, summarise
from pipelines.predict.performance.measured import MeasuredLevel
from pipelines.predict.simulator.backend import Backend
from pipelines.predict.simulator.interface import OfferedLoad, Requests, SchedulerLimits, request_columns
from pipelines.predict.simulator.run import IterationCost, simulate

WARM, LEAST, MOST = 3, 200, 4000
"""Requests per user before a steady window; default numbers of simulated requests, least and most."""
SEED = 20_240_601


@dataclass(frozen=True, slots=True)
class ModelledDeployment:
    """A deployment to simulate, with its surroundings.

    Attributes:
        overhead_s: time of a request to the engine and back: network, tokenizer. Part of TTFT and E2E, not of ITL.
        client_gap_s: closed loop: time from the last token at the client to its next request.
        lanes: number of engines that take requests in turn; with pipeline stages, the number of batches in progress.
    """

    engine: SchedulerLimits
    cost: IterationCost
    overhead_s: float = 0.0
    client_gap_s: float = 0.0
    lanes: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A load prepared once, to be simulated with many costs.

    Attributes:
        load: input of the simulator; its client delay is the users' pause, to which the deployment's gap is added.
        window: window of an open loop, seconds; None counts requests.
        first: closed loop: requests before this one are warm-up.
        last: requests from this one on only keep up the load.
        whole: whether the start and the end of the run are included.
    """

    load: OfferedLoad
    window: tuple[float, float] | None
    first: int
    last: int
    whole: bool


def trial(level: MeasuredLevel) -> Trial:
    """Prepare the load of a level: the exact requests if known, otherwise drawn from its means and deviations."""
    closed, whole, window, arrival = level.arrival == "closed", not level.steady, None, None
    if level.sent is not None and len(level.sent.isl):
        isl, osl, arrival, window = level.sent.isl, level.sent.osl, level.sent.due, level.sent.window
        first, last = map(int, np.searchsorted(arrival, window))
    else:
        users = level.concurrency or 0
        count = min(max(level.requests or int(np.clip(10 * users, LEAST, MOST)), 1), MOST)
        before, after = (WARM * users, users) if level.steady else (0, 0)
        total, random = before + count + after, np.random.default_rng(SEED)
        isl, osl = (
            np.maximum(1, np.rint(random.normal(mean, deviation, total))).astype(np.int64)
            for mean, deviation in ((level.isl, level.isl_stdev), (level.osl, level.osl_stdev))
        )
        first, last = before, before + count
        if not closed:
            arrival, whole = _arrivals(level, total, random), True
            window = (float(arrival[0]), np.inf)
    if closed:
        load = OfferedLoad(isl, osl, users=level.concurrency or 1, client_delay=level.think_s)
        return Trial(load, None, first, last, whole)
    return Trial(OfferedLoad(isl, osl, arrival=arrival), window, 0, len(isl), whole)


def _arrivals(level: MeasuredLevel, count: int, random: np.random.Generator) -> Any:
    rate = level.request_rate or 1.0
    if level.arrival == "burst":
        return np.zeros(count)
    if level.arrival == "constant":
        return np.arange(1, count + 1) / rate
    shape = 1.0 if level.arrival == "poisson" else 1 / level.cv**2
    return np.cumsum(random.gamma(shape, 1 / (shape * rate), count))


def run_trial(
    trial: Trial, deployment: ModelledDeployment, percentiles: Percentiles = "linear", *, backend: Backend = "auto"
) -> Summary:
    """Simulate a load and evaluate it as it was measured; "numpy" avoids the startup of the compiled loop."""
    return evaluated(trial, *simulated(trial, deployment, backend=backend), percentiles)


def simulated(
    trial: Trial, deployment: ModelledDeployment, *, backend: Backend = "auto"
) -> tuple[RequestColumns, tuple[float, float], Any]:
    """Simulate a load; return its requests, the window that was measured, and bool[n] of those due inside it."""
    closed = trial.load.arrival is None
    delay = trial.load.client_delay + deployment.overhead_s + deployment.client_gap_s if closed else 0.0
    sent = replace(trial, load=replace(trial.load, client_delay=delay))
    lanes = [
        simulate(deployment.engine, load, deployment.cost, backend=backend).requests
        for load in dealt(sent.load, deployment.lanes)
    ]
    requests = lanes[0]
    if len(lanes) > 1:  # all of them, in order of arrival
        merged = {name: np.concatenate([getattr(lane, name) for lane in lanes]) for name in Requests.__slots__}
        order = np.argsort(merged["arrival"], kind="stable")
        requests = Requests(**{name: column[order] for name, column in merged.items()})
    begin, until, due = _window(sent, requests)
    return request_columns(requests, overhead=deployment.overhead_s), (begin, until), due


def evaluated(
    trial: Trial, columns: RequestColumns, window: tuple[float, float], due: Any, percentiles: Percentiles = "linear"
) -> Summary:
    """Summarise simulated requests as the load was measured."""
    begin, until = columns.whole() if trial.whole else window
    return summarise(columns, (begin, max(until, begin + 1e-9)), due=due, percentiles=percentiles)


def dealt(load: OfferedLoad, lanes: int) -> list[OfferedLoad]:
    """Split the load into lanes: requests in turn, and in a closed loop users in turn."""
    lanes = lanes if load.arrival is not None else min(lanes, load.users)
    if lanes == 1:
        return [load]
    loads = []
    for lane in range(lanes):
        arrival = None if load.arrival is None else load.arrival[lane::lanes]
        users = len(range(lane, load.users, lanes))
        isl, osl = np.asarray(load.isl)[lane::lanes], np.asarray(load.osl)[lane::lanes]
        loads.append(replace(load, isl=isl, osl=osl, arrival=arrival, users=users))
    return loads


def _window(trial: Trial, requests: Requests) -> tuple[float, float, Any]:
    """Return start, end and bool[n] of the requests that were due inside the window."""
    arrival = requests.arrival
    if trial.window is not None:
        begin, until = trial.window
        return begin, until, (arrival >= begin) & (arrival < until)
    due = np.zeros(len(arrival), dtype=bool)
    due[trial.first : trial.last] = True
    begin = float(arrival[trial.first])
    if trial.last < len(arrival):
        return begin, float(arrival[trial.last]), due
    # nothing is sent any more; the window ended when the next request would have been sent
    after = requests.end[requests.end > arrival[-1]]
    return begin, float(after.min()) + trial.load.client_delay, due
