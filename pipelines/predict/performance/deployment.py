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
from pipelines.predict.config import fit_files
from pipelines.predict.performance.coverage import unmodelled
from pipelines.predict.performance.fit_file import FittedModel, load_fit
from pipelines.predict.performance.gpus import GpuSpec
from pipelines.predict.performance.lengths import known_lengths
from pipelines.predict.performance.limits import ChosenLimits
from pipelines.predict.performance.modelled import ModelledDeployment, Provenance
from pipelines.predict.performance.performance import Costed, Setup
from pipelines.predict.performance.placement import EngineTerms, place
from pipelines.settings.root import Settings, compression_of


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
    def of(cls, variant: str) -> Compression | None:
        """Parse `Settings.variant`; None for the word of another tool, and for a pruned model of other sizes."""
        found = compression_of(variant)
        if "prune" in found:
            return None
        try:
            qformat, kv_format = QFormat(found.get("quant", "none")), KvFormat(found.get("kv_cache", "auto"))
        except ValueError:
            return None
        return cls(qformat, kv_format, "sparsity" in found)


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
        UserError: the GPU does not support it, the model leaves no room for a KV cache, or a setting changes the speed
            in a way that is not modelled.
    """
    if faults := unmodelled(settings):
        raise UserError.of(faults)
    setup = Setup.of(settings, model, gpu)
    setup = replace(setup, tp=tp or setup.tp, pp=pp or setup.pp)
    if form is not None:
        setup = replace(setup, qformat=form.qformat, kv_format=form.kv_format, sparse=form.sparse)
    costed = cost(setup)
    placed = place(setup, costed.cost, EngineTerms.of(settings, model), known_lengths(settings))
    if not placed.engine.kv_blocks:
        raise UserError(
            f"{model.name} in {setup.qformat} leaves no KV cache on {gpu.name} (modelled).",
            todo=f"`make plan hardware={gpu.name} ...` shows what would fit.",
        )
    deployment = ModelledDeployment(placed.engine, costed.cost, costed.overhead_s, costed.client_delay, lanes=setup.pp)
    return PredictedDeployment(deployment, costed.provenance, costed.why, costed.spread, placed.limits)
