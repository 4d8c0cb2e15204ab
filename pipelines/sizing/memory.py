"""Bytes of weights by format (modelled)."""

from __future__ import annotations

from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.model_shape import ModelShape

GROUP = {QFormat.INT4_AWQ: 128, QFormat.W4A8_AWQ: 128, QFormat.NVFP4: 16}


def weight_bytes(shape: ModelShape, qformat: QFormat) -> float:
    """Bytes of all weights on the device, one rank.

    Linears take the format's bits plus their group scales (16 bit; NVFP4's are 8 bit); embedding, head and norms
    stay at 16 bit. Llama-3-8B at 16 bit: 2 x 8,030,261,248 = 16.06 GB; int4_awq: 6,979,321,856 linear weights
    x (4 + 16/128) bit = 3.60 GB + 2 x 1,050,939,392 = 5.70 GB.
    """
    bits = float(FORMATS[qformat].weight_bits)
    if qformat in GROUP:
        bits += (8 if qformat == QFormat.NVFP4 else 16) / GROUP[qformat]
    return shape.linear_params * bits / 8 + 2 * (shape.num_params - shape.linear_params)


def checkpoint_bytes(shape: ModelShape, qformat: QFormat) -> float:
    """Bytes of the checkpoint on disk: as on the device, but weight-only formats still travel at 16 bit."""
    return weight_bytes(shape, QFormat.NONE if FORMATS[qformat].at_build else qformat)
