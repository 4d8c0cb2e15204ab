"""LLaVA's two parts: the language model as a folder of its own, and the encoder with its projector as an engine."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.checkpoint.tensors import read_header, stored_tensors, weight_files
from pipelines.checkpoint.tokenizer import BESIDE_WEIGHTS
from pipelines.domain.errors import UserError
from pipelines.domain.language_model import language_config, language_name
from pipelines.domain.progress import SILENT, Progress
from pipelines.domain.units import show_bytes
from pipelines.host.files import parse_json


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


WEIGHTS = "model.safetensors"
BESIDE = [pattern for pattern in BESIDE_WEIGHTS if "/" not in pattern]


def take_language_model(folder: Path, out_dir: Path, progress: Progress = SILENT) -> dict[str, Any]:
    """Write the language model of a LLaVA folder.

    Returns:
        facts: `language_bytes` and `left_bytes`, those of encoder and projector.

    Raises:
        UserError: the folder is damaged, or has no language model.
    """
    from pipelines.compress.model_folder import TensorWriter  # loads PyTorch, which planning does without

    config = folder / "config.json"
    written = language_config(parse_json(config.read_text(encoding="utf-8")), str(config))
    taken = stored_tensors(folder, language_name)
    whole = sum(info.nbytes for path in weight_files(folder) for info in read_header(path).values())
    if "model.embed_tokens.weight" not in taken:
        raise UserError(f"{folder} has no tensor language_model.model.embed_tokens.weight.", todo="Download it again.")
    infos = {own: file.header[name] for own, (file, name) in taken.items()}
    layout = {own: info.spec for own, info in infos.items()}
    writer = TensorWriter.create(out_dir, {WEIGHTS: layout}, {"format": "pt"})
    size = sum(info.nbytes for info in infos.values())
    with progress.task("taking the language model out", size, "bytes") as advance:
        for own, info in infos.items():
            writer.copy(WEIGHTS, own, taken[own][0].path, info)
            advance(info.nbytes)
    writer.sync()
    (out_dir / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    for path in sorted({path for pattern in BESIDE for path in folder.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, out_dir / path.name)
    return {"language_bytes": size, "left_bytes": whole - size}
