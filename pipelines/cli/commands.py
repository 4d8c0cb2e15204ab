"""The commands, each a few lines over plan, run and report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.domain.errors import UserError
from pipelines.host.machine import gather
from pipelines.plan.targets import Target, farthest
from pipelines.settings.compose import compose_config, load, to_raw
from pipelines.settings.root import Settings, validate
from pipelines.settings.sizing import fit_files
from pipelines.store.store import Store

if TYPE_CHECKING:
    from pipelines.plan.plan import Plan
    from pipelines.run.runner import Outcome


@dataclass(frozen=True, slots=True)
class Command:
    """One word of the command line."""

    summary: str
    run: Callable[[Sequence[str]], int]


def _plan_for(settings: Settings, target: Target) -> tuple[Plan, Store]:
    from pipelines.plan.plan import make_plan  # imports every stage, which `size` and `simulate` do not need

    store = Store(settings.paths.store)
    return make_plan(settings, target, store, gather()), store


def _run(target: Target, overrides: Sequence[str]) -> tuple[Plan, Store, list[Outcome]]:
    from pipelines.run.session import run_target

    plan, store = _plan_for(load(overrides), target)
    return plan, store, run_target(plan, store, overrides)


def build(overrides: Sequence[str]) -> int:
    """Model -> engine."""
    _run("build", overrides)
    return 0


def evaluate(overrides: Sequence[str]) -> int:
    """Model -> engine -> accuracy beside the 16-bit baseline."""
    _run("evaluate", overrides)
    return 0


def repository(overrides: Sequence[str]) -> int:
    """Model -> engine -> Triton model repository."""
    _run("repository", overrides)
    return 0


def serve(overrides: Sequence[str]) -> int:
    """Model -> engine -> repository -> tritonserver until it is told to stop."""
    from pipelines.host.screen import ScreenProgress
    from pipelines.serving.foreground import EXAMPLE_PROMPT
    from pipelines.serving.foreground import serve as serve_until_stopped

    settings = load(overrides)
    folder = settings.serving.repository
    if folder is None:
        *_, outcomes = _run("serve", overrides)
        folder = outcomes[-1].artifact.path
    _refuse_unfit(folder)
    bundled = settings.model.bundled and not settings.model.path
    prompt = BUNDLED_PROMPT if bundled else EXAMPLE_PROMPT
    return serve_until_stopped(folder, settings.serving, ScreenProgress(), prompt=prompt)


def _refuse_unfit(folder: Path) -> None:
    """A repository from elsewhere may have been edited, or its engine built by another version or on another GPU."""
    from pipelines.engines.registry import runtime_version
    from pipelines.serving.repository import read_repository
    from triton_repo.check import check_repository

    if not read_repository(folder).gpu:
        faults = check_repository(folder, running_version=runtime_version("openvino"))
    elif not (faults := check_repository(folder)):
        from pipelines.engines.tensorrt_llm.fits import fit_faults
        from triton_repo.parameters import ENGINE_DIR

        faults = fit_faults(folder / ENGINE_DIR)
    if faults:
        raise UserError.of(faults)


def benchmark(overrides: Sequence[str]) -> int:
    """Serve the engine, or take a server that runs elsewhere, and measure it."""
    *_, outcomes = _measured("benchmark", overrides)
    return _code(outcomes)


def run_all(overrides: Sequence[str]) -> int:
    """Everything from the model to the report."""
    from pipelines.report.command import write

    plan, store, outcomes = _measured("all", overrides)
    if (code := _code(outcomes)) != INTERRUPTED:
        variants = dict.fromkeys([plan.settings.baseline().variant, plan.settings.variant])
        write(plan.settings, store, plan.settings.model.label, list(variants))
    return code


BUNDLED_PROMPT = "The river of Githbrel is"
"""Something the bundled models know, for the lines that `serve` prints."""
INTERRUPTED = 130


def _measured(target: Target, overrides: Sequence[str]) -> tuple[Plan, Store, list[Outcome]]:
    from pipelines.store.measurements import recover

    recover(Store(load(overrides).paths.store))
    return _run(target, overrides)


def _code(outcomes: Sequence[Outcome]) -> int:
    """0, 130 for a benchmark that was interrupted, 1 for one that is incomplete for another reason."""
    facts = outcomes[-1].artifact.facts
    if facts["complete"]:
        return 0
    sys.stderr.write(f"error: the benchmark is incomplete: {facts['reason']}. What was measured is kept.\n")
    return INTERRUPTED if "interrupted" in facts["reason"] else 1


def report(overrides: Sequence[str]) -> int:
    """Write the report of a model from what the store holds."""
    from pipelines.report.command import write
    from pipelines.store.measurements import recover

    settings = load(overrides)
    store = Store(settings.paths.store)
    recover(store)
    write(settings, store, settings.model.label, None)
    return 0


def simulate(overrides: Sequence[str]) -> int:
    """Simulate how an engine schedules requests, in ticks or in seconds."""
    from pipelines.predict.simulate.command import simulate as run_simulation

    return run_simulation(overrides)


def plan(overrides: Sequence[str]) -> int:
    """Say what would run, and why; write nothing."""
    from pipelines.run.console import plan_text

    settings = load(overrides)
    made, _ = _plan_for(settings, farthest(settings))
    sys.stdout.write(plan_text(made))
    if made.flavour.name != "openvino" or settings.sizing.fit or any(fit_files(settings.paths.store)):
        from pipelines.plan.speed import modelled_text  # imports numpy, which a plan without a model does not need

        sys.stdout.write(modelled_text(made))
    return 0


def config(overrides: Sequence[str]) -> int:
    """Print the resolved configuration."""
    import yaml

    raw = to_raw(compose_config(overrides))
    validate(raw)
    sys.stdout.write(yaml.safe_dump(raw, sort_keys=False))
    return 0


def calibrate(overrides: Sequence[str]) -> int:
    """Fit the model of this machine or GPU to a benchmark."""
    from pipelines.predict.performance.command import calibrate as run_calibrate

    return run_calibrate(load(overrides), gather())


def sweep(overrides: Sequence[str]) -> int:
    """Evaluate every combination, one table at the end."""
    from pipelines.sweep.command import sweep as run_sweep

    return run_sweep(overrides)


def scripts(overrides: Sequence[str]) -> int:
    """Write scripts that build and serve on a cluster."""
    from pipelines.deploy.cluster import write_scripts

    write_scripts(load(overrides), gather(), overrides)
    return 0


def compare(overrides: Sequence[str]) -> int:
    """Everything for several formats, one table and one report."""
    from pipelines.sweep.command import compare as run_compare

    return run_compare(overrides)


def image(overrides: Sequence[str]) -> int:
    """Build the container image."""
    from pipelines.deploy.containers import build_image

    return build_image(load(overrides), gather())


def manifests(overrides: Sequence[str]) -> int:
    """Write Kubernetes manifests for a finished repository."""
    from pipelines.deploy.manifests import write_manifests

    write_manifests(load(overrides), gather(), overrides)
    return 0


def shell(overrides: Sequence[str]) -> int:
    """A shell in the container image."""
    from pipelines.deploy.containers import open_shell

    return open_shell(load(overrides), gather())


def nightly(overrides: Sequence[str]) -> int:
    """Measure a matrix, compare it with the nights before, and name what got worse."""
    from pipelines.nightly.command import run as run_nightly

    return run_nightly(overrides)


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
    made, _ = _plan_for(settings, "build")
    step = next(step for step in made.steps if step.node.id == "quantize")
    if step.artifact is None:
        raise UserError(
            f"There is no checkpoint of {step.node.label} yet ({step.why}).",
            todo="Make it with the same words after `make build`, or give one: verify.path=/some/checkpoint",
        )
    return step.artifact.path


def size(overrides: Sequence[str]) -> int:
    """Say how many GPUs a load within limits needs."""
    from pipelines.predict.sizing.command import size as run_size

    return run_size(overrides)


def doctor(overrides: Sequence[str]) -> int:
    """Say what this machine has and what will work on it."""
    import json
    import os

    from pipelines.doctor.examine import examine
    from pipelines.doctor.text import render

    settings = load(overrides)
    found = examine(settings, gather(), os.environ)
    text = json.dumps(found.to_json(), indent=2) + "\n" if settings.doctor.format == "json" else render(found)
    sys.stdout.write(text)
    return 1 if found.broken else 0


COMMANDS = {
    "all": Command("everything: engine, accuracy, repository, server, benchmark, report", run_all),
    "build": Command("model -> quantized TensorRT-LLM checkpoint -> engine", build),
    "evaluate": Command("build, then accuracy beside the 16-bit baseline", evaluate),
    "repository": Command("engine -> Triton model repository, a folder that can be copied", repository),
    "serve": Command("tritonserver in the foreground; Ctrl-C drains it", serve),
    "benchmark": Command("serve and measure; benchmark.url=host:8001 for a server elsewhere", benchmark),
    "report": Command("Markdown and one HTML file from what was made and measured", report),
    "compare": Command("formats side by side: compare quant=none,fp8,int4_awq", compare),
    "simulate": Command("static against in-flight batching, in ticks; in seconds: hardware=h100_sxm", simulate),
    "calibrate": Command("fit the model to a benchmark: calibrate sizing.measured=results.json", calibrate),
    "sweep": Command("evaluate several settings: sweep quant=fp8,int4_awq", sweep),
    "nightly": Command("a matrix, its history, and what got worse: nightly nightly=gpu", nightly),
    "size": Command("how many GPUs for which load within which limits: size sizing.average_rate=5", size),
    "doctor": Command("what this machine has, and what will work on it", doctor),
    "plan": Command("what would run, what is cached and why; writes nothing", plan),
    "config": Command("print the resolved configuration", config),
    "verify": Command("read a checkpoint back and check every tensor", verify),
    "image": Command("build the container image; engine=tensorrt_llm or engine=openvino", image),
    "manifests": Command("Kubernetes manifests (Kustomize) for a finished repository", manifests),
    "scripts": Command("build and serve scripts for Slurm or mpirun: scripts cluster=slurm", scripts),
    "shell": Command("a shell in the container image, store and caches shared", shell),
}
