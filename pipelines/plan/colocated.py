"""Memory of what a plan holds besides its engine: the 16-bit baseline, a draft model or heads, a vision encoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

from pipelines.domain.errors import Fault
from pipelines.domain.formats import QFormat
from pipelines.domain.units import show_bytes
from pipelines.plan.deployment import Deployment
from pipelines.plan.targets import SERVED
from pipelines.predict.performance.limits import engine_sizes, request_tokens
from pipelines.predict.performance.memory import EngineSizes, device_memory, fits
from pipelines.rules.rulebook import check_checkpoint
from pipelines.settings.root import Settings

MORE_RANKS = (2, 4, 8, 16)
DRAFT, HEADS, VISION = "the draft model", "its draft heads", "the vision encoder"


@dataclass(frozen=True, slots=True)
class ColocatedEngine:
    """Another engine on the same GPUs, or heads within the engine.

    Attributes:
        what: its name in messages.
        least: bytes it takes per GPU with one request, certainly.
        usual: bytes with buffers for all requests, which differ between versions of TensorRT-LLM.
    """

    what: str
    least: float
    usual: float


def colocated(d: Deployment) -> list[ColocatedEngine]:
    """List the other users of the served engine's GPUs."""
    settings, facts = d.settings, d.inputs
    if d.target not in SERVED:
        return []
    beside = []
    sizes = draft_sizes(d)
    build, groups, draft_groups = settings.build, settings.triton.gpu_device_ids, settings.triton.draft_gpu_device_ids
    own = groups or (tuple(range(build.tp_size * build.pp_size)),)
    is_apart = draft_groups is not None and not {*chain(*own)} & {*chain(*draft_groups)}
    if sizes is not None and not is_apart:
        one, usual = device_memory(replace(sizes, max_batch_size=1), 0), device_memory(sizes, 0)
        kv = sizes.kv_request_bytes(_tokens(settings, sizes))
        least = one.weights + one.activations + one.buffers + kv
        beside.append(ColocatedEngine(DRAFT, least, usual.weights + usual.activations + usual.buffers + kv))
    if facts.heads_bytes:
        heads = facts.heads_bytes / settings.build.tp_size  # they are linears, which every rank has its part of
        beside.append(ColocatedEngine(HEADS, heads, heads))
    if settings.multimodal.model_type != "none" and facts.vision_bytes:
        extra = (0, 0)
        if (encoder := d.encoder) is not None:
            extra = encoder.activation_bytes(1), encoder.activation_bytes(build.max_batch_size)
        beside.append(ColocatedEngine(VISION, *(facts.vision_bytes + each for each in extra)))
    return beside


def draft_sizes(d: Deployment) -> EngineSizes | None:
    """Return the sizes of the draft model's engine; None without one, or while its shape is unknown."""
    settings, shape, guess = d.settings, d.draft_shape, d.settings.speculative
    if guess.mode != "draft_target" or guess.draft_qformat is None or shape is None:
        return None
    quant = settings.quant.model_copy(update={"qformat": guess.draft_qformat})
    same = guess.draft_qformat == settings.quant.qformat
    kv_cache = settings.kv_cache if same else settings.kv_cache.as_given()  # not the target format's chosen one
    sizes = engine_sizes(settings.model_copy(update={"quant": quant, "kv_cache": kv_cache}), shape)
    if sizes.shape.num_attention_heads % sizes.tp_size:
        return None  # another rule refuses this split
    return replace(sizes, max_seq_len=min(sizes.max_seq_len, shape.max_position_embeddings))


def _tokens(settings: Settings, sizes: EngineSizes) -> int:
    return min(request_tokens(settings) or sizes.max_seq_len, sizes.max_seq_len)


def draft_faults(d: Deployment, total: float, name: str) -> Iterator[Fault]:
    """Check the draft model's engine alone against a GPU of `total` bytes."""
    sizes = draft_sizes(d) if d.target == "build" or d.target in SERVED else None
    if sizes is None or _one_fits(sizes, _tokens(d.settings, sizes), total):
        return
    draft = d.settings.speculative.draft
    assert draft is not None
    yield Fault(
        f"speculative.draft={draft.label} in {sizes.qformat} {_takes(sizes)}; one {name} has {show_bytes(total)} "
        f"(modelled).",
        todo="Choose a smaller draft model.",
    )


def _takes(sizes: EngineSizes) -> str:
    memory = device_memory(replace(sizes, max_batch_size=1), 0)
    return f"needs {show_bytes(memory.weights)} of weights and {show_bytes(memory.activations)} of activations per GPU"


def baseline_faults(d: Deployment, total: float, name: str) -> Iterator[Fault]:
    """Check the 16-bit baseline against a GPU of `total` bytes, and offer settings with which the plan works."""
    if d.unpruned is None or not d.has_baseline:
        return
    sizes = engine_sizes(d.baseline.settings, d.unpruned)
    tokens = _tokens(d.settings, sizes)
    if sizes.shape.num_attention_heads % sizes.tp_size or _one_fits(sizes, tokens, total):
        return
    gpus = d.gpu.gpus_per_server or MORE_RANKS[-1]
    enough = (
        f"eval.baseline_tp_size={ranks}"
        for ranks in MORE_RANKS
        if ranks > sizes.tp_size
        and ranks * sizes.pp_size <= gpus
        and not check_checkpoint(sizes.shape, QFormat.NONE, tp_size=ranks, pp_size=sizes.pp_size)
        and _one_fits(replace(sizes, tp_size=ranks), tokens, total)
    )
    ways = [*islice(enough, 1), "eval.baseline=skip (then no loss of accuracy is stated)"]
    yield Fault(
        f"The 16-bit baseline of {d.settings.model.label} {_takes(sizes)}; one {name} has {show_bytes(total)} "
        f"(modelled).",
        todo=f"Add {', or '.join(ways)}.",
    )


def _one_fits(sizes: EngineSizes, tokens: int, total: float) -> bool:
    return fits(replace(sizes, max_batch_size=1), total, tokens)
