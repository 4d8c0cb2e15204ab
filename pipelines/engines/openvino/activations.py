"""Quantize the activation of a quantized matrix product, with the checkpoint's scales.

Each format follows ModelOpt's fake quantization and the TensorRT-LLM kernel:
    FP8, W4A8   round to E4M3 after dividing by activation_scaling_factor
    INT8 SQ     256 levels of activation_scaling_factor
    NVFP4       blocks of 16: an E4M3 block scale under the tensor's scale, then E2M1
    W4A16 ...   nothing
AWQ, W4A8 and SmoothQuant multiply by prequant_scaling_factor first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.domain.formats import FLOAT_WEIGHTS, Activation
from pipelines.engines.openvino.rounding import to_fp8, to_int8, to_nvfp4
from pipelines.engines.openvino.weights import WeightStore


def quantized_input(store: WeightStore, module: str, x: ov.Node) -> ov.Node:
    """Return the activation as the matrix product of `module` receives it.

    Args:
        store: the weights of the checkpoint.
        module: the linear layer that uses it, e.g. "transformer.layers.0.mlp.fc".
        x: float32 [..., I].
    """
    form = store.checkpoint.config.format_of(module)
    if form.weights is FLOAT_WEIGHTS:
        return x
    prequant = f"{module}.prequant_scaling_factor"
    if prequant in store.checkpoint:
        x = op.multiply(x, op.constant(store.float32(prequant)))
    quantize = _QUANTIZERS.get(form.activation)
    return quantize(x, store.scalar(f"{module}.activation_scaling_factor")) if quantize else x


def same_input(store: WeightStore, first: str, second: str) -> bool:
    """Return whether two linear layers with the same activation also share every activation scale."""
    names = [
        (f"{first}.{leaf}", f"{second}.{leaf}") for leaf in ("prequant_scaling_factor", "activation_scaling_factor")
    ]
    for a, b in names:
        if (a in store.checkpoint) != (b in store.checkpoint):
            return False
        if a in store.checkpoint and not np.array_equal(store.float32(a), store.float32(b)):
            return False
    return True


_QUANTIZERS: dict[Activation, Callable[[ov.Node, np.float32], ov.Node]] = {
    "fp8": to_fp8,
    "int8": to_int8,
    "fp4": to_nvfp4,
}
