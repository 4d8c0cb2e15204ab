"""Apply the plan's rules to sizing and simulation, so that neither recommends a configuration that a plan refuses."""

from dataclasses import replace
from functools import cache

from pipelines.domain.errors import refuse
from pipelines.domain.families import FAMILIES
from pipelines.domain.rotary import Rotary
from pipelines.engines.tensorrt_llm.config import LIMITS_FOR_LOAD
from pipelines.host.machine import Machine
from pipelines.plan import serving_checks
from pipelines.plan.deployment import Deployment
from pipelines.plan.user_inputs import UserInputs
from pipelines.predict.performance.limits import ChosenLimits
from pipelines.predict.performance.models import engine_of
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
        plain = Deployment(settings, "serve", engine_of(settings, setup.model), machine, inputs(), setup.model, limits)
        candidate = plain.changed(_changes(settings, setup, limits)).tuned.limited
        if setup.model.architecture not in FAMILIES:  # no rule knows other families
            candidate = replace(candidate, shape=None)
        facts = replace(candidate.facts, label=setup.model.name)
        refuse(refused(check(facts)) + serving_checks.check(candidate))

    return judge


def _changes(settings: Settings, setup: Setup, limits: ChosenLimits | None) -> str:
    """Return the candidate as overrides; limits that were chosen are no overrides, as in a plan."""
    overrides = [f"build.tp_size={setup.tp}", f"build.pp_size={setup.pp}", f"kv_cache.dtype={setup.kv_format}"]
    if setup.qformat != settings.quant.qformat:
        overrides.append(f"quant={setup.qformat}")
    limits_given = () if limits is None else (name for name in LIMITS_FOR_LOAD if name not in limits.reasons)
    return " ".join([*overrides, *(f"build.{name}={getattr(limits, name)}" for name in limits_given)])
