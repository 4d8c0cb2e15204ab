"""What a format needs of a model, of a split over GPUs, and of a GPU; everything that is known before calibrating.

The rules about GPUs are in `hardware_rules` and can be had from here.

Each rule is one small function that says its source. Pure arithmetic: no torch, no files.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.domain.errors import Fault
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.hardware_rules import check_hardware, check_kv_features, formats_for, kv_formats_for
from pipelines.domain.model_shape import ModelShape

__all__ = ["check_hardware", "check_kv_features", "check_shape", "check_sparsity", "formats_for", "kv_formats_for"]

_NVFP4_GROUP = 16
_INPUT_SPLIT = ("attention.dense", "mlp.proj")  # tensor parallelism divides these along their input


def check_shape(
    shape: ModelShape,
    qformat: QFormat,
    *,
    group_size: int = 128,
    tp_size: int = 1,
    pp_size: int = 1,
    quantize_lm_head: bool = False,
) -> list[Fault]:
    """Return everything that stops this model from being exported in this format and split.

    Args:
        shape: sizes of the model.
        qformat: weight format.
        group_size: input channels per scale of the AWQ formats; NVFP4 always has 16.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        quantize_lm_head: the output head is quantized as well.
    """
    if tp_size < 1 or pp_size < 1:
        return [Fault(f"tp_size={tp_size}, pp_size={pp_size} is no split.", "Both are at least 1.")]
    return [
        *_family_faults(shape, qformat, pp_size),
        *_split_faults(shape, qformat, tp_size, pp_size),
        *_group_faults(shape, qformat, group_size, tp_size),
        *_head_faults(shape, qformat, quantize_lm_head),
    ]


def check_sparsity(shape: ModelShape, *, method: str = "magnitude", tp_size: int = 1) -> list[Fault]:
    """Return why this model cannot be made 2:4 sparse along the input dimension of its linears.

    Sources: 2:4 means two zeros in every four neighbouring inputs, so a rank's inputs must be whole groups of 4
    (NVIDIA A100 whitepaper, structured sparsity). ModelOpt's magnitude mode leaves a matrix dense, with a warning
    only, unless it has a multiple of 8 outputs and of 16 inputs (`weight_sparsity/magnitude.py`).
    """
    inputs_of, outputs_of = (16, 8) if method == "magnitude" else (4, 1)
    todo = "Leave sparsity off." if tp_size == 1 else "Leave sparsity off, or choose another tp_size."
    faults = [
        Fault(
            f"2:4 sparsity by {method} needs inputs in multiples of {inputs_of}; {name} has {width}"
            + _per_rank(name, tp_size)
            + ".",
            todo=todo,
        )
        for name, width in _rank_inputs(shape, tp_size)
        if width % (inputs_of if tp_size == 1 else 4)
    ]
    kv_rows = shape.num_key_value_heads * shape.head_dim
    rows = {"hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size, "K and V rows": kv_rows}
    return faults + [
        Fault(f"2:4 sparsity by {method} needs outputs in multiples of {outputs_of}; {what} is {count}.", todo=todo)
        for what, count in rows.items()
        if count % outputs_of
    ]


def _family_faults(shape: ModelShape, qformat: QFormat, pp_size: int) -> Iterator[Fault]:
    """Limits of a model family.

    Sources: ModelOpt 0.37 and 0.47 raise NotImplementedError for Gemma 2 unless tensorrt_llm is installed
    (measured); TensorRT-LLM examples/models/core/gemma/convert_checkpoint.py has no pipeline parallelism; its
    legacy precision.md lists no NVFP4 for Gemma.
    """
    if shape.family == "gemma2":
        yield Fault(
            f"{shape.architecture} cannot be exported to a TensorRT-LLM checkpoint: ModelOpt's exporter does not know"
            " Gemma 2.",
            "Exported are GemmaForCausalLM and LlamaForCausalLM.",
            "Choose a Gemma 1 or Llama model, or serve this one unquantized from its Hugging Face folder.",
        )
    if shape.family.startswith("gemma") and pp_size > 1:
        yield Fault(
            f"pp_size={pp_size} does not work with {shape.architecture}: its embedding is also its head, and both"
            " ends of a pipeline would need it.",
            todo="Set pp_size=1 and split with tp_size.",
        )
    if shape.family.startswith("gemma") and qformat is QFormat.NVFP4:
        yield Fault(
            f"quant=nvfp4 is not supported for {shape.architecture} by TensorRT-LLM.",
            "NVFP4 is for Llama.",
            "Choose fp8 or int4_awq.",
        )


def _split_faults(shape: ModelShape, qformat: QFormat, tp_size: int, pp_size: int) -> Iterator[Fault]:
    """Divisibility by the ranks.

    Sources: TensorRT-LLM shards whole heads and equal slices of the MLP; ModelOpt cuts layers into equal stages
    (`postprocess.py`), repeats KV heads when ranks are more than heads, and cannot do so with a scale per channel
    (`layer_utils.build_qkv` raises).
    """
    for what, count in (
        ("num_attention_heads", shape.num_attention_heads),
        ("intermediate_size", shape.intermediate_size),
    ):
        if count % tp_size:
            yield Fault(
                f"tp_size={tp_size} does not divide {what}={count}.",
                f"Divisors: {_divisors(count)}.",
                "Change tp_size.",
            )
    kv_heads = shape.num_key_value_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        yield Fault(
            f"tp_size={tp_size} and num_key_value_heads={kv_heads} do not divide one another.",
            todo="Change tp_size so that ranks get whole KV heads, or whole copies of one.",
        )
    if qformat is QFormat.INT8_SQ and tp_size > kv_heads:
        yield Fault(
            f"quant=int8_sq with tp_size={tp_size} needs copies of the {kv_heads} KV head(s), which ModelOpt cannot"
            " make of weights with one scale per channel.",
            f"tp_size up to {kv_heads} works, and so do other formats.",
            "Lower tp_size or choose another format.",
        )
    if shape.num_hidden_layers % pp_size:
        yield Fault(
            f"pp_size={pp_size} does not divide num_hidden_layers={shape.num_hidden_layers}.",
            f"Divisors: {_divisors(shape.num_hidden_layers)}.",
            "Change pp_size.",
        )


def _group_faults(shape: ModelShape, qformat: QFormat, group_size: int, tp_size: int) -> Iterator[Fault]:
    """Whole groups of inputs in every linear of every rank, and output channels in pairs.

    Sources: ModelOpt `postprocess.check_weight_shape_valid`; INT4 packs two output channels into a byte, NVFP4 two
    inputs (measured exports).
    """
    if not FORMATS[qformat].grouped:
        return
    group = _NVFP4_GROUP if qformat is QFormat.NVFP4 else group_size
    for name, width in _rank_inputs(shape, tp_size):
        if width % group:
            yield Fault(
                f"quant={qformat} has groups of {group} inputs, which do not divide the {width} inputs of {name}"
                + _per_rank(name, tp_size)
                + ".",
                _working_groups(shape, qformat, tp_size),
                "Change group_size or tp_size.",
            )
    if qformat is not QFormat.NVFP4:
        odd = [f"{name} ({rows})" for name, rows in _rank_outputs(shape, tp_size) if rows % 2]
        if odd:
            yield Fault(
                f"quant={qformat} packs two output channels into a byte; odd: {', '.join(odd)}.",
                todo="Choose another format or tp_size.",
            )


def _head_faults(shape: ModelShape, qformat: QFormat, quantize_lm_head: bool) -> Iterator[Fault]:
    """The output head.

    Sources: quantize.py `--quantize_lm_head` works for fp8 only; a tied head is the embedding, which a lookup needs
    in 16 bit (TensorRT-LLM issue 1394).
    """
    if quantize_lm_head and qformat is not QFormat.FP8:
        yield Fault(
            f"quantize_lm_head=true does not work with quant={qformat}.",
            "It works with fp8.",
            "Set quantize_lm_head=false.",
        )
    if quantize_lm_head and shape.tie_word_embeddings:
        yield Fault(
            f"quantize_lm_head=true does not work with {shape.architecture} here: the head is the embedding, which"
            " stays in 16 bit.",
            todo="Set quantize_lm_head=false.",
        )


def _rank_inputs(shape: ModelShape, tp_size: int) -> Iterator[tuple[str, int]]:
    """Yield (linear, inputs of one rank); a split that does not come out even is reported by its own rule."""
    for name, (_, width) in shape.linear_shapes.items():
        yield name, width // tp_size if name in _INPUT_SPLIT and width % tp_size == 0 else width


def _rank_outputs(shape: ModelShape, tp_size: int) -> Iterator[tuple[str, int]]:
    for name, (rows, _) in shape.linear_shapes.items():
        yield name, rows if name in _INPUT_SPLIT else rows // tp_size


def _per_rank(name: str, tp_size: int) -> str:
    return f" per rank (tp_size={tp_size})" if tp_size > 1 and name in _INPUT_SPLIT else ""


def _working_groups(shape: ModelShape, qformat: QFormat, tp_size: int) -> str:
    if qformat is QFormat.NVFP4:
        return "NVFP4 always has groups of 16."
    widths = [width for _, width in _rank_inputs(shape, tp_size)]
    works = [group for group in (128, 64, 32, 16) if not any(width % group for width in widths)]
    return f"Works here: group_size={'/'.join(map(str, works))}." if works else "No usual group size works here."


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, min(count, 64) + 1) if count % n == 0)
