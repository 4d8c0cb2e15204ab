"""Which engine a run takes, and why."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.engines.description import EngineDescription
from pipelines.engines.registry import OPENVINO, TENSORRT_LLM, describe, why_no_tensorrt_engines, with_setting
from pipelines.host.machine import Machine


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and why this one, for the first line of a run."""

    engine: EngineDescription
    reason: str


def choose(wanted: str, machine: Machine) -> EngineChoice:
    """Resolve `engine.name`: `auto` takes TensorRT-LLM where it can run, else OpenVINO, and says so.

    Raises:
        UserError: there is no such engine.
    """
    if wanted != "auto":
        return EngineChoice(with_setting(wanted) or describe(wanted), "asked for")
    missing = why_no_tensorrt_engines(machine)
    if not machine.gpus:
        return EngineChoice(OPENVINO, f"engine=auto: no NVIDIA GPU here, {machine.no_gpu_reason}")
    if missing:
        return EngineChoice(OPENVINO, f"engine=auto: {missing}")
    return EngineChoice(TENSORRT_LLM, f"engine=auto: {machine.gpus[0].name} and tensorrt_llm are here")
