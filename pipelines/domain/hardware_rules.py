"""What a format needs of a GPU, and what a KV-cache format takes away, in TensorRT-LLM 1.2's engine builder.

Each rule is one small function that says its source. Pure: no torch, no look at this machine.
"""

from __future__ import annotations

from pipelines.domain.errors import Fault
from pipelines.domain.formats import FORMATS, KvFormat, QFormat


def check_hardware(qformat: QFormat, kv_format: KvFormat, sm: float, family: str) -> list[Fault]:
    """Return what TensorRT-LLM 1.2's engine builder refuses on a GPU, each with what works there instead.

    Sources: `tensorrt_llm/builder.py`, `plugin/plugin.py`, legacy support-matrix.md and precision.md.

    Args:
        qformat: weight format.
        kv_format: KV-cache format.
        sm: compute capability, e.g. 8.6, 8.9, 9.0, 10.0, 12.0.
        family: "gemma", "gemma2" or "llama".
    """
    if sm < 8.0:
        return [
            Fault(
                f"Compute capability {sm} is too old for TensorRT-LLM 1.2.",
                "It takes 8.0 (A100) and newer.",
                "Choose another GPU, or engine=openvino.",
            )
        ]
    faults = []
    if reason := _format_fault(qformat, sm, family):
        faults.append(Fault(f"quant={qformat} {reason}.", _list("quant", formats_for(sm, family), sm)))
    if reason := _kv_fault(kv_format, sm):
        faults.append(Fault(f"kv_cache={kv_format} {reason}.", _list("kv_cache", kv_formats_for(sm), sm)))
    return faults


def formats_for(sm: float, family: str) -> list[QFormat]:
    """Return the weight formats whose engines can be built for a compute capability (8.0 or newer)."""
    return [qformat for qformat in QFormat if not _format_fault(qformat, sm, family)]


def kv_formats_for(sm: float) -> list[KvFormat]:
    """Return the KV-cache formats whose engines can be built for a compute capability (8.0 or newer)."""
    return [kv_format for kv_format in KvFormat if not _kv_fault(kv_format, sm)]


def _format_fault(qformat: QFormat, sm: float, family: str) -> str:
    """Return why a weight format does not work, or an empty string.

    Sources: builder.py raises for INT8 and INT4 weight paths when 100 <= SM < 120; FP8 tensor cores start with
    SM 8.9 (support-matrix.md); FP4 with SM 10.0, for Llama (precision.md).
    """
    spec = FORMATS[qformat]
    if spec.activation == "fp8" and sm < 8.9:
        return f"needs FP8 arithmetic (compute capability 8.9 or newer), this GPU has {sm}"
    if spec.activation == "fp4" and sm < 10.0:
        return f"needs FP4 arithmetic (compute capability 10.0 or newer), this GPU has {sm}"
    if spec.activation == "fp4" and family.startswith("gemma"):
        return f"is not supported for the family '{family}' by TensorRT-LLM"
    int_weights = qformat not in (QFormat.NONE, QFormat.FP8, QFormat.NVFP4)
    if int_weights and 10.0 <= sm < 12.0:
        return f"is refused by TensorRT-LLM's builder on compute capability {sm} (no INT8 and INT4 kernels)"
    return ""


def _kv_fault(kv_format: KvFormat, sm: float) -> str:
    """Return why a KV-cache format does not work, or an empty string. Source: builder.py, support-matrix.md."""
    if kv_format is KvFormat.FP8 and sm < 8.9:
        return f"needs FP8 conversion (compute capability 8.9 or newer), this GPU has {sm}"
    if kv_format is KvFormat.INT8 and 10.0 <= sm < 12.0:
        return f"is refused by TensorRT-LLM's builder on compute capability {sm}"
    return ""


def check_kv_features(
    qformat: QFormat, kv_format: KvFormat, *, kv_reuse: bool = False, chunked_context: bool = False
) -> list[Fault]:
    """Return which wanted features a KV-cache format takes away.

    Both features need paged context FMHA. TensorRT-LLM's builder (`builder.py`) switches it off, without an error,
    for an INT8 KV cache, and for an FP8 one unless the context attention itself runs in FP8, which it does for
    the formats with FP8 or FP4 activations only.

    Args:
        qformat: weight format.
        kv_format: KV-cache format.
        kv_reuse: blocks of a shared prefix are to be reused.
        chunked_context: long prompts are to be processed in pieces.
    """
    if kv_format is KvFormat.AUTO or (kv_format is KvFormat.FP8 and fp8_context_attention(qformat)):
        return []
    asked = (
        ("KV-cache reuse", kv_reuse, "kv_cache.enable_block_reuse=false"),
        ("chunked context", chunked_context, "runtime.enable_chunked_context=false"),
    )
    wanted = [name for name, on, _ in asked if on]
    if not wanted:
        return []
    without = " ".join(off for _, on, off in asked if on)
    with_fp8 = "kv_cache=fp8" if fp8_context_attention(qformat) else f"kv_cache=fp8 with quant={_fp8_attention_list()}"
    return [
        Fault(
            f"kv_cache={kv_format} with quant={qformat} takes away {' and '.join(wanted)}: TensorRT-LLM's builder"
            " switches paged context attention off.",
            f"They work with kv_cache=auto, or {with_fp8}.",
            f"Change kv_cache, or do without: {without}",
        )
    ]


def fp8_context_attention(qformat: QFormat) -> bool:
    """Return whether the context attention of an engine in this format can run in FP8 (SM 8.9 and newer)."""
    return FORMATS[qformat].activation in ("fp8", "fp4")


def _fp8_attention_list() -> str:
    return "/".join(qformat for qformat in QFormat if fp8_context_attention(qformat))


def _list(key: str, names: list[QFormat] | list[KvFormat], sm: float) -> str:
    return f"On compute capability {sm}: {key}={', '.join(names)}."
