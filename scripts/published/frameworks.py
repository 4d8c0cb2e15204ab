"""Inference frameworks by name and version, as published measurements name them."""

import re

from pipelines.domain.errors import UserError
from pipelines.predict.performance.performance import Framework

KNOWN = "TensorRT-LLM <version>, vLLM <version>, SGLang <version>, NIM <version>"


def framework_named(text: str) -> Framework:
    """Parse "TensorRT-LLM 1.0", "vLLM (version not stated)", "NIM 1.8.0", "TensorRT-LLM (MLPerf harness)".

    Raises:
        UserError: the framework is not known.
    """
    name = " ".join(text.split())
    lower = name.lower()
    if lower.startswith(("tensorrt-llm", "tensorrt_llm", "trtllm", "trt-llm")):
        version = re.search(r"(\d+)\.(\d+)", lower)
        family = "trtllm-torch"
        if "mlperf" in lower:
            family = "trtllm-mlperf"
        elif version and int(version[1]) == 0:
            family = "trtllm-static" if int(version[2]) < 10 else "trtllm-cpp"
        torch = family == "trtllm-torch"
        # 1.0 and 1.1 gather and scatter (pull requests 8675 and 8950 of NVIDIA/TensorRT-LLM)
        all_to_all = bool(torch and version and (int(version[1]), int(version[2])) >= (1, 2))
        engine = "pytorch" if torch else "tensorrt"
        return Framework(name, family, engine, "GUARANTEED_NO_EVICT", True, torch, all_to_all)
    if lower.startswith("nim"):
        return Framework(name, "nim", "tensorrt", "GUARANTEED_NO_EVICT", True)
    for prefix, family in (("vllm/hf", "vllm-2023"), ("vllm", "vllm"), ("sglang", "sglang")):
        if lower.startswith(prefix):
            version = re.search(r"(\d+)\.(\d+)", lower)
            # vLLM schedules asynchronously by default since 0.14.0, SGLang overlaps its scheduler since 0.4
            new = {"vllm": (0, 14), "sglang": (0, 4)}.get(family)
            ahead = bool(new and version and (int(version[1]), int(version[2])) >= new)
            return Framework(name, family, "pytorch", "MAX_UTILIZATION", False, ahead)
    raise UserError(f"The framework '{text}' is not known.", allowed=f"Known: {KNOWN}.")
