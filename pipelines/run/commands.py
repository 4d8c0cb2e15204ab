"""The commands that run a plan, show it, or read what it made."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.domain.errors import UserError, refuse
from pipelines.engines.registry import runtime_version
from pipelines.engines.tensorrt_llm.folder import fit_faults
from pipelines.host.disk import check_folders
from pipelines.host.files import link_to
from pipelines.host.machine import gather
from pipelines.host.screen import ScreenProgress, complain, say, warn
from pipelines.plan.plan import Plan, make_plan
from pipelines.plan.targets import Target, farthest
from pipelines.predict.config import fit_files
from pipelines.run.console import plan_text
from pipelines.run.runner import StepOutcome
from pipelines.run.session import FinishedRun, run_target
from pipelines.serving.locate import why_no_key
from pipelines.serving.ports import port_faults
from pipelines.serving.repository import read_repository
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.stages.benchmark import trtllm_serve
from pipelines.store.leases import in_use
from pipelines.store.manifest import MANIFEST, read_manifest
from pipelines.store.space import remember_link
from pipelines.store.store import Artifact, Store
from triton_repo.parameters import ENGINE_DIR

BUNDLED_PROMPT = "The river of Githbrel is"
"""A prompt that the bundled models can continue, for the example lines that `serve` prints."""
INTERRUPTED = 130
OF_A_REPOSITORY = ("serving", "paths.", "benchmark.slo", "config=")
"""Beginnings of the words that matter where a repository is served as it is."""


def planned(settings: Settings, target: Target | None = None, only: str | None = None) -> tuple[Plan, Store]:
    """Plan how to reach a target; without one, `plan.target` or the farthest this engine can reach here."""
    target = target or settings.plan.target or farthest(settings)
    store = Store(settings.paths.store)
    return make_plan(settings, target, store, gather(), only), store


def run_to(target: Target, overrides: Sequence[str]) -> tuple[Plan, Store, FinishedRun]:
    """Compose, plan and run."""
    plan, store = planned(load(overrides), target)
    return plan, store, run_target(plan, store, overrides)


def build(overrides: Sequence[str]) -> int:
    """Build an engine from a model."""
    run_to("build", overrides)
    return 0


def repository(overrides: Sequence[str]) -> int:
    """Build an engine and write its Triton model repository."""
    run_to("repository", overrides)
    return 0


def evaluate(overrides: Sequence[str]) -> int:
    """Build an engine and evaluate it beside the 16-bit baseline."""
    *_, ran = run_to("evaluate", overrides)
    return ran.exit_code


def fidelity(overrides: Sequence[str]) -> int:
    """Build an engine and compare its predictions with those of the 16-bit model."""
    run_to("fidelity", overrides)
    return 0


ACCUSED = 3
"""Exit code of `diagnose` when a stage is accused."""


def diagnose(overrides: Sequence[str]) -> int:
    """Compare every stage of a deployment with the one before it, and name the first that differs."""
    *_, ran = run_to("diagnose", overrides)
    return ACCUSED if ran.outcomes[-1].artifact.facts["accused"] else 0


def serve(overrides: Sequence[str]) -> int:
    """Build an engine and its repository, and run tritonserver on it until Ctrl-C or SIGTERM."""
    from pipelines.serving import foreground  # with the server's processes

    settings = load(overrides)
    if unused := settings.serving.unused:
        warn(unused)
    folder = settings.serving.repository
    if folder is None:
        *_, ran = run_to("serve", overrides)
        folder = ran.outcomes[-1].artifact.path
    else:
        if not folder.is_dir():
            raise UserError(f"serving.repository='{folder}' does not exist.", todo="Write one: make repository")
        without_effect = [word for word in overrides if not word.lstrip("+~").startswith(OF_A_REPOSITORY)]
        if without_effect:
            warn(f"serving.repository='{folder}' is served as it is; no effect on it: {' '.join(without_effect)}")
        # before its bytes are read
        refuse([*filter(None, [why_no_key(settings.serving)]), *port_faults(settings.serving)])
        if (folder / MANIFEST).is_file():  # a copy has it too; without one its bytes are not known
            store, place = Store(settings.paths.store), folder.absolute()
            store.check(Artifact(place, read_manifest(place)))
            store.hashes.save()
    _refuse_unfit(folder, by_triton=settings.serving.server == "tritonserver")
    bundled = settings.model.bundled and not settings.model.path
    prompt = BUNDLED_PROMPT if bundled else foreground.EXAMPLE_PROMPT
    with in_use(folder):
        if settings.serving.server == "trtllm_serve":
            logs = settings.paths.runs.absolute()
            server = trtllm_serve(folder, settings.serving, logs, ScreenProgress(), usual_ports=True)
            return foreground.serve_llm_api(server, prompt)
        slo = settings.benchmark.slo.to_slo()
        return foreground.serve(folder, settings.serving, ScreenProgress(), prompt=prompt, slo=slo)


def _refuse_unfit(folder: Path, *, by_triton: bool) -> None:
    """Refuse a repository that was edited, or whose engine was built by another version or on another GPU."""
    from triton_repo.check import check_repository

    if read_repository(folder).gpu:
        refuse(check_repository(folder, to_be_served=by_triton) or fit_faults(folder / ENGINE_DIR))
    else:
        refuse(check_repository(folder, running_version=runtime_version, to_be_served=by_triton))


def benchmark(overrides: Sequence[str]) -> int:
    """Benchmark the engine, or a server that is already running."""
    *_, ran = run_to("benchmark", overrides)
    return _code(ran.outcomes)


def run_all(overrides: Sequence[str]) -> int:
    """Run everything from the model to the report."""
    from pipelines.report.report_command import write

    plan, store, ran = run_to("all", overrides)
    if (code := _code(ran.outcomes)) != INTERRUPTED:
        write(plan.settings, store, plan.settings.model.label, variants_of(plan))
    return code or ran.exit_code


def variants_of(plan: Plan) -> list[str]:
    """Return the formats that a run evaluates or compares, the 16-bit baseline first."""
    baseline = [plan.settings.baseline().variant.label] if plan.deployment.has_baseline else []
    return [*baseline, plan.settings.variant.label]


def _code(outcomes: Sequence[StepOutcome]) -> int:
    """Return 0, 130 for an interrupted benchmark, or 1 for one that is incomplete for another reason."""
    facts = outcomes[-1].artifact.facts
    if facts["complete"]:
        return 0
    kept = "What was measured is kept." if facts["levels"] else "No load was measured."
    complain(f"the benchmark is incomplete: {facts['reason']}. {kept}")
    return INTERRUPTED if was_interrupted(outcomes) else 1


def was_interrupted(outcomes: Sequence[StepOutcome]) -> bool:
    """Return whether Ctrl-C ended the benchmark that these end with."""
    facts = outcomes[-1].artifact.facts
    return not facts["complete"] and "interrupted" in facts["reason"]


def plan(overrides: Sequence[str]) -> int:
    """Show what would run, and why; write nothing."""
    sys.stdout.write(planned_text(planned(load(overrides))[0], overrides))
    return 0


def planned_text(made: Plan, overrides: Sequence[str]) -> str:
    """Render a plan for a terminal, with the speed that is modelled for it."""
    settings, text = made.settings, plan_text(made, overrides)
    if made.deployment.engine.needs_gpu or settings.sizing.fit or any(fit_files(settings.paths.store)):
        from pipelines.plan.speed import modelled_text  # imports numpy, which a plan without a model does not need

        text += modelled_text(made)
    return text


def stage(overrides: Sequence[str]) -> int:
    """Run one stage of the plan with what it needs, and put a link to its result where it is asked for."""
    settings = load(overrides)
    name, link = settings.stage.name, settings.stage.link
    if name is None:
        raise UserError(
            "stage.name is not set.",
            allowed="It is the name of a stage as `make plan` lists it, with the same overrides.",
            todo="Give one: stage.name=quantize",
        )
    if link is not None:
        if link.exists() and not link.is_symlink():
            raise UserError(f"stage.link='{link}' already exists and is not a link.", todo="Give another name.")
        check_folders({"stage.link": link.parent})
    plan, store = planned(settings, only=name)
    ran = run_target(plan, store, overrides)
    if link is not None:
        remember_link(store, link)
        link_to(ran.outcomes[-1].artifact.path, link)
        say(f"{name}: {link}")
    return ran.exit_code
