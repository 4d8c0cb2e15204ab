"""Model a deployment and its benchmark loads: the "modelled" values shown beside the "measured" ones.

A fit to a benchmark of the same deployment on the same machine comes first; for GPUs the performance model is the
fallback; a CPU engine without a fit has no model, and nothing is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.predict.performance.choose_limits import limits_of
from pipelines.predict.performance.engine_sizes import engine_sizes, request_tokens
from pipelines.predict.performance.fit_file import FittedModel, load_fit
from pipelines.predict.performance.gpus import GpuSpec
from pipelines.predict.performance.limits import ChosenLimits
from pipelines.predict.performance.memory import device_memory, kv_blocks
from pipelines.predict.performance.modelled import ModelledDeployment, Provenance
from pipelines.predict.performance.performance import Costed, Setup
from pipelines.predict.simulator.interface import SchedulerLimits, admission_of
from pipelines.settings.root import Settings
from pipelines.settings.sizing import fit_files


@dataclass(frozen=True, slots=True)
class PredictedDeployment:
    """A modelled deployment.

    Attributes:
        deployment: what is simulated.
        provenance: "fitted", "transferred" or "datasheet".
        why: the same in words.
        spread: log-deviation of modelled / measured by "ttft", "itl", "throughput".
        limits: of the engine, where some were chosen for the load.
    """

    deployment: ModelledDeployment
    provenance: Provenance
    why: str
    spread: Mapping[str, float]
    limits: ChosenLimits | None = None


@dataclass(frozen=True, slots=True)
class Compression:
    """Parse the compression from a word such as "magnitude_2_4-fp8-kv_fp8"."""

    qformat: QFormat
    kv_format: KvFormat
    sparse: bool

    @classmethod
    def asked(cls, settings: Settings) -> Compression:
        """Return the compression that the settings request."""
        return cls(settings.quant.qformat, settings.kv_cache.dtype, settings.sparsity.method != "none")

    @classmethod
    def of(cls, variant: str) -> Compression | None:
        """Parse `Settings.variant`; None for the word of another tool."""
        qformat, kv_format, sparse = QFormat.NONE, KvFormat.AUTO, False
        for part in variant.split("-"):
            if part.endswith("_2_4"):
                sparse = True
            elif part.startswith("kv_") and part[3:] in set(KvFormat):
                kv_format = KvFormat(part[3:])
            elif part in set(QFormat):
                qformat = QFormat(part)
            else:
                return None
        return cls(qformat, kv_format, sparse)


def known(settings: Settings) -> list[FittedModel]:
    """Return the fits to search: the named one, or else those of the store, skipping files of other versions.

    Raises:
        UserError: the named fit cannot be read.
    """
    if settings.sizing.fit is not None:
        return [load_fit(settings.sizing.fit)]
    found = []
    for path in fit_files(settings.paths.store):
        with suppress(UserError):
            found.append(load_fit(path))
    return found


def fitted_deployment(
    fits: Sequence[FittedModel], *, model: str, precision: str, engine: str, tp: int, world: int,
    where: Collection[str],
) -> PredictedDeployment | None:  # fmt: skip
    """Find the fit to a benchmark of this deployment on this machine, if there is one."""
    for each in fits:
        if each.is_of(model=model, precision=precision, engine=engine, tp=tp, world=world, where=where):
            return PredictedDeployment(each.deployment, "fitted", each.why, each.spread)
    return None


def gpu_model(
    settings: Settings, model: ModelShape, gpu: GpuSpec, cost: Callable[[Setup], Costed], *,
    form: Compression | None = None, tp: int | None = None, pp: int | None = None,
) -> PredictedDeployment:  # fmt: skip
    """Model the iterations of the deployment that the settings describe.

    Args:
        settings: limits of the engine and its KV cache, lengths of the requests; limits that are not given are chosen.
        model: dimensions of the model.
        gpu: GPU it runs on.
        cost: cost of an iteration.
        form: the format, if it differs from the settings.
        tp: tensor parallel ranks, if they differ from the settings.
        pp: pipeline parallel ranks, if they differ from the settings.

    Raises:
        UserError: the GPU does not support it, or the model leaves no room for a KV cache.
    """
    build = settings.build
    form, tp, pp = form or Compression.asked(settings), tp or build.tp_size, pp or build.pp_size
    costed = cost(Setup(model, gpu, form.qformat, form.kv_format, form.sparse, tp, pp))
    sizes = replace(
        engine_sizes(settings, model), qformat=form.qformat, kv_format=form.kv_format, tp_size=tp, pp_size=pp
    )
    limits = limits_of(settings, sizes, gpu.reported_bytes, costed.cost)
    sizes = sizes if limits is None else limits.sizes(sizes)
    memory = device_memory(sizes, gpu.reported_bytes)
    blocks = kv_blocks(sizes, memory, request_tokens(settings) or sizes.max_seq_len)
    if blocks < 1:
        raise UserError(
            f"{model.name} in {form.qformat} leaves no KV cache on {gpu.name} (modelled).",
            todo=f"`make plan hardware={gpu.name} ...` shows what would fit.",
        )
    engine = SchedulerLimits(
        slots=sizes.max_batch_size,
        max_num_tokens=sizes.max_num_tokens,
        admission=admission_of(settings.triton.batch_scheduler_policy),
        kv_blocks=blocks,
        tokens_per_block=build.tokens_per_block,
    )
    deployment = ModelledDeployment(engine, costed.cost, costed.overhead_s, costed.client_delay, lanes=pp)
    return PredictedDeployment(deployment, costed.provenance, costed.why, costed.spread, limits)
