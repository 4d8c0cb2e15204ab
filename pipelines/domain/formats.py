"""Quantization formats: ONE table says what each is called, holds and needs.

Sources: TensorRT-LLM 1.2 `quantization/mode.py`, `builder.py`, support matrix; ModelOpt 0.37/0.47 exports.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class QFormat(StrEnum):
    """Our names, the same as TensorRT-LLM's `quantize.py --qformat` where both exist."""

    NONE = "none"
    FP8 = "fp8"
    INT8_SQ = "int8_sq"
    INT4_AWQ = "int4_awq"
    W4A8_AWQ = "w4a8_awq"
    INT8_WO = "int8_wo"
    INT4_WO = "int4_wo"
    NVFP4 = "nvfp4"


class KvFormat(StrEnum):
    """Element type of the KV cache; `auto` is the model's own 16-bit type."""

    AUTO = "auto"
    FP8 = "fp8"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """What one quantization format is.

    Attributes:
        quant_algo: `quantization.quant_algo` in a TensorRT-LLM checkpoint; None is 16 bit.
        weight_bits: bits per weight of a quantized linear, scales not counted.
        activation: what the matrix product is fed: "16bit", "fp8", "int8", "fp4".
        calibrated: whether ModelOpt needs calibration data.
        grouped: weights have one scale per group of input channels.
        at_build: float weights travel in the checkpoint; the engine build quantizes them.
        summary: one line for people.
    """

    quant_algo: str | None
    weight_bits: int
    activation: str
    calibrated: bool
    grouped: bool
    at_build: bool
    summary: str


FORMATS: dict[QFormat, FormatSpec] = {
    QFormat.NONE: FormatSpec(None, 16, "16bit", False, False, False, "16-bit weights and activations"),
    QFormat.FP8: FormatSpec("FP8", 8, "fp8", True, False, False, "FP8 (E4M3) weights and activations, per tensor"),
    QFormat.INT8_SQ: FormatSpec(
        "W8A8_SQ_PER_CHANNEL", 8, "int8", True, False, False, "INT8 weights and activations with SmoothQuant"
    ),
    QFormat.INT4_AWQ: FormatSpec("W4A16_AWQ", 4, "16bit", True, True, False, "INT4 weights in groups, AWQ"),
    QFormat.W4A8_AWQ: FormatSpec(
        "W4A8_AWQ", 4, "fp8", True, True, False, "INT4 weights in groups with AWQ, FP8 activations"
    ),
    QFormat.INT8_WO: FormatSpec("W8A16", 8, "16bit", False, False, True, "INT8 weights, one scale per output channel"),
    QFormat.INT4_WO: FormatSpec("W4A16", 4, "16bit", False, False, True, "INT4 weights, one scale per output channel"),
    QFormat.NVFP4: FormatSpec("NVFP4", 4, "fp4", True, True, False, "FP4 (E2M1) weights and activations, groups of 16"),
}

BY_QUANT_ALGO: dict[str | None, QFormat] = {spec.quant_algo: name for name, spec in FORMATS.items()}
"""The same table, read from a checkpoint's `quant_algo`."""


INTEGER = (QFormat.INT8_SQ, QFormat.INT4_AWQ, QFormat.W4A8_AWQ, QFormat.INT8_WO, QFormat.INT4_WO)
"""Formats with INT8 or INT4 weights."""


def lacks_fp8(qformat: QFormat, capability: float) -> bool:
    """Whether a GPU of this compute capability has no FP8 arithmetic for the format."""
    return FORMATS[qformat].activation == "fp8" and 8.0 <= capability < 8.9


def lacks_fp4(qformat: QFormat, capability: float) -> bool:
    """Whether it has no FP4 arithmetic for the format."""
    return FORMATS[qformat].activation == "fp4" and 8.0 <= capability < 10.0


def lacks_integers(qformat: QFormat, capability: float) -> bool:
    """Whether TensorRT-LLM's builder has no INT8 and INT4 kernels for the format there."""
    return qformat in INTEGER and 10.0 <= capability < 12.0


def lacks_fp8_kv(kv_format: KvFormat, capability: float) -> bool:
    """Whether it cannot convert a KV cache to FP8."""
    return kv_format is KvFormat.FP8 and 8.0 <= capability < 8.9


def lacks_int8_kv(kv_format: KvFormat, capability: float) -> bool:
    """Whether TensorRT-LLM's builder refuses an INT8 KV cache there."""
    return kv_format is KvFormat.INT8 and 10.0 <= capability < 12.0


def formats_for(capability: float) -> list[QFormat]:
    """The weight formats whose engines can be built for a compute capability of 8.0 or newer."""
    lacks = (lacks_fp8, lacks_fp4, lacks_integers)
    return [qformat for qformat in QFormat if not any(lack(qformat, capability) for lack in lacks)]


def kv_formats_for(capability: float) -> list[KvFormat]:
    """The KV-cache formats whose engines can be built for a compute capability of 8.0 or newer."""
    lacks = (lacks_fp8_kv, lacks_int8_kv)
    return [kv_format for kv_format in KvFormat if not any(lack(kv_format, capability) for lack in lacks)]
