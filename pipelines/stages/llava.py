"""LLaVA's two parts: the language model as a folder of its own, and the encoder with its projector as an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.domain.progress import Progress
from pipelines.domain.units import show_bytes


@dataclass(frozen=True)
class TakeLanguageModel:
    """Folder of a whole LLaVA in, folder of its language model out."""

    name = "language_model"
    version = "1"
    measures = False
    writes = "language_model"
    libraries: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("torch",)

    def identity(self) -> dict[str, Any]:
        """Return nothing: there is one way."""
        return {}

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return f"{show_bytes(facts['language_bytes'])}; encoder and projector have {show_bytes(facts['left_bytes'])}"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Copy its tensors under its own names."""
        from pipelines.compress.llava import take_language_model

        return take_language_model(inputs["model"], out_dir, progress)


@dataclass(frozen=True)
class BuildVision:
    """Folder of a whole LLaVA in; encoder and projector as an engine of the CPU out, in the type of their weights."""

    libraries: tuple[str, ...] = ("openvino",)
    needs: tuple[str, ...] = ("openvino",)
    name = "vision"
    version = "1"
    measures = False
    writes = "vision_engine"

    def identity(self) -> dict[str, Any]:
        """Return the engine."""
        return {"engine": "openvino"}

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        most = "up to " if facts.get("tiles") else ""
        return f"{show_bytes(facts['engine_bytes'])}, {most}{facts['visual_tokens']} tokens a picture"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Write the graph."""
        from pipelines.engines.openvino.vision import build_vision

        return build_vision(inputs["vision"], out_dir)
