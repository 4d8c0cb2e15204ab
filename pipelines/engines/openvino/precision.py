"""In which types the CPU plugin computes on this processor; nothing here imports OpenVINO."""

from __future__ import annotations

from pipelines.engines.config import OpenVinoSettings
from pipelines.engines.openvino.memory import Precision
from pipelines.host.machine import has_amx, has_vnni, native_bf16


def inference_precision(options: OpenVinoSettings) -> Precision:
    """Return the configured type, or what this processor computes natively."""
    if options.inference_precision != "auto":
        return options.inference_precision
    return "bf16" if native_bf16() else "f32"


def rounds_activations(options: OpenVinoSettings) -> bool:
    """Return whether the plugin rounds activations to INT8 here, where it is asked to.

    It does so with VNNI, and with activations that reach a linear in float32: with AMX they reach it in bf16 if that is
    the inference precision (useDynamicQuantizationImpl in OpenVINO's dnnl_fullyconnected_primitive.cpp). On such a
    processor logits were the same bits with and without it.
    """
    return has_vnni() and not (has_amx() and inference_precision(options) == "bf16")


def unheard(options: OpenVinoSettings) -> str:
    """Say that a number for `dynamic_quantization` has no effect on this processor; empty if it has."""
    asked = options.dynamic_quantization
    if asked in ("auto", "off") or rounds_activations(options):
        return ""
    why = "it has AMX and computes in bf16" if has_vnni() else "it has no VNNI"
    return f"engine.openvino.dynamic_quantization={asked} has no effect on this processor: {why}."
