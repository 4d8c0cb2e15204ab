"""Input of the sizing calculator, as plain values."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from pipelines.document.show import count
from pipelines.domain.benchmark import Slo
from pipelines.domain.errors import UserError, collecting
from pipelines.domain.formats import KvFormat, QFormat, group_instead, proposed
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.summary import SECOND
from pipelines.domain.units import HOUR
from pipelines.engines.registry import TENSORRT_LLM, EngineDescription
from pipelines.host.machine import Machine
from pipelines.loadgen.config import WorkloadSettings
from pipelines.loadgen.trace import Trace, known_times, read_trace
from pipelines.predict.config import PriceSettings, SizingSettings
from pipelines.predict.performance.coverage import unmodelled
from pipelines.predict.performance.deployment import tuned_for, tuned_kv_formats
from pipelines.predict.performance.gpus import GpuSpec, data_sheet, resolved
from pipelines.predict.performance.limits import LoadLengths, drawn_lengths, known_lengths
from pipelines.predict.performance.models import engine_of, known_model
from pipelines.predict.performance.performance import Setup, runnable
from pipelines.predict.performance.placement import EngineTerms, Judge, unjudged
from pipelines.settings.root import Settings

# Requests per second to serve: the average, and the peak that a fleet is sized for.
#
# The peak of Poisson arrivals is the number of requests that one second does not exceed with a given probability:
# peak = smallest k with P(X <= k) >= q, X ~ Poisson(average). Average 64/s: the 95th percentile is 77.

TENSORRT_ENGINES = "TensorRT-LLM 1.2"
"""The last version with TensorRT engines."""
USUAL_PERCENTILE = 95.0
"""Percentile of Poisson arrivals that is the peak if nothing else states one."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand on a fleet.

    Attributes:
        average: requests per second during the busy hours; None when only the peak is known.
        peak: requests per second that the fleet is sized for.
        busy_hours: hours of a day in which the average holds.
        how: how the peak was obtained, for people.
    """

    average: float | None
    peak: float
    busy_hours: float
    how: str

    @property
    def requests_per_day(self) -> float | None:
        """Requests per day. 70.7/s over 8 hours: 2,036,160. None when the average is not known."""
        return None if self.average is None else requests_per_day(self.average, self.busy_hours)


def demand_of(settings: SizingSettings, workload: WorkloadSettings) -> Demand:
    """Return the load to size for: as given, else that of the workload's trace.

    Raises:
        UserError: no load is given.
    """
    average = settings.average
    if settings.peak_rate is not None:
        return Demand(average, settings.peak_rate, settings.busy_hours, "peak as given")
    if average is None and workload.trace is not None:
        return _traced_demand(settings, workload)
    if average is None:
        raise UserError(
            "There is no load to size for.",
            todo="Add sizing.average_rate=... (requests/s), or sizing.users=... with sizing.requests_per_user_day=..., "
            "or sizing.peak_rate=..., or the file of your traffic, workload.trace=...",
        )
    if settings.mode == "offline":
        return Demand(average, average, settings.busy_hours, "the average: offline requests can wait")
    if settings.peak_factor is not None:
        how = f"{settings.peak_factor:g} x the average, as given"
        return Demand(average, average * settings.peak_factor, settings.busy_hours, how)
    percent = settings.peak_percentile or USUAL_PERCENTILE
    peak, how = poisson_percentile(average, percent), f"P{percent:g} of Poisson arrivals in one second"
    if not peak:
        how += " is 0, but a request takes one"
    return Demand(average, float(max(1, peak)), settings.busy_hours, how)


def _traced_demand(settings: SizingSettings, workload: WorkloadSettings) -> Demand:
    """Return the average of a trace, and the rate of its busiest `peak_window_s` seconds (of all, if it is shorter)."""
    times = np.array(known_times(workload, "Give the rate, sizing.peak_rate=..., or each turn a time of its own."))
    span = times[-1] / SECOND
    if span == 0:
        raise UserError(
            f"workload.trace={workload.trace} has no rate: all its requests come at once.",
            todo="Give the rate: sizing.peak_rate=...",
        )
    average, window = (len(times) - 1) / float(span), min(settings.peak_window_s, float(span))
    if settings.mode == "offline":
        return Demand(average, average, settings.busy_hours, "the average of the trace: offline requests can wait")
    within = np.searchsorted(times, times + round(window * SECOND)) - np.arange(len(times))
    peak = max(average, float(within.max()) / window)
    return Demand(average, peak, settings.busy_hours, f"busiest {window:,.4g} s of the trace")


def poisson_percentile(average: float, percent: float) -> int:
    """Return the number of requests that `percent` (0 to 100) of seconds do not exceed, with Poisson arrivals."""
    from scipy.special import pdtr, pdtrik  # scipy.stats has this as poisson.ppf, but takes 0.6 s longer to import

    share = percent / 100
    above: int = math.ceil(pdtrik(share, average))
    return above - 1 if above > 0 and pdtr(above - 1, average) >= share else above


def requests_per_day(rate: float, hours: float = 24.0) -> float:
    """Return requests per day from a rate (per second) over some hours of the day."""
    return rate * hours * HOUR


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Question of how many GPUs a load needs within given limits.

    Attributes:
        demand: requests per second.
        isl: int64[n], input tokens, drawn.
        osl: int64[n], output tokens, drawn.
        gaps: float64[n], arrival gaps with mean 1, drawn once, so that all rates see the same sample.
        slo: latency limits; without any, only throughput counts.
        terms: properties of the engine in any format and split.
        percentile: percentage of requests that must meet each limit, e.g. 95.
        mode: "online", "sequential" or "offline".
        headroom: share of each instance's rate kept free.
        tp: tensor parallel sizes to try.
        pp: pipeline parallel sizes to try.
        kv_of: the only one to try with a weight format, for those that have one.
        sparse: whether the weights are 2:4-sparse.
        prices: prices of servers, GPUs and electricity.
        engine: what serves it, for people.
        stated: mean and longest lengths as the settings state them; None takes those of `isl` and `osl`.
        trace: description of the trace that the load is from; "" without one.
        arrivals: how requests arrive, for people.
        judge: rules that a plan of the configuration would have to keep.
    """

    model: ModelShape
    gpu: GpuSpec
    demand: Demand
    isl: Any
    osl: Any
    gaps: Any
    slo: Slo
    terms: EngineTerms
    percentile: float = 95.0
    mode: str = "online"
    headroom: float = 0.0
    spare: int = 0
    tp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    formats: tuple[QFormat, ...] = (QFormat.NONE,)
    kv_formats: tuple[KvFormat, ...] = (KvFormat.AUTO,)
    kv_of: Mapping[QFormat, KvFormat] = field(default_factory=dict)
    sparse: bool = False
    prices: PriceSettings = field(default_factory=PriceSettings)
    engine: str = TENSORRT_ENGINES
    stated: LoadLengths | None = None
    trace: str = ""
    arrivals: str = "Poisson"
    judge: Judge = unjudged

    @property
    def lengths(self) -> LoadLengths:
        """Mean and longest lengths of the requests."""
        return self.stated or LoadLengths.of(self.isl, self.osl)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.lengths.longest if self.trace else int((self.isl + self.osl).max())

    @property
    def mean_isl(self) -> float:
        """Mean input tokens."""
        return float(self.isl.mean())

    @property
    def mean_osl(self) -> float:
        """Mean output tokens."""
        return float(self.osl.mean())

    def setups(self) -> Iterator[Setup]:
        """Return every configuration to try."""
        sizes = self.terms.sizes
        for qformat in self.formats:
            kv_formats = (self.kv_of[qformat],) if qformat in self.kv_of else self.kv_formats
            for kv_format, pp, tp in product(kv_formats, self.pp, self.tp):
                apart = sizes.attention_dp and tp > 1
                yield Setup(
                    self.model, self.gpu, qformat, kv_format, self.sparse, tp, pp, apart,
                    group_size=group_instead(sizes.qformat, sizes.group_size, qformat),
                    gpu_weights_percent=sizes.gpu_weights_percent,
                )  # fmt: skip

    def check(self) -> None:
        """Refuse a question that no configuration can answer.

        Raises:
            UserError: a request is longer than the model's context, or than a limit that is given.
        """
        if self.longest > self.model.max_position_embeddings:
            worst = int((self.isl + self.osl).argmax())
            both = f"{self.isl[worst]:,} input and {self.osl[worst]:,} output"
            shorten = "Shorten workload.isl or workload.osl (a distribution needs a max)"
            raise UserError(
                f"A request of {f'{self.longest:,}' if self.trace else both} tokens is longer than the "
                f"context of {self.model.name}, {self.model.max_position_embeddings:,} tokens.",
                todo=f"{'Leave such requests out of the trace' if self.trace else shorten}, or choose another model.",
            )
        prompt = self.lengths.longest_isl if self.trace else int(self.isl.max())
        for name, tokens in (("max_input_len", prompt), ("max_seq_len", self.longest)):
            limit = getattr(self.terms.wanted, name)
            if limit is not None and tokens > limit:
                raise UserError(
                    f"The load has {'prompts' if tokens == prompt else 'requests'} of {tokens:,} tokens; "
                    f"build.{name}={limit} does not hold them.",
                    todo=f"Leave build.{name} out, so that it is chosen for the load, or set {tokens} or more.",
                )


def setup_label(setup: Setup) -> str:
    """Return a short name of a configuration: "TP 2 fp8", "TP 8 PP 2 int4_awq, KV fp8".

    DEP is NVIDIA's name of attention data parallelism with parallel experts.
    """
    pp = f" PP {setup.pp}" if setup.pp > 1 else ""
    kv = "" if setup.kv_format is KvFormat.AUTO else f", KV {setup.kv_format}"
    return f"{'DEP' if setup.attention_dp else 'TP'} {setup.tp}{pp} {setup.qformat}{kv}"


# Build the sizing question from the settings.


def ask(settings: Settings, machine: Machine, judge: Judge = unjudged) -> Question:
    """Build the question; `judge` applies the rules of a plan.

    Raises:
        UserError: something is missing or wrong; names all faults at once.
    """
    faults = unmodelled(settings)
    model = gpu = demand = None
    with collecting(faults):
        model = known_model(settings).with_windows(settings.triton.max_attention_window_size)
    with collecting(faults):
        gpu = gpu_for(settings, machine)
    with collecting(faults):
        demand = demand_of(settings.sizing, settings.workload)
    if faults or model is None or gpu is None or demand is None:
        raise UserError.of(faults)
    isl, osl = drawn_lengths(settings.workload, settings.sizing.requests)
    hardware = resolved(settings.hardware, machine)
    kv_of = {} if settings.sizing.kv_formats else tuned_kv_formats(settings, model, hardware)
    settings = tuned_for(settings, model, hardware)
    sizing, build = settings.sizing, settings.build
    return Question(
        model=model,
        gpu=gpu,
        demand=demand,
        isl=isl,
        osl=osl,
        gaps=unit_gaps(settings.workload, settings.sizing.requests),
        slo=sizing.slo.to_slo(),
        terms=EngineTerms.of(settings, model),
        percentile=sizing.slo.percentile,
        mode=sizing.mode,
        headroom=sizing.headroom,
        spare=sizing.spare,
        tp=sizing.tp or usual_tp(build.tp_size, model, gpu),
        pp=sizing.pp or (build.pp_size,),
        formats=formats_to_try(settings, model, gpu),
        kv_formats=sizing.kv_formats or (settings.kv_cache.dtype,),
        kv_of=kv_of,
        sparse=settings.sparsity.method != "none" and build.weight_sparsity,
        prices=sizing.prices.of(gpu.name),
        stated=known_lengths(settings),
        arrivals=arrival if (arrival := settings.workload.arrival) in ("constant", "gamma") else "Poisson",
        judge=judge,
        engine=served_by(engine_of(settings, model)),
        trace="" if settings.workload.trace is None else trace_text(read_trace(settings.workload), len(isl)),
    )


def served_by(engine: EngineDescription) -> str:
    """Name an engine with its version, where the engine decides it."""
    if engine.writes_engine:
        return TENSORRT_ENGINES if engine is TENSORRT_LLM else engine.title
    return f"{engine.title}'s LLM API"


def trace_text(trace: Trace, drawn: int) -> str:
    """Describe a trace of which so many requests are drawn, and what a reader of the figures should know of it."""
    seconds = max(at for place, at in enumerate(trace.offset_ns) if place not in trace.waiting) / SECOND
    lasts = f"{seconds / HOUR:,.3g} h" if seconds >= HOUR else f"{seconds:,.4g} s"
    part = f", of which {drawn:,} are simulated" if drawn < len(trace.osl) else ""
    return "; ".join((f"{count(len(trace.osl), 'request')} in {lasts}{part}", *trace.notes))


def gpu_for(settings: Settings, machine: Machine) -> GpuSpec:
    """Return the GPU to size for.

    Raises:
        UserError: none is named and this machine has none, or its data sheet is unknown.
    """
    hardware = resolved(settings.hardware, machine)
    if hardware.gpu is None:
        raise UserError(
            f"hardware=auto, and this machine has no GPU ({machine.no_gpu_reason}).",
            todo="Name the GPU to size for, e.g. hardware=h100_sxm.",
        )
    return data_sheet(hardware)


def usual_tp(chosen: int, model: ModelShape, gpu: GpuSpec) -> tuple[int, ...]:
    """Return the powers of two up to a server's size that divide the heads, or only the size that is configured."""
    if chosen > 1:
        return (chosen,)
    powers, heads = (1, 2, 4, 8, 16), model.num_attention_heads
    return tuple(size for size in powers if size <= gpu.gpus_per_server and heads % size == 0) or (1,)


def formats_to_try(settings: Settings, model: ModelShape, gpu: GpuSpec) -> tuple[QFormat, ...]:
    """Return the weight formats to try: those that are given, all that the GPU can run, or the one of `quant`."""
    names = settings.sizing.formats
    if names is None:
        return (settings.quant.qformat,)
    return tuple(proposed(runnable(Setup(model, gpu)))) if "auto" in names else tuple(QFormat(name) for name in names)


def unit_gaps(workload: WorkloadSettings, size: int) -> Any:
    """Return float64[n] gaps with mean 1: gamma or constant if the workload says so, else Poisson.

    The sample is scaled to a mean of exactly 1, so that the nominal rate is the actual rate.
    """
    rng = np.random.default_rng(workload.seed)
    if workload.arrival == "constant":
        return np.ones(size)
    cv = workload.cv if workload.arrival == "gamma" else 1.0
    gaps = rng.gamma(1 / cv**2, cv**2, size=size)
    return gaps / gaps.mean()
