"""What the tensors of INT4 folders of other libraries mean.

Shape legend: O output channels, I input channels, G groups of input channels. Eight values of 4 bits share an int32.

- AutoGPTQ 0.7.1 and GPTQModel 7.7 (`nn_modules/qlinear`): qweight [I/8, O], neighbouring inputs in a value, the first
  in the lowest bits; qzeros [G, O/8] likewise; scales [G, O]; g_idx int32 [I], the group of each input.
- AutoAWQ 0.2.9 (`modules/linear/gemm.py`): qweight [I, O/8], qzeros [G, O/8] and scales [G, O]; neighbouring outputs in
  a value, in the order 0, 2, 4, 6, 1, 3, 5, 7.
- compressed-tensors 0.20 (`compressors/pack_quantized`): weight_packed [O, I/8] of codes from -8 to 7, stored plus 8,
  the first in the lowest bits; weight_scale [O, G]; weight_zero_point [O/8, G], stored plus 8, if not symmetric.

A weight is (code - zero point) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.domain.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ZEROS_LESS_ONE = {"gptq": True, "gptq_v2": False}
"""`checkpoint_format` of GPTQ -> whether zero points are stored less one; AutoGPTQ, which names no format, does."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SYMMETRIC = 8


@dataclass(frozen=True, slots=True)
class GivenLinear:
    """A linear as a TensorRT-LLM checkpoint has it.

    Attributes:
        codes: int8 [O, I], -8 to 7.
        scales: float32 [O, G].
        points: zero points, [O, G]; 8 is symmetric.
    """

    codes: Array
    scales: Array
    points: Array


def decode(tensors: Mapping[str, Array], name: str, block: Mapping[str, Any]) -> GivenLinear:
    """Return a linear of a folder.

    Args:
        tensors: of the folder.
        name: of the linear, e.g. "model.layers.0.mlp.up_proj".
        block: `quantization_config`.

    Raises:
        UserError: a tensor is missing, or its shape does not go with the others'.
    """
    find = _Leaves(tensors, name)
    method = block.get("quant_method")
    found = (
        _awq(find) if method == "awq" else _compressed(find) if method == "compressed-tensors" else _gptq(find, block)
    )
    (out, inputs), groups = found.codes.shape, found.scales.shape
    if found.points.shape != groups or groups[0] != out or inputs % groups[1]:
        raise UserError(
            f"The tensors of '{name}' do not go together: {out} x {inputs} weights, scales {list(groups)}, zero points"
            f" {list(found.points.shape)}.",
            todo="Download the model again.",
        )
    return found


class _Leaves:
    """The tensors of one linear."""

    def __init__(self, tensors: Mapping[str, Array], name: str) -> None:
        self._tensors, self._name = tensors, name

    def __contains__(self, leaf: str) -> bool:
        return f"{self._name}.{leaf}" in self._tensors

    def __getitem__(self, leaf: str) -> Array:
        if leaf not in self:
            raise UserError(f"The folder lacks the tensor '{self._name}.{leaf}'.", todo="Download the model again.")
        return self._tensors[f"{self._name}.{leaf}"]


def _gptq(find: _Leaves, block: Mapping[str, Any]) -> GivenLinear:
    codes = _nibbles(find["qweight"].T)
    points = _nibbles(find["qzeros"])  # [G, O]
    if ZEROS_LESS_ONE[block.get("checkpoint_format") or "gptq"]:
        points = (points + 1) & 15  # AutoGPTQ's kernels wrap 16 to 0 as well
    return _linear(codes, find["scales"].T, points.T)


def _awq(find: _Leaves) -> GivenLinear:
    codes, points = (_in_order(_nibbles(find[leaf])) for leaf in ("qweight", "qzeros"))
    return _linear(codes.T, find["scales"].T, points.T)


def _compressed(find: _Leaves) -> GivenLinear:
    import numpy as np

    codes, scales = _nibbles(find["weight_packed"]), find["weight_scale"]
    if "weight_zero_point" in find:
        points = _nibbles(find["weight_zero_point"].T).T
    else:
        points = np.full(scales.shape, SYMMETRIC, np.uint8)
    return _linear(codes, scales, points)


def _linear(codes: Array, scales: Array, points: Array) -> GivenLinear:
    import numpy as np

    signed = np.ascontiguousarray(codes).astype(np.int8) - np.int8(SYMMETRIC)
    return GivenLinear(signed, np.ascontiguousarray(scales.astype(np.float32)), points)


def _nibbles(packed: Array) -> Array:
    """Unpack int32 [R, C] to eight values each, the first from the lowest bits: uint8 [R, 8 C]."""
    import numpy as np

    words = np.ascontiguousarray(packed).view(np.uint32)[..., None]
    found: Array = ((words >> np.arange(0, 32, 4, dtype=np.uint32)) & 15).astype(np.uint8)
    return found.reshape(packed.shape[0], -1)


def _in_order(values: Array) -> Array:
    """Put values as AutoAWQ packs them, eight by eight, in the order of outputs."""
    import numpy as np

    eights = values.reshape(len(values), -1, 8)
    found: Array = eights[..., np.argsort(_AWQ_ORDER)].reshape(values.shape)
    return found
