"""Memory besides the engine's: of other engines on its GPUs, and of this machine for what is made before the engine."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Self

from pipelines.compress.specs import QuantSpec
from pipelines.domain.errors import Fault
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.plan.deployment import Deployment
from pipelines.plan.targets import SERVED
from pipelines.predict.performance.limits import engine_sizes, request_tokens
from pipelines.predict.performance.memory import EngineSizes, checkpoint_bytes, device_memory, fits, weight_bytes
from pipelines.rules.rulebook import check_checkpoint
from pipelines.settings.root import Settings

# Other users of the engine's GPUs: the 16-bit baseline, a draft model or heads, a vision encoder.

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


LINEAR_COPIES = 4
"""Bytes of the largest linear in 16 bit that copying a checkpoint holds at most, as a multiple of them (measured)."""
COPYING_BYTES = GIB / 2
"""What copying holds beside: PyTorch and pieces of the embedding."""
LAYER_COPIES = 7
"""Bytes of a layer in 16 bit that compressing holds at most, as a multiple of them (measured for quantizing)."""


def check(d: Deployment) -> list[Fault]:
    """Check host memory of everything before the engine."""
    return check_compressing(d) + _reference(d)


def check_compressing(d: Deployment) -> list[Fault]:
    """Check host memory of quantizing and sparsifying."""
    if d.shape is None:
        return []
    faults = []
    quantizing = Quantizing.of(d, d.shape)
    if quantizing.bytes > d.machine.memory_bytes:
        faults.append(_too_large(d, quantizing.bytes, quantizing.doing, quantizing.held))
    method = d.settings.sparsity.method
    if method != "none" and (needed := sparsify_memory_bytes(d.shape, method)) > d.machine.memory_bytes:
        faults.append(_too_large(d, needed, "sparsifying", "one layer at a time"))
    return faults


def _too_large(d: Deployment, needed: float, doing: str, what: str) -> Fault:
    return Fault(
        f"{d.settings.model.label} needs about {show_bytes(needed)} of memory while {doing} ({what}; modelled); "
        f"this machine has {show_bytes(d.machine.memory_bytes)}.",
        todo=f"Use a smaller model, or a machine with more memory for {doing}.",
    )


def _reference(d: Deployment) -> list[Fault]:
    """Check the memory of the model in float32, which the engine is compared with."""
    shape, machine = d.shape, d.machine
    if shape is None or not d.has_reference:
        return []
    needed, where, held = 2 * weight_bytes(shape.unpruned, QFormat.NONE) + 2 * GIB, "this machine", machine.memory_bytes
    if d.device == "cuda" and machine.gpus[0].memory_bytes < held:
        where, held = f"one {machine.gpus[0].name}", machine.gpus[0].memory_bytes
    if needed <= held:
        return []
    return [
        Fault(
            f"eval.baseline=hugging_face evaluates {d.settings.model.label} in float32, which takes about "
            f"{show_bytes(needed)} (modelled); {where} has {show_bytes(held)}.",
            todo="Use eval.baseline=build, or evaluate on a larger machine.",
        )
    ]


def one_layer_bytes(shape: ModelShape) -> float:
    """Return the host memory of compressing layer by layer in bytes: a layer and its copies, and the libraries.

    Modelled on `scripts/measure_streaming.py`; see docs/benchmarks.md for what was measured.
    """
    return LAYER_COPIES * 2 * shape.linear_params / shape.num_hidden_layers + GIB


@dataclass(frozen=True, slots=True)
class Quantizing:
    """The host memory of quantizing."""

    bytes: float
    doing: str
    held: str

    @classmethod
    def of(cls, d: Deployment, shape: ModelShape) -> Self:
        """Return what a deployment's model needs: held as a whole to search a mix, and for a mixture of experts."""
        quant = d.settings.quant
        spec = QuantSpec(quant.of(quant.qformat), d.settings.kv_cache.dtype)
        # in 16 bit the checkpoint is the model's tensors under other names; the LLM API reads the model
        if d.imports or spec.sixteen_bit or (spec.by_tensor and d.engine.writes_engine):
            # of a mixture, up and gate of all experts are one tensor
            inner = shape.intermediate_size * (2 * shape.num_experts if shape.num_experts > 1 else 1)
            widest = max(shape.hidden_size, shape.num_attention_heads * shape.head_dim, inner)
            needed = LINEAR_COPIES * 2.0 * shape.hidden_size * widest + COPYING_BYTES
            return cls(needed, "writing the checkpoint", "one tensor at a time")
        if quant.mean_bits is not None or shape.num_experts > 1:
            written = checkpoint_bytes(shape, quant.qformat, quant.mean_bits)  # beside the model
            return cls(weight_bytes(shape, QFormat.NONE) + written + 2 * GIB, "quantizing", "the whole model")
        return cls(one_layer_bytes(shape), "quantizing", "one layer at a time")

    @property
    def note(self) -> str:
        """The line of the plan."""
        return f"{self.doing} needs about {show_bytes(self.bytes)} of memory, {self.held} (modelled)"


def sparsify_memory_bytes(shape: ModelShape, method: str) -> float:
    """Return the host memory of sparsifying in bytes (modelled).

    SparseGPT also holds a float32 Hessian for each input of the layer's linears, and three copies of the largest.
    """
    if method != "sparsegpt":
        return one_layer_bytes(shape)
    heads = shape.num_attention_heads * shape.head_dim
    squares = [4.0 * width**2 for width in (shape.hidden_size, heads, shape.hidden_size, shape.intermediate_size)]
    return one_layer_bytes(shape) + sum(squares) + 3 * max(squares)
