"""Choose the engine of a run, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.engines.description import EngineDescription
from pipelines.engines.registry import OPENVINO, TENSORRT_LLM, describe, why_no_tensorrt_engines, with_setting
from pipelines.host.machine import Machine


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine and the reason for choosing it, for the first line of a run's output."""

    engine: EngineDescription
    reason: str


def choose(wanted: str, machine: Machine) -> EngineChoice:
    """Resolve `engine.name`: `auto` chooses TensorRT-LLM where it can run, otherwise OpenVINO, and gives the reason.

    Raises:
        UserError: the engine does not exist.
    """
    if wanted != "auto":
        return EngineChoice(with_setting(wanted) or describe(wanted), "asked for")
    missing = why_no_tensorrt_engines(machine)
    if not machine.gpus:
        return EngineChoice(OPENVINO, f"engine=auto: no NVIDIA GPU here, {machine.no_gpu_reason}")
    if missing:
        return EngineChoice(OPENVINO, f"engine=auto: {missing}")
    return EngineChoice(TENSORRT_LLM, f"engine=auto: {machine.gpus[0].name} and tensorrt_llm are available")
