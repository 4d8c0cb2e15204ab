"""Costs of a plan besides GPUs: bytes to download and to store, and rough times from published logs."""

from pipelines.domain.formats import QFormat
from pipelines.domain.units import show_bytes
from pipelines.host.screen import wrapped
from pipelines.plan.plan import Plan, PlannedStep
from pipelines.predict.performance.memory import checkpoint_bytes, weight_bytes
from pipelines.stages.build import Build
from pipelines.stages.compress import PruneModel, Recover, Sparsify
from pipelines.stages.download import Download
from pipelines.stages.quantize import Quantize
from pipelines.stages.script import Script

BUILD_MINUTES = 2
"""Build of one rank, rounded up. Source: NVIDIA's log of trtllm-build in `examples/models/core/commandr/README.md` of
TensorRT-LLM (Command-R, 35e9 parameters at 16 bit on one GPU, 2024-09-19): 00:01:47; the smaller model of
`examples/models/core/gpt/README.md`: 00:00:41."""
BUILD_PARAMETERS = 35e9
"""Parameters of the largest rank with a published time."""


def needs(plan: Plan) -> list[str]:
    """Render what is downloaded and stored, and rough times; no lines where none of it is known or needed."""
    todo = [step for step in plan.steps if step.state != "cached"]
    lines = [line for line in (_download(plan, todo), _disk(plan, todo), _time(plan, todo)) if line]
    return [wrapped(line, 8) for line in lines]


def _download(plan: Plan, todo: list[PlannedStep]) -> str:
    """Say how much is downloaded: models as the Hub lists them, or at 16 bit; of a data set it is not known."""
    sized, listed, unknown = 0.0, 0, []
    for step in todo:
        if isinstance(stage := step.node.stage, Download):
            _, size = _stored(plan, step)
            if stage.repo_id in plan.deployment.inputs.hub_bytes:
                listed += plan.deployment.inputs.hub_bytes[stage.repo_id]
            else:
                sized += size or 0.0
                unknown += [] if size else [stage.repo_id]
    parts = [f"about {show_bytes(sized)} (modelled, weights at 16 bit)"] if sized else []
    parts += [f"{show_bytes(listed)} (weights, as the Hub lists them)"] if listed else []
    parts += [f"{name} (size unknown)" for name in unknown]
    return f"download: {' and '.join(parts)}" if parts else ""


def _disk(plan: Plan, todo: list[PlannedStep]) -> str:
    """Say how much disk the finished stages take; a Triton repository is made of hard links."""
    if not plan.deployment.engine.needs_gpu:
        return ""
    sizes: dict[str, float] = {}
    for step in todo:
        kind, size = _stored(plan, step)
        if size:
            sizes[kind] = sizes.get(kind, 0.0) + size
    if not sizes:
        return ""
    parts = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in sizes.items())
    return f"disk: about {show_bytes(sum(sizes.values()))} (modelled: {parts})"


def _stored(plan: Plan, step: PlannedStep) -> tuple[str, float | None]:
    """Return what a step writes and its modelled size; None where there is no model, or nothing large is written."""
    stage, draft = step.node.stage, "draft" in step.node.id.split(".")
    d = plan.deployment
    shape = d.draft_shape if draft else d.shape
    if shape is not None and (step.node.id.startswith(("baseline.", "reference.")) or isinstance(stage, Download)):
        shape = shape.unpruned
    if shape is None or step.node.id == "vision" or (isinstance(stage, Download) and stage.repo_type != "model"):
        return "", None
    sixteen = weight_bytes(shape, QFormat.NONE)
    match stage:
        case Download():
            return "downloads", d.inputs.hub_bytes.get(stage.repo_id, sixteen)
        case PruneModel():
            return "pruned models", sixteen
        case Sparsify():
            return "sparse models", sixteen
        case Recover():
            return "recovered models", sixteen
        case Script():
            return "checkpoints", sixteen
        case Quantize():
            return "checkpoints", checkpoint_bytes(shape, stage.quant.qformat, stage.quant.mean_bits)
        case Build():
            return "engines", weight_bytes(shape, *_format(plan, step))
        case _:
            return "", None


def _format(plan: Plan, step: PlannedStep) -> tuple[QFormat, float | None]:
    """Return format and bits of the checkpoint that an engine is built from; trained heads come with 16 bit."""
    before = next((s.node.stage for s in plan.steps if s.node.id == step.node.inputs.get("checkpoint")), None)
    return (before.quant.qformat, before.quant.mean_bits) if isinstance(before, Quantize) else (QFormat.NONE, None)


def _time(plan: Plan, todo: list[PlannedStep]) -> str:
    """Estimate the builds' time if a published log covers such ranks; name steps of unknown duration."""
    builds = [step for step in todo if isinstance(step.node.stage, Build)]
    if not plan.deployment.engine.needs_gpu or plan.deployment.shape is None:
        return ""
    if not builds:
        return "time: unknown" if any(isinstance(step.node.stage, Quantize) for step in todo) else ""
    ranks = plan.settings.build.tp_size * plan.settings.build.pp_size
    rounds = -(-ranks // plan.settings.build.workers)
    if plan.deployment.shape.num_params / ranks > BUILD_PARAMETERS:
        return "time: unknown; no build of a rank this large is published"
    minutes = BUILD_MINUTES * rounds
    return (
        f"time: each trtllm-build roughly {minutes} minutes (NVIDIA's log of a 35B model on one GPU: 1 min 47 s"
        f"{f'; {rounds} rounds of ranks' if rounds > 1 else ''}); the other stages: unknown"
    )
