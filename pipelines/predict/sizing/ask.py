"""Build the sizing question from the settings."""

from __future__ import annotations

from typing import Any

from pipelines.domain.errors import UserError, collecting
from pipelines.domain.formats import QFormat, proposed
from pipelines.domain.model_shape import ModelShape
from pipelines.host.machine import Machine
from pipelines.predict.performance.coverage import unmodelled
from pipelines.predict.performance.gpus import GpuSpec, data_sheet
from pipelines.predict.performance.hardware import resolved
from pipelines.predict.performance.lengths import drawn_lengths, known_lengths
from pipelines.predict.performance.models import known_model
from pipelines.predict.performance.performance import Setup, runnable
from pipelines.predict.performance.placement import EngineTerms
from pipelines.predict.performance.tuning import tuned_for, tuned_kv_formats
from pipelines.predict.sizing.demand import Demand, stated_demand
from pipelines.predict.sizing.price import Prices
from pipelines.predict.sizing.question import Question
from pipelines.settings.load import WorkloadSettings
from pipelines.settings.root import Settings


def ask(settings: Settings, machine: Machine) -> Question:
    """Build the question.

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
        demand = demand_of(settings)
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
        prices=Prices.of(sizing.prices),
        stated=known_lengths(settings),
    )


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


def demand_of(settings: Settings) -> Demand:
    """Return the load to size for.

    Raises:
        UserError: no load is given.
    """
    demand = stated_demand(settings.sizing)
    if demand is None:
        raise UserError(
            "No load to size for is given.",
            todo="Add sizing.average_rate=... (requests/s), or sizing.users=... with sizing.requests_per_user_day=..., "
            "or sizing.peak_rate=...",
        )
    return demand


def usual_tp(chosen: int, model: ModelShape, gpu: GpuSpec) -> tuple[int, ...]:
    """Return the powers of two up to a server's size that divide the heads, or only the size that is configured."""
    if chosen > 1:
        return (chosen,)
    powers, heads = (1, 2, 4, 8, 16), model.num_attention_heads
    return tuple(size for size in powers if size <= gpu.gpus_per_server and heads % size == 0) or (1,)


def formats_to_try(settings: Settings, model: ModelShape, gpu: GpuSpec) -> tuple[QFormat, ...]:
    """Return the weight formats to try: those that are given, all that the GPU can run, or the one of `quant`."""
    given = settings.sizing.formats
    if given is None:
        return (settings.quant.qformat,)
    return tuple(proposed(runnable(Setup(model, gpu)))) if "auto" in given else tuple(QFormat(name) for name in given)


def unit_gaps(workload: WorkloadSettings, count: int) -> Any:
    """Return float64[n] gaps with mean 1: gamma or constant if the workload says so, else Poisson.

    The sample is scaled to a mean of exactly 1, so that the nominal rate is the actual rate.
    """
    import numpy as np

    rng = np.random.default_rng(workload.seed)
    if workload.arrival == "constant":
        return np.ones(count)
    cv = workload.cv if workload.arrival == "gamma" else 1.0
    gaps = rng.gamma(1 / cv**2, cv**2, size=count)
    return gaps / gaps.mean()
