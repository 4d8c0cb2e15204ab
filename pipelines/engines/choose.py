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


def choose(wanted: str, machine: Machine, hardware: str = "auto") -> EngineChoice:
    """Resolve `engine.name`: `auto` chooses TensorRT-LLM where it can run, otherwise OpenVINO, and gives the reason.

    Args:
        wanted: value of `engine=`.
        machine: facts of this machine.
        hardware: value of `hardware=`; a GPU by name is planned for with TensorRT-LLM, wherever that is.

    Raises:
        UserError: the engine does not exist.
    """
    if wanted != "auto":
        return EngineChoice(with_setting(wanted) or describe(wanted), "asked for")
    missing = why_no_tensorrt_engines(machine)
    if hardware != "auto" and (missing or not machine.gpus):
        return EngineChoice(
            TENSORRT_LLM, f"engine=auto: planned for hardware={hardware}; engine=openvino plans for this machine's CPU"
        )
    if not machine.gpus:
        return EngineChoice(OPENVINO, f"engine=auto: no NVIDIA GPU here, {machine.no_gpu_reason}")
    if missing:
        return EngineChoice(OPENVINO, f"engine=auto: {missing}")
    return EngineChoice(TENSORRT_LLM, f"engine=auto: {machine.gpus[0].name} and tensorrt_llm are available")
