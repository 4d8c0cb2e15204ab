"""Predict the speed of a plan before anything is built, by simulating the loads of its workload."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from pipelines.document.show import ms, number
from pipelines.domain.errors import UserError, refuse
from pipelines.host.screen import table, wrapped
from pipelines.plan.plan import Plan
from pipelines.predict.performance.coverage import unmodelled
from pipelines.predict.performance.deployment import (
    FittedModel,
    PredictedDeployment,
    costs,
    fitted_deployment,
    gpu_model,
    processor,
    stored_fits,
)
from pipelines.predict.performance.gpus import data_sheet
from pipelines.predict.performance.modelled import ModelledDeployment, run_trial
from pipelines.predict.performance.performance import origin
from pipelines.predict.simulate.case import SimulationCase
from pipelines.predict.simulate.loads import make_levels, settled
from pipelines.predict.simulate.outcome import SimulatedLevel

MOST_REQUESTS = 4000
"""A plan must not take longer than two seconds; larger loads are left to `make simulate`."""


def modelled_text(plan: Plan) -> str:
    """Render the lines about speed below the plan; empty where there is no model of what is planned.

    Raises:
        UserError: the fit that is named cannot be read, or is of another GPU.
    """
    if plan.deployment.engine.on_device:
        return ""
    fits, faults = stored_fits(plan.settings), unmodelled(plan.settings)
    try:
        model = model_of(plan, fits)
    except UserError as error:
        if plan.settings.sizing.fit is not None and not faults:
            raise
        return "\n" + wrapped(f"no figures of speed: {error}") + "\n"
    if model is None:
        return ""
    levels = _levels(plan, model.deployment)
    if not levels:
        return ""
    name = plan.settings.workload.name
    lines = ["", wrapped(f"modelled under workload={name} ({origin(model.provenance, model.why)}):")]
    rows: list[tuple[str, ...]] = [("load", "requests/s", "TTFT p50 ms", "TTFT p95 ms", "ITL p50 ms")]
    run = partial(run_trial, deployment=model.deployment, backend="numpy")
    for level in levels:
        trial = settled(level, run, lambda summary: summary.e2e_s, MOST_REQUESTS)
        times = (trial.ttft_s.p50, trial.ttft_s.p95, trial.itl_s.p50)
        rows.append((level.title, number(trial.requests_per_s), *map(ms, times)))
    lines += table(rows, indent=2)
    wide = "  ".join(f"{name} {100 * (np.exp(sd) - 1):.0f} %" for name, sd in model.spread.items())
    return "\n".join([*lines, wrapped(f"  usually off by (one standard deviation): {wide}", 4)]) + "\n"


def model_of(plan: Plan, fits: Sequence[FittedModel]) -> PredictedDeployment | None:
    """Return the model of what is planned: one of the fits to a benchmark of it, else the GPU's performance model.

    Raises:
        UserError: a setting changes the speed in a way that is not modelled, or the model does not fit.
    """
    settings, build = plan.settings, plan.settings.build
    if plan.deployment.variant != settings.variant:
        return None  # an engine built elsewhere, with a KV cache that is not modelled
    engine, hardware = plan.deployment.engine, plan.deployment.gpu
    on_cpu = not engine.needs_gpu
    where = {processor(plan.deployment.machine.to_json()) or ""} if on_cpu else {hardware.name, *hardware.nvidia_smi}
    fitted_model = fitted_deployment(
        fits, model=settings.model.label, precision=settings.variant.label, engine=engine.name, tp=build.tp_size,
        world=build.tp_size * build.pp_size, where=where,
    )  # fmt: skip
    if fitted_model is not None:
        refuse(unmodelled(settings))
        return fitted_model
    if on_cpu and settings.sizing.fit is not None:
        fitted = fits[0]
        raise UserError(
            f"sizing.fit={settings.sizing.fit} does not match this deployment: it is for {fitted.model},"
            f" {fitted.precision or 'an unknown format'}, engine {fitted.engine or 'unknown'}, TP {fitted.tp}, on"
            f" {fitted.gpu or fitted.cpu or 'an unknown machine'}.",
            allowed=f"A fit of {settings.model.label}, {settings.variant.label}, engine {engine.name},"
            f" TP {build.tp_size}, on {next(iter(where)) or 'this machine'}.",
            todo="Fit this deployment with `make calibrate`, or leave sizing.fit out.",
        )
    if on_cpu or plan.deployment.shape is None or hardware.mem_bw_gb_s is None:
        return None  # nothing is known about a GPU without a data sheet
    model = replace(plan.deployment.shape, name=settings.model.label)
    return gpu_model(settings, model, data_sheet(hardware), costs(settings))


def _levels(plan: Plan, deployment: ModelledDeployment) -> list[SimulatedLevel]:
    think = plan.settings.workload.think_time_s
    case = SimulationCase((deployment.engine,), deployment.cost, "s", deployment.overhead_s, think, "", "")
    with suppress(UserError):  # a trace of prompts, whose tokens only the tokenizer can count
        levels = make_levels(plan.settings, case)
        fit = [level for level in levels if not level.faults(deployment.engine)]
        return [level for level in fit if len(level.load.isl) <= MOST_REQUESTS]
    return []
