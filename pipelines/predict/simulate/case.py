"""Read from the settings what to simulate: the engine, the cost of its iterations, and the unit of time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.document.show import NONE, count, number
from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.domain.metrics import BY_NAME
from pipelines.engines.config import HardwareSettings
from pipelines.engines.registry import LLM_API, with_setting
from pipelines.host.machine import Machine
from pipelines.host.screen import table, wrapped_lines
from pipelines.loadgen.config import LengthSettings
from pipelines.predict.performance.coverage import unmodelled
from pipelines.predict.performance.deployment import costs, gpu_model, load_fit, tuned_for
from pipelines.predict.performance.gpus import data_sheet, resolved
from pipelines.predict.performance.limits import ChosenLimits, engine_sizes, known_lengths
from pipelines.predict.performance.modelled import ModelledDeployment
from pipelines.predict.performance.models import engine_of, known_model
from pipelines.predict.performance.performance import Setup, checkpoint_text, origin
from pipelines.predict.performance.placement import Judge, cached_prefix, unjudged
from pipelines.predict.simulate.outcome import (
    SHORT,
    PolicyOutcome,
    limits_in_words,
    overload,
    overload_in_words,
    waited_for,
    words,
)
from pipelines.predict.simulator.interface import Policy, SchedulerLimits, admission_of
from pipelines.predict.simulator.run import Cost, TickCost
from pipelines.settings.root import Settings

TICK_SLOTS = 4
"""Number of slots in the classic drawing of in-flight batching."""


@dataclass(frozen=True, slots=True)
class SimulationCase:
    """Everything to simulate except the load.

    Attributes:
        engines: one per policy, in the order shown.
        unit: of time, "ticks" or "s".
        overhead: time a request spends on its way to the engine and back; part of TTFT and E2E.
        client_delay: closed loop: time from an answer to the arrival of the user's next request.
        what: description of model, format, GPU and split; empty in ticks.
        notes: remarks that a reader should know.
    """

    engines: tuple[SchedulerLimits, ...]
    cost: Cost
    unit: str
    overhead: float
    client_delay: float
    what: str
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        """Number of slots of each engine."""
        return self.engines[0].slots


def in_ticks(settings: Settings) -> bool:
    """Return whether time is in ticks: because the settings ask for it, or because the iteration times are unknown."""
    unit = settings.simulator.time
    has_gpu = settings.hardware.name != "auto" or settings.sizing.fit is not None
    return unit == "ticks" or (unit == "auto" and not has_gpu)


def make_case(settings: Settings, machine: Machine, judge: Judge = unjudged) -> SimulationCase:
    """Build the case from the settings; `judge` applies the rules of a plan to an engine on a GPU.

    Raises:
        UserError: seconds are requested where the GPU or the model is not known, or the model does not fit.
    """
    if in_ticks(settings):
        return _in_ticks(settings)
    if settings.sizing.fit is not None:
        return _fitted(settings, settings.sizing.fit)
    hardware = resolved(settings.hardware, machine)
    if hardware.memory_gb is None or hardware.name == "auto":
        raise UserError(
            "simulator.time=seconds needs a GPU whose data sheet is known; hardware=auto finds none here.",
            todo="Name one, e.g. hardware=h100_sxm, give sizing.fit, or leave simulator.time out for ticks.",
        )
    return _in_seconds(settings, hardware, judge)


def _in_ticks(settings: Settings) -> SimulationCase:
    simulator = settings.simulator
    slots = simulator.slots or TICK_SLOTS
    base = SchedulerLimits(
        slots=slots,
        max_num_tokens=simulator.max_num_tokens,
        admission=admission_of(simulator.admission or settings.triton.batch_scheduler_policy),
        kv_blocks=simulator.kv_blocks,
        tokens_per_block=simulator.tokens_per_block or settings.build.tokens_per_block,
        prefix_tokens=simulator.prefix_tokens or 0,
    )
    engines = [replace(base, policy=policy) for policy in _policies(settings)]
    notes = []
    if "inflight_chunked" in _policies(settings) and simulator.max_num_tokens is None:
        budget = slots + max(1, round((settings.workload.expected("isl") or 1) * simulator.decode / simulator.prefill))
        engines = [replace(e, max_num_tokens=budget) if e.policy == "inflight_chunked" else e for e in engines]
        notes.append(
            f"chunked prefill: {count(budget, 'token')} per iteration, so that pieces last about a decode step"
        )
    cost = TickCost(simulator.prefill, simulator.decode, simulator.chunks)
    delay = (simulator.client_delay or 0.0) + settings.workload.think_time_s
    reason = f"a prompt takes {simulator.prefill:g} ticks, a decode step {simulator.decode:g}"
    return SimulationCase(tuple(engines), cost, "ticks", 0.0, delay, "", reason, tuple(notes))


def _in_seconds(settings: Settings, hardware: HardwareSettings, judge: Judge) -> SimulationCase:
    model = known_model(settings)
    settings = tuned_for(settings, model, hardware)
    gpu = data_sheet(hardware)
    modelled = gpu_model(settings, model, gpu, costs(settings))
    setup = Setup.of(settings, model, gpu)
    judge(setup, modelled.limits)
    _refuse_longer(settings, model.max_position_embeddings, modelled.limits)
    windowed = "; attention windows count as a larger cache"
    case = _deployed(
        settings,
        modelled.deployment,
        what=f"{model.name} {settings.variant.label} on {hardware.name}, TP {settings.build.tp_size}",
        reason=origin(modelled.provenance, modelled.why),
        kv_source=f"modelled{windowed if engine_sizes(settings, model).windows else ''}",
        pp=settings.build.pp_size,
    )
    engine = engine_of(settings, model)
    only = engine is LLM_API and with_setting(settings.engine.name) is not LLM_API
    served = (f"engine: {engine.title}'s LLM API, because TensorRT engines do not run {model.name}",) if only else ()
    chosen = () if modelled.limits is None else modelled.limits.lines()
    folder = (f"folder: {text}",) if (text := checkpoint_text(setup)) else ()
    return replace(case, notes=(*served, *folder, *case.notes, *chosen))


def _refuse_longer(settings: Settings, context: int, limits: ChosenLimits | None) -> None:
    """Refuse requests that the engine does not hold, as a plan does."""
    load, work = known_lengths(settings), settings.workload
    if load is None or limits is None:
        return
    for name, tokens, parts in (
        ("max_seq_len", load.longest, "workload.isl or workload.osl"),
        ("max_input_len", load.longest_isl, "workload.isl"),
    ):
        held = getattr(limits, name)
        if tokens > held:
            more = f"or set build.{name}={tokens} or more" if tokens <= context else "because the model reads no more"
            what = "requests" if name == "max_seq_len" else "prompts"
            raise UserError(
                f"workload={work.name} has {what} of up to {tokens:,} tokens; the engine holds {name}={held}.",
                todo=f"Shorten {'the requests of the trace' if work.trace else parts}, {more}.",
            )


def _fitted(settings: Settings, path: Path) -> SimulationCase:
    """Return the deployment that `sizing.fit` was fitted to, with its limits replaced by those that are set here."""
    refuse(unmodelled(settings))
    fit = load_fit(path)
    what = f"{fit.name}, TP {fit.tp}"
    return _deployed(settings, fit.deployment, what=what, reason=fit.why, kv_source="as fitted", pp=fit.pp)


def _deployed(
    settings: Settings, deployment: ModelledDeployment, *, what: str, reason: str, kv_source: str, pp: int
) -> SimulationCase:
    """Build a case in seconds from a deployment; limits that are set replace its own. There is an engine per policy."""
    if deployment.lanes > 1:
        ranks = deployment.lanes // pp
        apart = f"{ranks} attention data parallel ranks and " if ranks > 1 else ""
        raise UserError(
            f"{what} with {apart}build.pp_size={pp} is not simulated: each of its "
            f"{'ranks' if apart else 'stages'} works on a batch of its own, and a simulation shows one engine.",
            todo="Leave build.pp_size=1 and enable_attention_dp out, or compute its rates and fleets: make size ...",
        )
    simulator, engine = settings.simulator, deployment.engine
    limits = {name: getattr(simulator, name) for name in ("slots", "max_num_tokens", "kv_blocks", "tokens_per_block")}
    changes: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    if simulator.tokens_per_block and not simulator.kv_blocks and engine.kv_blocks:
        changes["kv_blocks"] = engine.kv_blocks * engine.tokens_per_block // simulator.tokens_per_block
    prefix = cached_prefix(settings) if simulator.prefix_tokens is None else simulator.prefix_tokens
    engine = replace(engine, prefix_tokens=prefix, **changes)
    if simulator.admission is not None:
        engine = replace(engine, admission=admission_of(simulator.admission))
    notes: tuple[str, ...] = ()
    if engine.kv_blocks is not None:
        source = "as given" if simulator.kv_blocks else kv_source
        notes = (
            f"KV cache: {count(engine.kv_blocks, 'block')} of {count(engine.tokens_per_block, 'token')} ({source})",
        )
    delay = deployment.client_gap_s if simulator.client_delay is None else simulator.client_delay
    engines = tuple(replace(engine, policy=policy) for policy in _policies(settings))
    if simulator.max_num_tokens is None and engine.max_num_tokens is not None and "static" in simulator.policy:
        engines = tuple(replace(each, max_num_tokens=None) if each.policy == "static" else each for each in engines)
        notes += (
            "static: all prompts of a batch in one iteration, as static engines are built (max_num_tokens = "
            f"max_batch_size x max_seq_len); the others: {count(engine.max_num_tokens, 'token')} per iteration",
        )
    return SimulationCase(
        engines=engines,
        cost=deployment.cost,
        unit="s",
        overhead=deployment.overhead_s,
        client_delay=delay + deployment.overhead_s + settings.workload.think_time_s,
        what=what,
        reason=reason,
        notes=notes,
    )


def _policies(settings: Settings) -> tuple[Policy, ...]:
    """Return the policies to show; with runtime=chunked, in-flight batching takes prompts in pieces."""
    policies = settings.simulator.policy
    if not settings.runtime.enable_chunked_context or "inflight_chunked" in policies:
        return policies
    return tuple("inflight_chunked" if policy == "inflight" else policy for policy in policies)


def faults_of(settings: Settings) -> list[Fault]:
    """Return the conflicts between simulator settings and those of workload and benchmark; empty if there are none."""
    simulator, faults = settings.simulator, []
    if settings.workload.arrival != "closed" and simulator.client_delay:
        faults.append(
            Fault(
                f"simulator.client_delay={simulator.client_delay:g} does not apply to workload.arrival="
                f"{settings.workload.arrival}: only users of a closed loop wait for their answers.",
                todo="Leave it out, or add workload.arrival=closed.",
            )
        )
    unread: tuple[str, ...] = ()
    if not in_ticks(settings):
        unread, why = ("prefill", "decode", "chunks"), "in seconds, the performance model or sizing.fit gives the cost"
    elif simulator.kv_blocks is None:
        unread, why = ("admission", "tokens_per_block"), "in ticks, only simulator.kv_blocks limits the cache"
    for key, value in simulator.changed(unread).items():
        shown = f"{value:.10g}" if isinstance(value, float) else value
        faults.append(Fault(f"simulator.{key}={shown} has no effect: {why}.", todo="Leave it out."))
    return faults


# Format outcomes as text for a terminal: policies side by side for one load, a row per load and policy for several.

NAMES = {
    "static": "static",
    "inflight": "in-flight",
    "inflight_chunked": "chunked",
    "one_prefill": "one prefill",
}
"""Display names of the policies."""
Cell = Callable[[PolicyOutcome], str]
TTFT, ITL, E2E = (BY_NAME[name].title for name in ("ttft_s", "itl_s", "e2e_s"))


def outcome_table(outcomes: Sequence[PolicyOutcome], unit: str) -> str:
    """Format the outcomes of one load or of several.

    Args:
        outcomes: policies of the first load, then of the next.
        unit: unit of their times, "ticks" or "s"; seconds are shown as ms.
    """
    loads = list(dict.fromkeys(outcome.load for outcome in outcomes))
    lines = _side_by_side(outcomes, unit) if len(loads) == 1 else _rows(outcomes, unit)
    return "\n".join([*lines, *_notes(outcomes, unit, several=len(loads) > 1)])


def _side_by_side(outcomes: Sequence[PolicyOutcome], unit: str) -> list[str]:
    time_unit, per, scale = words(unit)
    filled = _filled(outcomes)
    rows: list[tuple[str, Cell]] = [
        ("requests done", lambda o: f"{o.requests:,}"),
        (f"in {'ticks' if unit == 'ticks' else 's'}", lambda o: number(o.window)),
        (f"{TTFT} mean, {time_unit}", lambda o: _time(o.ttft.mean, unit)),
        ("     p95", lambda o: _time(o.ttft.p95, unit)),
        (f"{E2E} mean, {time_unit}", lambda o: _time(o.e2e.mean, unit)),
        ("    p95", lambda o: _time(o.e2e.p95, unit)),
        (f"{ITL} mean, {time_unit}", lambda o: _time(o.itl.mean, unit)),
        (f"requests per {per}", lambda o: number(o.requests_rate * scale)),
        (f"output tokens per {per}", lambda o: number(o.tokens_rate * scale)),
        ("slots in use", lambda o: f"{100 * o.busy / o.slots:.0f} %" if filled else number(o.busy)),
        ("queue, most", lambda o: f"{o.queue_max:,}"),
        ("queue at the end", lambda o: f"{o.queue_end:,}"),
        ("pauses", lambda o: f"{o.preemptions:,}"),
    ]
    rows.append(("requests waited for", lambda o: SHORT[waited_for(o)]))
    if any(outcome.kv_share is not None for outcome in outcomes):
        rows.append(("KV cache in use, most", lambda o: NONE if o.kv_share is None else f"{100 * o.kv_share:.0f} %"))
    head = ["", *(NAMES[outcome.policy] for outcome in outcomes)]
    return table([head, *([label, *map(cell, outcomes)] for label, cell in rows)], left=1)


def _rows(outcomes: Sequence[PolicyOutcome], unit: str) -> list[str]:
    time_unit, per, scale = words(unit)
    filled = _filled(outcomes)
    head = ["load", "policy", "req", "tok", TTFT, "p95", ITL, E2E, "p95", "slots", "queue", "limit"]
    body = [
        [
            _short(o), NAMES[o.policy], number(o.requests_rate * scale), number(o.tokens_rate * scale),
            _time(o.ttft.mean, unit), _time(o.ttft.p95, unit), _time(o.itl.mean, unit), _time(o.e2e.mean, unit),
            _time(o.e2e.p95, unit), f"{100 * o.busy / o.slots:.0f}%" if filled else number(o.busy), str(o.queue_end),
            SHORT[waited_for(o)],
        ]
        for o in outcomes
    ]  # fmt: skip
    legend = f"req, tok: requests and output tokens per {per}; times in {time_unit}, mean and p95; slots in use, mean; "
    legend += "queue: at the end; limit: what requests waited for, most of the time."
    return [*table([head, *body], left=2), *wrapped_lines(legend)]


def _filled(outcomes: Sequence[PolicyOutcome]) -> bool:
    """Return whether all slots were ever in use; otherwise the share of the slots says nothing useful."""
    return any(outcome.busy_max == outcome.slots for outcome in outcomes)


def asked(settings: Settings, case: SimulationCase, load: str | None = None) -> str:
    """Describe the simulation in one line; `load` replaces all loads of the settings, "" omits the load."""
    work = settings.workload
    lengths = f"workload {work.name}"
    if work.trace is None:
        lengths += f": ISL {_length(work.isl)}, OSL {_length(work.osl)}"
        lengths += "".join(f", {each.share:.0%} {_length(each.isl)}/{_length(each.osl)}" for each in work.mix)
    parts = [case.what] if case.what else []
    parts += [count(case.slots, "slot"), lengths + (f", {work.turns} turns" if work.turns > 1 else "")]
    if load is None:
        burst = f"{count(settings.benchmark.num_requests or 0, 'request')} at once"
        load = {"burst": burst, "trace": f"trace {work.trace}"}.get(work.arrival, work.arrival)
        load += " loop" if work.arrival == "closed" else ""
    parts += [load] if load else []
    if settings.simulator.until is not None and load:
        parts.append(f"until {settings.simulator.until:g} {'ticks' if case.unit == 'ticks' else 's'}")
    return "; ".join(parts)


def _length(length: LengthSettings) -> str:
    """Abbreviate a length: "128", "lognormal 48±24", "uniform 32-224"."""
    kind = length.distribution
    if kind == "fixed":
        return f"{length.mean:g}"
    if kind == "uniform":
        return f"uniform {length.min}-{length.max}"
    return kind if length.mean is None else f"{kind} {length.mean:g}±{length.stdev:g}"


def _time(value: float | None, unit: str) -> str:
    return number(value if value is None or unit == "ticks" else 1000 * value)


def _short(outcome: PolicyOutcome) -> str:
    if outcome.concurrency is not None:
        return str(outcome.concurrency)
    return outcome.load if outcome.request_rate is None else f"{outcome.request_rate:g}"


def _notes(outcomes: Sequence[PolicyOutcome], unit: str, *, several: bool) -> list[str]:
    lines: list[str] = []
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.policy == policy]
        above = sorted(filter(overload, own), key=overload)
        if not several:
            lines += wrapped_lines(f"{NAMES[policy]}: {limits_in_words(own[0])}")
        if above:
            where = f"{NAMES[policy]}{f' at {above[-1].load}' if several else ''}"
            smaller = len(above) - 1
            others = f" The same holds for {smaller} smaller load{'s' * (smaller > 1)}." if smaller else ""
            lines += wrapped_lines(f"{where}: {overload_in_words(above[-1], unit)}{others}")
    if any(outcome.queue_end for outcome in outcomes):
        lines += wrapped_lines(
            "The run ended before all requests did: latencies cover only requests that got that far. A faster policy "
            "includes more of the late ones, which waited longest."
        )
    if any(missing(outcome.ttft, outcome.e2e) for outcome in outcomes):
        lines += wrapped_lines(f"{NONE}: no request got that far.")
    return lines


def missing(*distributions: Distribution) -> bool:
    """Return whether any outcome lacks values."""
    return any(not distribution.count for distribution in distributions)
