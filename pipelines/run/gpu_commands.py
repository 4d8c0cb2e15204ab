"""The exact commands that build and serve a TensorRT engine, for `make plan`."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import fields

from pipelines.engines.port import BuildLimits
from pipelines.engines.tensorrt_llm.command import PROGRAM, BuildPaths, command
from pipelines.engines.tensorrt_llm.folder import BuiltOn
from pipelines.host.paths import relative_to_cwd
from pipelines.host.screen import width, wrapped
from pipelines.plan.plan import Plan, PlannedStep
from pipelines.stages.build import Build
from pipelines.stages.repository import WriteRepository
from pipelines.stages.script import Script
from pipelines.store.store import KEY_LENGTH
from triton_repo.spec import RepositorySpec
from triton_repo.start import start_commands

INDENT = " " * 4


def gpu_commands(plan: Plan) -> list[str]:
    """Render the commands; no lines for engines of another builder, or when nothing is left to build or serve."""
    if plan.choice.engine.builder != PROGRAM:
        return []
    todo = [step for step in plan.steps if not step.artifact]
    blocks = [_script(plan, step) for step in todo if isinstance(step.node.stage, Script)]
    blocks += [_build(plan, step) for step in todo if isinstance(step.node.stage, Build)]
    blocks += [_serve(plan, stage) for step in plan.steps if isinstance(stage := step.node.stage, WriteRepository)]
    if not blocks:
        return []
    head = "Commands"
    if plan.not_here:
        head += f" (not run here: {plan.not_here[0].message.partition(': ')[2].rstrip('.')})"
    head = wrapped(head + ":", 0)
    return ["", head, *("\n".join(block) for block in blocks)]


def _build(plan: Plan, step: PlannedStep) -> list[str]:
    """Render trtllm-build with one option per line."""
    stage = step.node.stage
    assert isinstance(stage, Build)
    values = stage.build.model_dump(include={field.name for field in fields(BuildLimits)})
    if values["max_seq_len"] is None and stage.longest is not None:
        values["max_seq_len"] = stage.longest
    inputs = step.node.inputs
    before = next(s for s in plan.steps if s.node.id == inputs.get("checkpoint", inputs.get("converted")))
    places = BuildPaths(_place(plan, before), _place(plan, step), *_timing(plan, stage))
    parts = command(stage.build, BuildLimits(**values), places)
    return _shown(step, parts)


def _script(plan: Plan, step: PlannedStep) -> list[str]:
    """Render one of TensorRT-LLM's own scripts."""
    stage = step.node.stage
    assert isinstance(stage, Script)
    places = {}
    for name, given in step.node.inputs.items():
        before = [s for s in plan.steps if s.node.id == given]
        places[name] = _place(plan, before[0]) if before else str(getattr(given, "path", given))
    return _shown(step, stage.command(places, _place(plan, step)))


def _shown(step: PlannedStep, parts: Sequence[Sequence[str]]) -> list[str]:
    """Render a command with one option per line."""
    lines = [" ".join(part if "*" in part else shlex.quote(part) for part in option) for option in parts]
    first, *middle, last = lines
    return [
        f"  {step.node.id}",
        f"{INDENT}{first} \\",
        *(f"{INDENT}  {line} \\" for line in middle),
        f"{INDENT}  {last}",
    ]


def _timing(plan: Plan, stage: Build) -> tuple[str | None, str]:
    """Return the timing cache to start from, if there is one, and where the new one is kept."""
    assert stage.on_gpu is not None
    caches = relative_to_cwd(stage.on_gpu.timing_caches)
    if not plan.machine.gpus:
        return None, f"{caches}/*.cache"
    name = BuiltOn.here(stage.on_gpu.gpu, stage.on_gpu.sm or 0.0).file_name
    cache = f"{caches}/{name}.cache"
    return (cache if (stage.on_gpu.timing_caches / f"{name}.cache").is_file() else None), cache


def _place(plan: Plan, step: PlannedStep) -> str:
    """Return the folder of a step's artifact, as far as it is known before the step has a key."""
    if step.artifact:
        return relative_to_cwd(step.artifact.path)
    key = step.key[:KEY_LENGTH] if step.key else "*"
    store = relative_to_cwd(plan.settings.paths.store.absolute())
    return f"{store}/{step.node.stage.name}/{step.node.label}-{key}"


def _serve(plan: Plan, stage: WriteRepository) -> list[str]:
    """Render the command that starts tritonserver, as `make serve` uses it."""
    spec = RepositorySpec(stage.flavour, stage.model, stage.variant, tp_size=stage.tp_size, pp_size=stage.pp_size)
    line = next(iter(start_commands(plan.settings.triton, spec)["commands"].values()))
    pieces = line.replace(" : -n 1 ", " : \n-n 1 ").split("\n")
    shown = []
    for number, piece in enumerate(pieces):
        first = INDENT + ("  " if number else "")
        wrapped = textwrap.wrap(
            piece, width() - 2, initial_indent=first, subsequent_indent=f"{INDENT}    ", break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        shown += wrapped
    return ["  serve, inside the repository", *(f"{row} \\" for row in shown[:-1]), shown[-1]]
