"""Apply the plan's rules to sizing and simulation, so that neither recommends a configuration that a plan refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from pipelines.domain.errors import UserError
from pipelines.domain.families import BUILT, FAMILIES
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.engines.registry import LLM_API, TENSORRT_LLM, EngineDescription, with_setting
from pipelines.engines.tensorrt_llm.config import LIMITS_FOR_LOAD
from pipelines.host.machine import Machine
from pipelines.plan import serving_checks
from pipelines.plan.deployment import Deployment
from pipelines.plan.user_inputs import UserInputs
from pipelines.predict.performance.limits import ChosenLimits
from pipelines.predict.performance.performance import Setup
from pipelines.predict.performance.placement import Judge
from pipelines.rules.rulebook import check, refused
from pipelines.settings.root import Settings
from pipelines.store.sources import model_config


def judge_of(settings: Settings, machine: Machine) -> Judge:
    """Return the judge of candidates that differ from the settings in format, KV cache, split and limits."""
    folder = settings.model.folder if settings.sizing.model is None else None

    @cache
    def inputs() -> UserInputs:
        return UserInputs(rotary=None if folder is None else Rotary.of(model_config(folder)))

    def judge(setup: Setup, limits: ChosenLimits | None) -> None:
        plain = Deployment(settings, "serve", _engine(settings, setup.model), machine, inputs(), setup.model, limits)
        candidate = plain.changed(_changes(settings, setup, limits)).tuned.limited
        if setup.model.architecture not in FAMILIES:  # no rule knows other families
            candidate = replace(candidate, shape=None)
        faults = refused(check(candidate.facts)) + serving_checks.check(candidate)
        if faults:
            raise UserError.of(faults)

    return judge


def _engine(settings: Settings, model: ModelShape) -> EngineDescription:
    """Return the engine that is named; else the LLM API for families that only it runs, and TensorRT-LLM 1.2."""
    named = with_setting(settings.engine.name)
    if named is not None and named.needs_gpu:
        return named
    only_there = model.architecture in FAMILIES and model.architecture not in BUILT
    return LLM_API if only_there and "llm_api" in model.family.features else TENSORRT_LLM


def _changes(settings: Settings, setup: Setup, limits: ChosenLimits | None) -> str:
    """Return the candidate as overrides; limits that were chosen are no overrides, as in a plan."""
    overrides = [f"build.tp_size={setup.tp}", f"build.pp_size={setup.pp}", f"kv_cache.dtype={setup.kv_format}"]
    if setup.qformat != settings.quant.qformat:
        overrides.append(f"quant={setup.qformat}")
    limits_given = () if limits is None else (name for name in LIMITS_FOR_LOAD if name not in limits.reasons)
    return " ".join([*overrides, *(f"build.{name}={getattr(limits, name)}" for name in limits_given)])
