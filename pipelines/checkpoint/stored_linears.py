"""The tensors of quantized Hugging Face folders, judged by their headers: which a linear has, types and shapes.

A declaration can be missing or wrong; types that only quantized weights have cannot.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.checkpoint.declarations import WHOLE_ROW, packing_of, stored_group
from pipelines.checkpoint.tensors import KEEP_ONE, TensorInfo, stored_tensors
from pipelines.checkpoint.unified import linear_shapes
from pipelines.domain.errors import Fault
from pipelines.domain.model_shape import ModelShape, holds_mxfp4

_FLOATS = ("F16", "BF16", "F32")
_TODO = "Give the original model."
_ALWAYS_FLOAT = ("model.embed_tokens", "lm_head", "model.norm")
_OTHER_FORMS = {
    "_blocks": "",
    ".weight_packed": ".weight",
    ".qweight": ".weight",
    ".k_proj.k_scale": ".k_scale",
    ".v_proj.v_scale": ".v_scale",
}
"""End of a tensor's name -> that of the same tensor in another form."""
_QUANTIZED = ("U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "U16", "I32", "U32")
_BUFFERS = ("position_ids", "masked_bias", "attn.bias", "num_batches_tracked", "causal_mask")
"""Ends of names whose values are whole numbers in folders of models in 16 bit as well."""
_MAKERS = {
    "_data": "optimum-quanto",
    "biases": "MLX",
    "trellis": "ExLlamaV3",
    "q_weight": "ExLlamaV2",
    "qweight": "AutoGPTQ or AutoAWQ",
    "SCB": "bitsandbytes",
    "absmax": "bitsandbytes",
    "_weight_qdata": "torchao",
    "weight_packed": "compressed-tensors",
    "_blocks": "an MXFP4 library",
    "codebooks": "AQLM",
    "W_q": "HQQ",
    "weight_scale_inv": "an FP8 library",
}
"""End of a tensor's name -> who writes such ones."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of a linear: its names, of which it has one, types, and its shape [rows, columns] where it is one."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shape: tuple[int, int] | None = None
    needed: bool = True


def _leaves(packing: str, out: int, width: int, group: int) -> list[_Leaf]:
    """Return the tensors of a linear of `out` x `width`, whose groups have `group` inputs."""
    groups = width // group
    bias = _Leaf(("bias",), _FLOATS, needed=False)
    cache = [_Leaf((name,), _FLOATS, needed=False) for name in ("k_scale", "v_scale")]
    if packing in ("gptq", "gptq_v2"):
        return [
            _Leaf(("qweight",), ("I32",), (width // 8, out)),
            _Leaf(("qzeros",), ("I32",), (groups, out // 8)),
            _Leaf(("scales",), _FLOATS, (groups, out)),
            _Leaf(("g_idx",), ("I32",), needed=False),
            bias,
        ]
    if packing == "awq":
        return [
            _Leaf(("qweight",), ("I32",), (width, out // 8)),
            _Leaf(("qzeros",), ("I32",), (groups, out // 8)),
            _Leaf(("scales",), _FLOATS, (groups, out)),
            bias,
        ]
    if packing == "pack-quantized":
        return [
            _Leaf(("weight_packed",), ("I32",), (out, width // 8)),
            _Leaf(("weight_scale",), _FLOATS, (out, groups)),
            _Leaf(("weight_shape",), ("I32", "I64"), needed=False),
            _Leaf(("weight_zero_point",), ("I32",), (out // 8, groups), needed=False),
            bias,
        ]
    if packing == "nvfp4-pack-quantized":
        return [
            _Leaf(("weight_packed",), ("U8",), (out, width // 2)),
            _Leaf(("weight_scale",), ("F8_E4M3",), (out, width // 16)),
            _Leaf(("weight_global_scale",), ("F32",)),
            _Leaf(("input_global_scale",), ("F32",)),
            *cache,
            bias,
        ]
    return [
        _Leaf(("weight",), ("I8",) if packing == "int-quantized" else ("F8_E4M3",), (out, width)),
        _Leaf(("weight_scale", "weight_scale_inv"), _FLOATS),
        _Leaf(("input_scale", "activation_scale"), _FLOATS),
        *cache,
        bias,
    ]


def _headers(folder: Path) -> dict[str, TensorInfo]:
    return {name: file.header[name] for name, (file, _) in stored_tensors(folder).items()}


def stored_faults(
    what: str, folder: Path, config: Mapping[str, Any], block: Mapping[str, Any], group_size: int | None
) -> Iterator[Fault]:
    """Yield the first tensor that a folder has, or lacks, against what it declares; ModelOpt's are judged when read."""
    headers = _headers(folder)
    if not headers:
        return
    yield from _outside(what, headers)
    yield from _doubled_faults(what, headers)
    packing = packing_of(block)
    if packing == "modelopt":
        return
    shape = ModelShape.from_hf_config(config, str(folder / "config.json"))
    by_linear: dict[str, dict[str, TensorInfo]] = {}
    for name, info in headers.items():
        stem, _, leaf = name.rpartition(".")
        by_linear.setdefault(stem, {})[leaf] = info
    for layer in range(shape.num_hidden_layers):
        for linear, (out, width) in linear_shapes(shape).items():
            name, size = f"model.layers.{layer}.{linear}", stored_group(block)
            leaves = _leaves(packing, out, width, width if size in (None, WHOLE_ROW) else size)
            tensors = by_linear.get(name, {})
            fault = _linear_fault(what, name, tensors, leaves)
            if fault is None and group_size is not None and width % group_size:
                fault = Fault(f"{what}; '{name}' has {width} inputs, no multiple of {group_size}.", todo=_TODO)
            if fault is not None:
                yield fault
                return


def _linear_fault(what: str, name: str, tensors: Mapping[str, TensorInfo], leaves: list[_Leaf]) -> Fault | None:
    for leaf in leaves:
        here = [each for each in leaf.names if each in tensors]
        if not here and leaf.needed:
            also = f" It has {', '.join(sorted(tensors))}." if tensors else ""
            return Fault(f"{what}, but lacks the tensor '{name}.{leaf.names[0]}'.{also}", todo=_TODO)
        if len(here) > 1:
            return _doubled(what, *(f"{name}.{each}" for each in here))
        for each in here:
            info = tensors[each]
            if info.dtype not in leaf.dtypes:
                can = f"It can be {', '.join(leaf.dtypes)}."
                return Fault(f"{what}, but '{name}.{each}' is {info.dtype}.", can, _TODO)
            if leaf.shape and info.shape != leaf.shape:
                can = f"By config.json it is {list(leaf.shape)}."
                return Fault(f"{what}, but '{name}.{each}' has the shape {list(info.shape)}.", can, _TODO)
    names = {each for leaf in leaves for each in leaf.names}
    if unknown := sorted(tensors.keys() - names):
        return Fault(f"{what} and has '{name}.{unknown[0]}'.", f"Known: {', '.join(sorted(names))}.", _TODO)
    return None


def _outside(what: str, headers: Mapping[str, TensorInfo]) -> Iterator[Fault]:
    """Yield an embedding, head or norm that is not in 16 bit; the head would be taken for the embedding."""
    for name, info in sorted(headers.items()):
        stem, _, leaf = name.rpartition(".")
        if stem in _ALWAYS_FLOAT and (leaf not in ("weight", "bias") or info.dtype not in _FLOATS):
            can = "Embedding, head and norms must be in 16 bit."
            yield Fault(f"{what}, with '{name}' of type {info.dtype}.", can, _TODO)
            return


def _doubled(what: str, one: str, other: str) -> Fault:
    can = "It can have one of them."
    return Fault(f"{what} and has '{one}' and '{other}', two forms of one tensor.", can, KEEP_ONE)


def _doubled_faults(what: str, headers: Mapping[str, TensorInfo]) -> Iterator[Fault]:
    """Yield the first weight that is there packed and not packed, or scale of a KV cache that is there twice."""
    for name in sorted(headers):
        for end, other in _OTHER_FORMS.items():
            if name.endswith(end) and (plain := name.removesuffix(end) + other) in headers:
                yield _doubled(what, plain, name)
                return


def sixteen_bit_faults(what: str, folder: Path, config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the first tensor that is wrong in a folder that does not say that it is quantized, or is gpt-oss in MXFP4.

    It has a quantized type, or another form beside it.
    """
    headers = _headers(folder)
    if holds_mxfp4(config):
        yield from _doubled_faults(f"{what} is in MXFP4", headers)
        return
    for name, info in sorted(headers.items()):
        if info.dtype in _QUANTIZED and not name.endswith(_BUFFERS):
            yield Fault(
                f"{what} holds '{name}' of type {info.dtype}, and nothing says how it is quantized{_maker(headers)}.",
                "Its config.json lacks quantization_config.",
                _TODO,
            )
            return


def _maker(names: Mapping[str, Any]) -> str:
    makers = [maker for end, maker in _MAKERS.items() if any(name.endswith(end) for name in names)]
    return f"; such tensors are written by {makers[0]}" if makers else ""
