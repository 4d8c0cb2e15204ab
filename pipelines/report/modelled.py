"""Add the performance model's predictions to the measured runs of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.domain.benchmark import Summary
from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.registry import ENGINES, runs_on_cpu
from pipelines.engines.tuning import tuned
from pipelines.host.machine import GpuFacts
from pipelines.predict.performance.deployment import Compression, fitted_deployment, gpu_model, known
from pipelines.predict.performance.fit_file import FittedModel, processor
from pipelines.predict.performance.gpus import GpuSpec, gpu_named
from pipelines.predict.performance.hardware import row_of
from pipelines.predict.performance.modelled import run_trial, trial
from pipelines.predict.performance.performance import origin
from pipelines.predict.performance.read_measured import measured_level
from pipelines.predict.performance.step_cost import costs
from pipelines.report.data import BenchmarkRun, ModelledRun, ReportData
from pipelines.settings.load import WorkloadSettings
from pipelines.settings.root import Settings
from pipelines.store.store import Store


def with_models(data: ReportData, settings: Settings, store: Path) -> ReportData:
    """Return the report's data with predictions for the loads of each run for which there is a model.

    Args:
        data: the report's data.
        settings: contain the folder of fits to benchmarks and the limits of the engine.
        store: folder of the store.

    Raises:
        UserError: a fit cannot be read.
    """
    fits = known(settings)
    on_gpu = any(not runs_on_cpu(run.result.engine) for each in data.workloads for run in each.runs)
    shape = shape_of(settings) if on_gpu and data.models == (settings.model.label,) else None

    def told(run: BenchmarkRun) -> BenchmarkRun:
        return replace(run, modelled=_modelled_run(run, settings, store, shape, fits))

    workloads = tuple(replace(each, runs=tuple(map(told, each.runs))) for each in data.workloads)
    return replace(data, workloads=workloads)


def _modelled_run(
    run: BenchmarkRun, settings: Settings, store: Path, shape: ModelShape | None, fits: Sequence[FittedModel]
) -> ModelledRun | None:
    result = run.result
    if result.gpus > result.world_size:  # several instances, and how they shared the load is not known
        return None
    pp = result.world_size // result.tp_size
    cpu = processor(result.machine) if runs_on_cpu(result.engine) else None
    where = {cpu} if cpu else {str(gpu["name"]) for gpu in (result.machine.get("gpus") or ())[:1]}
    model = fitted_deployment(
        fits, model=result.model, precision=result.precision, engine=result.engine, tp=result.tp_size,
        world=result.world_size, where=where,
    )  # fmt: skip
    engine = ENGINES.get(result.engine)
    form, gpu = Compression.of(result.precision), gpu_of_result(result.machine)
    if model is None and engine is not None and engine.builder and shape and form and gpu:
        with suppress(UserError):  # without a prediction there is nothing to show
            spec = replace(shape, name=result.model)
            sent = settings.model_copy(update={"workload": WorkloadSettings.judged(result.workload, "workload.")})
            sent = tuned(sent, engine, spec, settings.hardware)
            model = gpu_model(sent, spec, gpu, costs(settings), form=form, tp=result.tp_size, pp=pp)
    if model is None:
        return None
    levels: dict[str, Summary] = {}
    for level in result.levels:
        measured = measured_level(result, level, store / run.piece.place)
        if measured is not None:
            levels[level.requests_file] = run_trial(trial(measured), model.deployment)
    return ModelledRun(levels, origin(model.provenance, model.why)) if levels else None


def shape_of(settings: Settings) -> ModelShape | None:
    """Return the model's shape from disk or from conf/model; None for a model that is not downloaded yet."""
    from pipelines.store.sources import model_source

    if settings.model.folder is not None:
        return model_source(settings.model.folder, Store(settings.paths.store).hashes, weights=False)[1]
    return settings.model.shape.to_shape() if settings.model.shape is not None else None


def gpu_of_result(machine: Mapping[str, Any]) -> GpuSpec | None:
    """Return the GPU that a benchmark ran on; None if conf/hardware does not contain it."""
    gpus = machine.get("gpus") or ()
    row = row_of(GpuFacts(gpus[0]["name"], gpus[0]["sm"], gpus[0]["memory_bytes"])) if gpus else None
    return gpu_named(row.name) if row else None
