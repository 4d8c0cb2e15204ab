"""The commands, each a few lines over plan, run and report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.artifacts import Store
from pipelines.compose import compose_config, to_raw
from pipelines.composed import raw_config, remember
from pipelines.domain.errors import UserError
from pipelines.machine import gather
from pipelines.plan import Plan, Target, make_plan
from pipelines.settings import Settings, validate


@dataclass(frozen=True, slots=True)
class Command:
    """One word of the command line."""

    summary: str
    run: Callable[[Sequence[str]], int]


def load(overrides: Sequence[str]) -> Settings:
    """Overrides -> judged settings."""
    return validate(raw_config(overrides))


def _plan_for(settings: Settings, target: Target) -> tuple[Plan, Store]:
    store = Store(settings.paths.store)
    return make_plan(settings, target, store, gather()), store


def _run(target: Target, overrides: Sequence[str]) -> int:
    from pipelines.session import run_target

    raw = raw_config(overrides)
    plan, store = _plan_for(validate(raw), target)
    run_target(plan, store, overrides)
    remember(overrides, raw)
    return 0


def build(overrides: Sequence[str]) -> int:
    """Model -> engine."""
    return _run("build", overrides)


def evaluate(overrides: Sequence[str]) -> int:
    """Model -> engine -> accuracy beside the 16-bit baseline."""
    return _run("evaluate", overrides)


def plan(overrides: Sequence[str]) -> int:
    """Say what would run, and why; write nothing."""
    from pipelines.report.console import plan_text

    made, _ = _plan_for(load(overrides), "evaluate")
    sys.stdout.write(plan_text(made))
    return 0


def config(overrides: Sequence[str]) -> int:
    """Print the resolved configuration."""
    import yaml

    raw = to_raw(compose_config(overrides))
    validate(raw)
    sys.stdout.write(yaml.safe_dump(raw, sort_keys=False))
    return 0


def sweep(overrides: Sequence[str]) -> int:
    """Evaluate every combination, one table at the end."""
    from pipelines.sweep import sweep as run_sweep

    return run_sweep(overrides)


def verify(overrides: Sequence[str]) -> int:
    """Read a checkpoint back and check it against the format's rules."""
    from pipelines.checkpoint.describe import describe, render
    from pipelines.checkpoint.verify import verify as check

    folder = _checkpoint_folder(overrides)
    if faults := check(folder):
        raise UserError.of(faults)
    sys.stdout.write(f"{folder}\n{render(describe(folder))}\nverified: no fault found\n")
    return 0


def _checkpoint_folder(overrides: Sequence[str]) -> Path:
    settings = load(overrides)
    if settings.verify.path is not None:
        return settings.verify.path.expanduser().absolute()
    made = make_plan(settings, "build", Store(settings.paths.store), gather())
    step = next(step for step in made.steps if step.node.id == "quantize")
    if step.artifact is None:
        raise UserError(
            f"There is no checkpoint of {step.node.label} yet ({step.why}).",
            todo="Make it with the same words after `make build`, or give one: verify.path=/some/checkpoint",
        )
    return step.artifact.path


COMMANDS = {
    "build": Command("model -> quantized TensorRT-LLM checkpoint -> engine", build),
    "evaluate": Command("build, then accuracy beside the 16-bit baseline", evaluate),
    "sweep": Command("evaluate several settings: sweep quant=fp8,int4_awq", sweep),
    "plan": Command("what would run, what is cached and why; writes nothing", plan),
    "config": Command("print the resolved configuration", config),
    "verify": Command("read a checkpoint back and check every tensor", verify),
}
