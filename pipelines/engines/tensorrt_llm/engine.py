"""The engine `tensorrt_llm`, as a `port.Engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.engines.port import BuildLimits, EngineFacts, OnGpu, Session
from pipelines.settings.build import BuildSettings


class TensorRtEngine:
    """TensorRT engines; implements `port.Engine`."""

    name = "tensorrt_llm"

    def __init__(self, build: BuildSettings | None = None, on_gpu: OnGpu | None = None) -> None:
        """Take trtllm-build's options and this machine's GPU, which are required to build but not to open."""
        self._build, self._on_gpu = build or BuildSettings(), on_gpu

    def build(self, checkpoint: Path, limits: BuildLimits, out_dir: Path, progress: Progress) -> EngineFacts:
        """Build every rank with trtllm-build; see `build.build_engine`.

        Raises:
            UserError: see there; or this machine has no GPU.
        """
        from pipelines.engines.tensorrt_llm.build import build_engine

        if self._on_gpu is None or self._on_gpu.sm is None:
            raise UserError("engine=tensorrt_llm builds for a GPU, and this machine has none.")
        return build_engine(checkpoint, self._build, limits, out_dir, self._on_gpu, progress)

    def open(self, engine_dir: Path) -> Session:
        """Load an engine with TensorRT-LLM's own runtime.

        Raises:
            UserError: the engine belongs to another GPU or other versions.
        """
        from pipelines.engines.tensorrt_llm.fits import fit_faults
        from pipelines.engines.tensorrt_llm.runtime import TensorRtSession

        if faults := fit_faults(engine_dir):
            raise UserError.of(faults)
        return TensorRtSession(engine_dir)


def make_engine(**options: Any) -> TensorRtEngine:
    """Create the engine; options are `build` and `on_gpu`."""
    return TensorRtEngine(**options)
