"""Place a model on its GPUs: the limits, the memory and the scheduler of one engine (modelled).

`make plan`, `make size`, `make simulate` and reports all build their engine here, so that one question has one answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS
from pipelines.domain.model_shape import ModelShape
from pipelines.predict.performance.choose_limits import choose
from pipelines.predict.performance.engine_sizes import engine_sizes
from pipelines.predict.performance.gpus import data_sheet
from pipelines.predict.performance.lengths import LoadLengths, known_lengths
from pipelines.predict.performance.limits import NOTHING_GIVEN, ChosenLimits, WantedLimits
from pipelines.predict.performance.memory import (
    Concurrency,
    DeviceMemory,
    EngineSizes,
    concurrency,
    device_memory,
    kv_blocks,
)
from pipelines.predict.performance.performance import Costed, Setup
from pipelines.predict.simulator.cost import IterationCost
from pipelines.predict.simulator.interface import Admission, Policy, SchedulerLimits, admission_of
from pipelines.settings.engine import HardwareSettings
from pipelines.settings.root import Settings

Judge = Callable[[Setup, ChosenLimits | None], None]
"""Applies the rules of a plan to an engine; raises UserError for what they refuse."""


def unjudged(_setup: Setup, _limits: ChosenLimits | None) -> None:
    """Accept an engine, where no rules are at hand."""


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """Properties of an engine that do not depend on its format and split.

    Attributes:
        sizes: quantities that determine its memory; its limits count only if the requests are not known.
        wanted: limits that are given; the others are chosen for the load.
        policy: batching policy.
        admission: how requests get KV blocks.
        prefix_tokens: tokens of each prompt that are already in the cache.
    """

    sizes: EngineSizes
    wanted: WantedLimits = NOTHING_GIVEN
    policy: Policy = "inflight"
    admission: Admission = "GUARANTEED_NO_EVICT"
    prefix_tokens: int = 0

    @classmethod
    def of(cls, settings: Settings, shape: ModelShape) -> EngineTerms:
        """Read them from the groups build, triton, runtime, kv_cache and workload."""
        chunked = settings.runtime.enable_chunked_context
        batched: Policy = "inflight_chunked" if chunked else "inflight"
        return cls(
            sizes=engine_sizes(settings, shape),
            wanted=WantedLimits.of(settings.build, chunked=chunked),
            policy="static" if settings.triton.batching_strategy.lower() == "v1" else batched,
            admission=admission_of(settings.triton.batch_scheduler_policy),
            prefix_tokens=cached_prefix(settings),
        )


def cached_prefix(settings: Settings) -> int:
    """Return the tokens of each prompt that all requests share, if the KV cache keeps them."""
    share = settings.workload.shared_prefix_share
    if not share or not settings.kv_cache.enable_block_reuse:
        return 0
    known = known_lengths(settings)
    mean = settings.workload.isl.expected or (known.mean_isl if known else 0.0)
    return int(share * mean)


@dataclass(frozen=True, slots=True)
class Placed:
    """An engine on its GPUs.

    Attributes:
        engine: scheduler of one batch; with pipeline stages several batches are in progress, each with its share.
        sizes: quantities that determined its memory.
        memory: memory of one GPU.
        concurrency: number of requests of mean length that run at a time.
        limits: limits that it is built with, given or chosen; None if the requests are not known.
    """

    engine: SchedulerLimits
    sizes: EngineSizes
    memory: DeviceMemory
    concurrency: Concurrency
    limits: ChosenLimits | None

    def holds(self, tokens: int) -> bool:
        """Return whether one request of this many tokens fits."""
        return concurrency(self.sizes, self.memory, tokens).requests >= 1


def place(setup: Setup, cost: IterationCost, terms: EngineTerms, load: LoadLengths | None) -> Placed:
    """Place a model on its GPUs.

    Args:
        setup: model, GPU, format and split.
        cost: cost of an iteration.
        terms: everything else about the engine.
        load: requests to serve; None if they are not known, and then no limit is chosen.
    """
    sizes, total = setup.resized(terms.sizes), setup.gpu.reported_bytes
    limits = None if load is None else choose(sizes, total, cost, load, terms.wanted)
    sizes = sizes if limits is None else limits.sizes(sizes)
    usual = sizes.max_seq_len if load is None else load.mean
    memory = device_memory(sizes, total)
    engine = SchedulerLimits(
        policy=terms.policy,
        slots=sizes.max_batch_size,
        max_num_tokens=sizes.max_num_tokens,
        admission=terms.admission,
        kv_blocks=kv_blocks(sizes, memory, usual),
        tokens_per_block=sizes.tokens_per_block,
        prefix_tokens=terms.prefix_tokens,
    )
    return Placed(engine, sizes, memory, concurrency(sizes, memory, usual), limits)


def limits_for_load(
    settings: Settings, shape: ModelShape | None, hardware: HardwareSettings, cost_of: Callable[[Setup], Costed]
) -> ChosenLimits | None:
    """Choose the limits of the engine that the settings describe.

    Args:
        settings: the configuration.
        shape: of the model, where known.
        hardware: the GPU.
        cost_of: cost of an iteration.

    Returns:
        None where nothing is left to choose, or the model, the speed of the GPU or the requests are not known.
    """
    if shape is None or hardware.mem_bw_gb_s is None:
        return None
    terms, load = EngineTerms.of(settings, shape), known_lengths(settings)
    if load is None or terms.wanted.all_given:
        return None
    try:
        setup = Setup.of(settings, shape, data_sheet(hardware))
        timed = max(settings.quant.formats, key=lambda each: FORMATS[each].linear_bits)  # of a mix, the slowest to read
        cost = cost_of(replace(setup, qformat=timed)).cost
    except UserError:
        return None  # a format, a split or windows that other checks refuse
    return place(setup, cost, terms, load).limits
