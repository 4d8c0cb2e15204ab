"""Engine flavours as planning sees them: which one runs here, and why. Imports no engine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from pipelines.machine import Machine
from triton_repo.spec import FlavourName


@dataclass(frozen=True, slots=True)
class Flavour:
    """One engine flavour.

    Attributes:
        name: of the repository it is served from, and in `pipelines.engines.registry` where this version builds it.
        reason: why this one, for the first line of a run.
        build_libraries: distributions whose version decides the engine's bytes.
        run_libraries: distributions whose version decides what it answers.
        packages: what must be importable; TensorRT-LLM is looked for by `why_not_here`.
    """

    name: FlavourName
    reason: str
    build_libraries: tuple[str, ...]
    run_libraries: tuple[str, ...]
    packages: tuple[str, ...]


def choose(wanted: str, machine: Machine) -> Flavour:
    """Resolve `engine.name`: `auto` takes TensorRT-LLM where it can run, else OpenVINO, and says so."""
    if wanted == "tensorrt_llm_llmapi":
        return Flavour("llmapi", "asked for", (), ("tensorrt-llm",), ("tensorrt_llm",))
    if wanted == "tensorrt_llm" or (wanted == "auto" and machine.gpus and machine.has_tensorrt_llm):
        reason = "asked for" if wanted != "auto" else f"engine=auto: {machine.gpus[0].name} and tensorrt_llm are here"
        libraries = ("tensorrt-llm", "tensorrt")
        return Flavour("tensorrt_llm", reason, libraries, libraries, ())
    if wanted == "openvino":
        reason = "asked for"
    elif not machine.gpus:
        reason = f"engine=auto: no NVIDIA GPU here, {machine.no_gpu_reason}"
    else:
        reason = "engine=auto: the Python package tensorrt_llm is not installed"
    return Flavour("openvino", reason, ("openvino",), ("openvino", "openvino-genai"), ("openvino", "openvino_genai"))


def why_not_here(machine: Machine) -> list[str]:
    """What this machine lacks to build a TensorRT engine and to run it; empty where it lacks nothing.

    Source: TensorRT-LLM `commands/build.py`: trtllm-build uses at least one CUDA GPU.
    """
    lacks = []
    if not machine.gpus:
        lacks.append(f"there is no NVIDIA GPU ({machine.no_gpu_reason})")
    if shutil.which("trtllm-build") is None:
        lacks.append("trtllm-build is not on PATH")
    if not machine.has_tensorrt_llm:
        lacks.append("the Python package tensorrt_llm is not installed")
    return lacks
