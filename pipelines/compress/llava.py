"""Take the language model out of a LLaVA folder: a Hugging Face folder of its own, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pipelines.checkpoint.llava import language_config, language_name
from pipelines.checkpoint.tensors import TensorInfo, read_header
from pipelines.compress.model_folder import TensorWriter
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SILENT, Progress
from pipelines.host.files import parse_json

WEIGHTS = "model.safetensors"
BESIDE = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "vocab.json", "merges.txt",
)  # fmt: skip


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder that count, as Transformers chooses them."""
    index = folder / f"{WEIGHTS}.index.json"
    if (single := folder / WEIGHTS).is_file():
        return [single]
    if index.is_file():
        return sorted({folder / name for name in parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


def take_language_model(folder: Path, out_dir: Path, progress: Progress = SILENT) -> dict[str, Any]:
    """Write the language model of a LLaVA folder.

    Returns:
        facts: `language_bytes` and `left_bytes`, those of encoder and projector.

    Raises:
        UserError: the folder is damaged, or has no language model.
    """
    config = folder / "config.json"
    written = language_config(parse_json(config.read_text(encoding="utf-8")), str(config))
    taken: dict[str, tuple[str, Path, TensorInfo]] = {}
    left = 0
    for path in weight_files(folder):
        for name, info in read_header(path).items():
            own = language_name(name)
            left += 0 if own else info.nbytes
            if own:
                taken[own] = name, path, info
    if "model.embed_tokens.weight" not in taken:
        raise UserError(f"{folder} has no tensor language_model.model.embed_tokens.weight.", todo="Download it again.")
    layout = {name: (info.dtype, info.shape) for name, (_, _, info) in taken.items()}
    writer = TensorWriter.create(out_dir, {WEIGHTS: layout}, {"format": "pt"})
    size = sum(info.nbytes for _, _, info in taken.values())
    with progress.task("taking the language model out", size, "bytes") as advance:
        for name, (_, path, info) in taken.items():
            writer.copy(WEIGHTS, name, path, info)
            advance(info.nbytes)
    writer.sync()
    (out_dir / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    for path in sorted({path for pattern in BESIDE for path in folder.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, out_dir / path.name)
    return {"language_bytes": size, "left_bytes": left}
