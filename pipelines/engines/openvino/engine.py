"""The engine `openvino`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.domain.progress import Progress
from pipelines.engines.openvino.build import build_engine
from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.session import OpenVinoSession
from pipelines.engines.port import BuildLimits, EngineFacts


class OpenVinoEngine:
    """Runs a TensorRT-LLM checkpoint on the CPU; implements `port.Engine`."""

    name = "openvino"

    def __init__(self, options: OpenVinoOptions | None = None) -> None:
        """Take run-time options; they do not affect what `build` writes."""
        self._options = options or OpenVinoOptions()

    def build(self, checkpoint: Path, limits: BuildLimits, out_dir: Path, progress: Progress) -> EngineFacts:
        """Build `out_dir` from a checkpoint folder; see `build.build_engine`."""
        return build_engine(checkpoint, limits, out_dir, progress)

    def open(self, engine_dir: Path) -> OpenVinoSession:
        """Open a built engine; weights are loaded by the first request."""
        return OpenVinoSession(engine_dir, self._options)


def make_engine(**options: Any) -> OpenVinoEngine:
    """Create the engine from options by name; see `OpenVinoOptions`."""
    return OpenVinoEngine(OpenVinoOptions.judged(options, "engine.openvino."))
