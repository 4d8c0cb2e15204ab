"""Fit the cost of an engine iteration to a benchmark, with the simulator in the loop.

Each coefficient is a prior times exp(theta); theta is found by least squares on the logarithm of modelled / measured of
TTFT, ITL and requests/s of every level, with the priors as further residuals. If a GPU model gives the prior, a
coefficient moves only as far as the measurement requires; without one (the CPU engine) the prior is a guess from the
measurement itself, uncertain by a factor of 4. What the measurement does not determine is named.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from pipelines.domain.benchmark import Summary
from pipelines.domain.errors import UserError
from pipelines.domain.summary import RequestColumns
from pipelines.engines.registry import runs_on_cpu
from pipelines.predict.performance.measured import Measured, MeasuredLevel
from pipelines.predict.performance.modelled import ModelledDeployment, evaluated, run_trial, simulated, trial
from pipelines.predict.performance.performance import Costed
from pipelines.predict.performance.read_measured import ELSEWHERE
from pipelines.predict.simulator.interface import SchedulerLimits
from pipelines.predict.simulator.run import IterationCost

CostT = TypeVar("CostT", ModelledDeployment, Costed)
WIDE = 1.4
"""Log-deviation of a guess."""
STEP = 0.2
"""Half-width of the central differences. A closed loop is rough in its coefficients (a request that arrives slightly
later joins another iteration), and only a step this wide sees the slope under the roughness."""
STARTS = 4
"""Starting points of a fit without a model: the guess, and points spread around it."""
FARTHEST = 3.0
"""Bound of every theta: a factor of 20."""
KNOWN_BY = 0.7
"""Share of the prior's deviation above which a posterior deviation means that the measurement did not decide."""
MOST_EVALUATIONS = 40

SIGMA = {"rps": 0.06, "itl_mean": 0.06, "itl_p50": 0.06, "itl_p95": 0.12}
SIGMA |= {"ttft_mean": 0.10, "ttft_p50": 0.10, "ttft_p95": 0.15, "e2e_mean": 0.06}
SIGMA |= {"ttft_short": 0.10, "ttft_long": 0.10, "itl_short": 0.03, "itl_long": 0.03}
"""Expected log-deviation of each metric: noise of one measurement plus what the formula leaves out."""
LEAST_BY_LENGTH, SPREAD_OUT = 9, 2
"""Number of requests, and ratio of the longest prompt to the shortest, from which thirds are compared."""
OUTLYING = 3.0
"""Number of deviations beyond which residuals count linearly (soft L1)."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One fitted quantity.

    Attributes:
        name: name for people.
        sd: log-deviation of its prior.
        fields: fields of `IterationCost` that it multiplies, or "overhead_s", "client_gap_s" of the deployment.
    """

    name: str
    sd: float
    fields: tuple[str, ...]


GPU_KNOBS = (
    Knob("compute", 0.2, ("token_compute", "row_compute")),
    Knob("weights", 0.15, ("weights", "head_weights")),
    Knob("prefill_attention", 0.4, ("prefill_attention",)),
    Knob("kv", 0.2, ("kv_token", "kv_window_token")),
    Knob("token", 0.5, ("token",)),
    Knob("fixed", 0.5, ("fixed",)),
    Knob("sequence", 0.7, ("sequence",)),
    Knob("overhead", 0.7, ("overhead_s",)),
    Knob("client_gap", 1.0, ("client_gap_s",)),
)
"""Multipliers on a performance model's cost; each deviation is the model's usual error from GPU to GPU."""
FREE_KNOBS = tuple(
    Knob(name, WIDE, (name,))
    for name in (
        *("token", "prefill_attention", "kv_token", "fixed", "sequence", "prefill"),
        *("prompts", "end", "overhead_s", "client_gap_s"),
    )
)
"""Each coefficient separately, for an engine without a model; those that `guess` leaves at 0 stay there."""


@dataclass(frozen=True, slots=True)
class FittedLevel:
    """A measured level, and the same level as the fit reproduces it."""

    level: MeasuredLevel
    modelled: Summary

    def errors(self) -> dict[str, float]:
        """Return modelled / measured - 1 by metric, where both have a value."""
        return {name: modelled / real - 1 for name, real, modelled in _pairs(self.level, self.modelled)}


@dataclass(frozen=True, slots=True)
class FitResult:
    """Result of a fit.

    Attributes:
        intervals: 95 % interval of each knob's multiplied value, by its first field.
        at_bound: fields of the knobs at their bound.
        undecided: fields of the knobs that the measurement hardly determines.
        rows: one per level.
        spread: remaining log-deviation, by "ttft", "itl" and "throughput", without those that were not measured.
        multipliers: factors on the initial model, by knob; none if the fit began with a guess.
    """

    deployment: ModelledDeployment
    intervals: Mapping[str, tuple[float, float]]
    at_bound: tuple[str, ...]
    undecided: tuple[str, ...]
    rows: tuple[FittedLevel, ...]
    spread: Mapping[str, float]
    multipliers: Mapping[str, float]


def fit(measured: Measured, start: ModelledDeployment | SchedulerLimits) -> FitResult:
    """Fit a model to a benchmark.

    `start` is the prediction of a performance model, whose multipliers are fitted, or only the limits of an engine.

    Raises:
        UserError: the benchmark cannot determine anything.
    """
    from scipy.optimize import least_squares

    prior = guess(measured, start) if isinstance(start, SchedulerLimits) else start
    free = isinstance(start, SchedulerLimits)
    used = [knob for knob in (FREE_KNOBS if free else GPU_KNOBS) if any(_value(prior, name) for name in knob.fields)]
    trials = [trial(level) for level in measured.levels]
    widths = np.array([knob.sd for knob in used])

    def residuals(theta: Any) -> Any:
        deployment, errors = moved(prior, used, theta), list[float]()
        for level, each in zip(measured.levels, trials, strict=True):
            columns, window, due = simulated(each, deployment)
            modelled = evaluated(each, columns, window, due, measured.percentiles)
            pairs = _pairs(level, modelled) + _by_length(level, columns, due)
            errors += [np.log(predicted / real) / SIGMA[name] for name, real, predicted in pairs]
        return np.concatenate([errors, theta / widths])

    def solve(begin: Any) -> Any:
        return least_squares(
            residuals,
            begin,
            bounds=(-FARTHEST, FARTHEST),
            loss="soft_l1",
            f_scale=OUTLYING,
            jac=lambda theta: _slopes(residuals, theta),
            x_scale=widths,
            max_nfev=MOST_EVALUATIONS,
        )

    solution = min(map(solve, _starts(widths) if free else [np.zeros(len(used))]), key=lambda each: each.cost)
    deployment = moved(prior, used, solution.x)
    # of theta: inverse of the Gauss-Newton Hessian, scaled by the remaining residual; it never widens the prior
    freedom = max(len(solution.fun) - 2 * len(used), 1)
    variances = np.diag(np.linalg.inv(solution.jac.T @ solution.jac)) * max(2 * solution.cost / freedom, 1.0)
    deviations = np.minimum(np.sqrt(variances), widths)
    rows = tuple(
        FittedLevel(level, run_trial(each, deployment, measured.percentiles))
        for level, each in zip(measured.levels, trials, strict=True)
    )
    return FitResult(
        deployment=deployment,
        intervals={
            name: (value * float(np.exp(-1.96 * sd)), value * float(np.exp(1.96 * sd)))
            for knob, sd in zip(used, deviations, strict=True)
            for name, value in ((name, _value(deployment, name)) for name in knob.fields)
        },
        at_bound=_fields(knob for knob, x in zip(used, solution.x, strict=True) if abs(x) > 0.99 * FARTHEST),
        undecided=_fields(knob for knob, sd in zip(used, deviations, strict=True) if sd > KNOWN_BY * knob.sd),
        rows=rows,
        spread=_spread(rows),
        multipliers={} if free else dict(zip((knob.name for knob in used), np.exp(solution.x), strict=True)),
    )


def _fields(knobs: Iterable[Knob]) -> tuple[str, ...]:
    return tuple(name for knob in knobs for name in knob.fields)


def _starts(widths: Any) -> list[Any]:
    """Return the starting points: the cost can be split among coefficients in several ways, each a separate minimum."""
    from scipy.stats import qmc

    spread = qmc.Sobol(len(widths), rng=0).random(STARTS)[1:]
    return [np.zeros(len(widths)), *(widths * (2 * spread - 1))]


def _slopes(residuals: Callable[[Any], Any], theta: Any) -> Any:
    """Return float64[residuals, theta]: central differences."""
    steps = STEP * np.eye(len(theta))
    return np.stack([(residuals(theta + step) - residuals(theta - step)) / (2 * STEP) for step in steps], axis=1)


def moved(prior: CostT, knobs: Sequence[Knob], theta: Any) -> CostT:
    """Return the prior with each knob's fields multiplied by exp(theta)."""
    own: dict[str, Any] = {}
    cost: dict[str, Any] = {}
    for knob, x in zip(knobs, theta, strict=True):
        for name in knob.fields:
            (own if name in ("overhead_s", "client_gap_s") else cost)[name] = _value(prior, name) * float(np.exp(x))
    return replace(prior, cost=replace(prior.cost, **cost), **own)


def _value(deployment: ModelledDeployment | Costed, name: str) -> float:
    return float(getattr(deployment if name in ("overhead_s", "client_gap_s") else deployment.cost, name))


def guess(measured: Measured, engine: SchedulerLimits) -> ModelledDeployment:
    """Split the lightest load into parts, as the starting point of a fit without a model.

    Raises:
        UserError: no level was streamed, so prompts and tokens cannot be separated.
    """
    streamed = [level for level in measured.levels if level.ttft_s.p50 and level.itl_s.p50]
    if not streamed:
        raise UserError(
            f"{', '.join(measured.sources)}: no level has TTFT and ITL; a fit without a model needs both.",
            todo="Measure with streaming.",
        )
    light = min(streamed, key=lambda level: level.itl_s.p50 or np.inf)
    busy = max(streamed, key=lambda level: level.itl_s.p50 or 0.0)
    step, first = light.itl_s.p50 or 0.0, min(level.ttft_s.p50 or np.inf for level in streamed)
    users = max(busy.concurrency or round(busy.requests_per_s * (busy.e2e_s.mean or 0.0)), 2)
    cost = IterationCost(
        token_compute=0.0,
        row_compute=0.0,
        weights=0.0,
        head_weights=0.0,
        knee=1.0,
        prefill_attention=0.1 * first / light.isl**2,
        kv_token=0.3 * step / (light.isl + light.osl),
        token=0.4 * first / light.isl,
        fixed=0.6 * step,
        sequence=max(0.2 * ((busy.itl_s.p50 or step) - step) / users, 0.02 * step),
    )
    elsewhere = measured.engine == ELSEWHERE  # it may be of either kind
    if elsewhere or runs_on_cpu(measured.engine):
        cost = replace(cost, prompts=0.1 * first, end=0.1 * first)
    if elsewhere or not runs_on_cpu(measured.engine):
        cost = replace(cost, prefill=0.1 * first)
    return ModelledDeployment(engine, cost, overhead_s=0.2 * first, client_gap_s=0.05 * first)


def _pairs(level: MeasuredLevel, modelled: Summary) -> list[tuple[str, float, float]]:
    """Return (metric, measured, modelled) where both have a value."""
    pairs = [("rps", level.requests_per_s, modelled.requests_per_s)]
    for name in ("ttft", "itl"):
        real, made = (getattr(each, f"{name}_s") for each in (level, modelled))
        pairs += [(f"{name}_{part}", getattr(real, part), getattr(made, part)) for part in ("mean", "p50", "p95")]
    if not level.ttft_s.count:
        pairs.append(("e2e_mean", level.e2e_s.mean or 0.0, modelled.e2e_s.mean or 0.0))
    return [(name, real, predicted) for name, real, predicted in pairs if real and predicted]


def _by_length(level: MeasuredLevel, columns: RequestColumns, due: Any) -> list[tuple[str, float, float]]:
    """Return mean TTFT and ITL of the third of the requests with the shortest, and with the longest prompts, likewise.

    One load of mixed lengths then separates the costs of prompts and of tokens, and of a request and of what it reads
    of the KV cache, which its mean alone cannot.
    """
    sent = level.sent
    if sent is None or sent.ttft is None or sent.itl is None:
        return []
    inside = (sent.due >= sent.window[0]) & (sent.due < sent.window[1])
    isl = sent.isl[inside]
    if len(isl) < LEAST_BY_LENGTH or isl.min() * SPREAD_OUT > isl.max():
        return []
    low, high = np.quantile(isl, [1 / 3, 2 / 3])
    pairs = []
    for metric, real, modelled in (("ttft", sent.ttft, columns.ttft()), ("itl", sent.itl, columns.itl())):
        known = inside & (real > 0)  # ITL is NaN below two output tokens
        for third, own, made in (
            ("short", sent.isl <= low, columns.isl <= low), ("long", sent.isl >= high, columns.isl >= high)
        ):  # fmt: skip
            mine, its = real[known & own], modelled[due & made & (modelled > 0)]
            if len(mine) and len(its):
                pairs.append((f"{metric}_{third}", float(mine.mean()), float(its.mean())))
    return pairs


def _spread(rows: Sequence[FittedLevel]) -> dict[str, float]:
    logs = [{name: np.log1p(error) for name, error in row.errors().items()} for row in rows]
    groups = {"ttft": ("ttft_p50", "ttft_p95"), "itl": ("itl_mean",), "throughput": ("rps",)}
    spread: dict[str, float] = {}
    for group, names in groups.items():
        if values := [row[name] for row in logs for name in names if name in row]:
            spread[group] = float(np.sqrt(np.mean(np.square(values))))
    return spread
