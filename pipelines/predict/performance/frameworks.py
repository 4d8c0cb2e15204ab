"""Inference frameworks by name and version: which ones share scheduling and costs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipelines.domain.errors import UserError
from pipelines.predict.simulator.interface import Admission


@dataclass(frozen=True, slots=True)
class Framework:
    """One version of one framework.

    Attributes:
        name: as given, e.g. "TensorRT-LLM 0.12.0".
        family: group of versions with the same costs; a label of the parameters.
        engine: "tensorrt" or "pytorch", which several families share.
        admission: how requests get KV blocks.
        kv_follows: whether the KV cache is 8 bit when the weights are FP8 or FP4.
        chunked: whether prompts are processed in chunks beside decoding requests.
    """

    name: str
    family: str
    engine: str
    admission: Admission
    kv_follows: bool
    chunked: bool

    @property
    def is_tensorrt_llm(self) -> bool:
        """Whether this is TensorRT-LLM, including inside NIM."""
        return self.family.startswith(("trtllm", "nim"))


KNOWN = "TensorRT-LLM <version>, vLLM <version>, SGLang <version>, NIM <version>"


def framework_named(text: str) -> Framework:
    """Parse "TensorRT-LLM 1.0", "vLLM (version not stated)", "NIM 1.8.0", "TensorRT-LLM (MLPerf harness)".

    Raises:
        UserError: the framework is not known.
    """
    name = " ".join(text.split())
    lower = name.lower()
    if lower.startswith(("tensorrt-llm", "tensorrt_llm", "trtllm", "trt-llm")):
        family = _tensorrt_llm(lower)
        engine = "pytorch" if family == "trtllm-torch" else "tensorrt"
        return Framework(name, family, engine, "GUARANTEED_NO_EVICT", True, family == "trtllm-torch")
    if lower.startswith("nim"):
        return Framework(name, "nim", "tensorrt", "GUARANTEED_NO_EVICT", True, False)
    if lower.startswith("vllm/hf"):
        return Framework(name, "vllm-2023", "pytorch", "MAX_UTILIZATION", False, False)
    if lower.startswith("vllm"):
        return Framework(name, "vllm", "pytorch", "MAX_UTILIZATION", False, True)
    if lower.startswith("sglang"):
        return Framework(name, "sglang", "pytorch", "MAX_UTILIZATION", False, True)
    raise UserError(f"The framework '{text}' is not known.", allowed=f"Known: {KNOWN}.")


def _tensorrt_llm(lower: str) -> str:
    if "mlperf" in lower:
        return "trtllm-mlperf"
    version = re.search(r"(\d+)\.(\d+)", lower)
    if version is None:
        return "trtllm-torch"
    major, minor = int(version[1]), int(version[2])
    if major >= 1:
        return "trtllm-torch"
    return "trtllm-static" if minor < 10 else "trtllm-cpp"
