"""Engine flavours as planning sees them: which one runs here, and why. Imports no engine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from pipelines.host.machine import Machine, library_versions
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
    missing = _why_no_tensorrt_llm(machine)
    if wanted == "tensorrt_llm" or (wanted == "auto" and machine.gpus and not missing):
        reason = "asked for" if wanted != "auto" else f"engine=auto: {machine.gpus[0].name} and tensorrt_llm are here"
        libraries = ("tensorrt-llm", "tensorrt")
        return Flavour("tensorrt_llm", reason, libraries, libraries, ())
    if wanted == "openvino":
        reason = "asked for"
    elif not machine.gpus:
        reason = f"engine=auto: no NVIDIA GPU here, {machine.no_gpu_reason}"
    else:
        reason = f"engine=auto: {missing}"
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
    if missing := _why_no_tensorrt_llm(machine):
        lacks.append(missing)
    return lacks


def _why_no_tensorrt_llm(machine: Machine) -> str:
    """Why the package is of no use for engines; empty where it is.

    Source: TensorRT-LLM `docs/source/legacy/tensorrt-backend-removal.md`: 1.2 is the last line that has engines.
    """
    if not machine.has_tensorrt_llm:
        return "the Python package tensorrt_llm is not installed"
    version = library_versions(("tensorrt-llm",))["tensorrt-llm"]
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return f"tensorrt_llm {version} has no TensorRT engines any more, 1.2 has" if numbers >= [1, 3] else ""
