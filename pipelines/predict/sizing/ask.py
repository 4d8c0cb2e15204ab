"""Build the sizing question from the settings."""

from __future__ import annotations

from random import Random
from typing import Any

from pipelines.domain.errors import Fault, UserError, collecting
from pipelines.domain.model_shape import ModelShape
from pipelines.host.machine import Machine
from pipelines.predict.performance.gpus import GpuSpec, data_sheet
from pipelines.predict.performance.hardware import resolved
from pipelines.predict.performance.models import known_model
from pipelines.predict.simulator.interface import admission_of
from pipelines.predict.sizing.demand import Demand, stated_demand
from pipelines.predict.sizing.price import Prices
from pipelines.predict.sizing.question import Limits, Question
from pipelines.settings.load import WorkloadSettings
from pipelines.settings.root import Settings


def ask(settings: Settings, machine: Machine) -> Question:
    """Build the question.

    Raises:
        UserError: something is missing or wrong; names all faults at once.
    """
    faults: list[Fault] = []
    model = gpu = demand = None
    with collecting(faults):
        model = known_model(settings)
    with collecting(faults):
        gpu = gpu_for(settings, machine)
    with collecting(faults):
        demand = demand_of(settings)
    if faults or model is None or gpu is None or demand is None:
        raise UserError.of(faults)
    isl, osl = lengths(settings.workload, settings.sizing.requests)
    sizing, build = settings.sizing, settings.build
    return Question(
        model=model,
        gpu=gpu,
        demand=demand,
        isl=isl,
        osl=osl,
        gaps=unit_gaps(settings.workload, settings.sizing.requests),
        slo=sizing.slo.to_slo(),
        percentile=sizing.slo.percentile,
        mode=sizing.mode,
        headroom=sizing.headroom,
        spare=sizing.spare,
        tp=sizing.tp or usual_tp(build.tp_size, model, gpu),
        pp=sizing.pp or (build.pp_size,),
        formats=sizing.formats or (settings.quant.qformat,),
        kv_formats=sizing.kv_formats or (settings.kv_cache.dtype,),
        sparse=settings.sparsity.method != "none",
        limits=limits(settings, float(isl.mean())),
        prices=Prices.of(sizing.prices),
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


def limits(settings: Settings, mean_isl: float) -> Limits:
    """Return the engine's limits, from the groups build, triton and runtime."""
    build, triton = settings.build, settings.triton
    chunked = "inflight_chunked" if settings.runtime.enable_chunked_context else "inflight"
    shared = settings.workload.shared_prefix_share if settings.kv_cache.enable_block_reuse else 0.0
    return Limits(
        max_batch_size=build.max_batch_size,
        max_num_tokens=build.max_num_tokens,
        tokens_per_block=build.tokens_per_block,
        kv_fraction=triton.kv_cache_free_gpu_mem_fraction,
        max_kv_tokens=triton.max_tokens_in_paged_kv_cache,
        policy="static" if triton.batching_strategy == "V1" else chunked,  # type: ignore[arg-type]
        admission=admission_of(triton.batch_scheduler_policy),
        prefix_tokens=int(shared * mean_isl),
    )


def lengths(workload: WorkloadSettings, count: int) -> tuple[Any, Any]:
    """Return int64[n] input and output tokens, drawn as the load generator draws them, or read from a trace.

    In a conversation each turn carries all earlier ones, so turn k has k prompts and k - 1 answers as its input.

    Raises:
        UserError: a file cannot be read, or a trace has prompts instead of lengths.
    """
    import numpy as np

    from pipelines.loadgen.arrivals import read_trace
    from pipelines.loadgen.lengths import sampler

    if workload.trace is not None:
        items = read_trace(workload.trace, workload.trace_speed)
        if any(item.isl is None for item in items):
            raise UserError(f"workload.trace={workload.trace} has prompts; sizing needs isl on every line.")
        pairs = [(item.isl, item.osl) for item in items]
        return tuple(np.resize(np.array(column, dtype=np.int64), count) for column in zip(*pairs, strict=True))  # type: ignore[return-value]
    rng = Random(workload.seed)
    prompt = sampler(workload.isl, rng, key="workload.isl")
    answer = sampler(workload.osl, rng, key="workload.osl")
    rows: list[tuple[int, int]] = []
    while len(rows) < count:
        before = 0
        for _ in range(workload.turns):
            isl, osl = before + prompt(), answer()
            rows.append((isl, osl))
            before = isl + osl
    isl_, osl_ = zip(*rows[:count], strict=True)
    return np.array(isl_, dtype=np.int64), np.array(osl_, dtype=np.int64)


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
