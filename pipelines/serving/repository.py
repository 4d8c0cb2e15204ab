"""What the serving side needs to know about a model repository before it starts it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError

DESCRIPTION = "repository.json"
BACKEND = re.compile(r'^\s*backend:\s*"(\w+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ModelRepository:
    """One model repository.

    Attributes:
        path: its folder, absolute.
        models: names of its models, sorted.
        label: what it calls itself: the model's name, and the name that OpenAI clients ask for.
        gpu: whether it runs on TensorRT-LLM's own backend.
        world_size: how many GPUs (ranks) that takes.
        max_seq_len: prompt and output tokens of one request at most; None when the repository does not tell.
        launched_by_hand: whether it spans machines or pre-started ranks, which one command here cannot start.
        adds_special_tokens: whether preprocessing lets the tokenizer add its own, such as BOS.
    """

    path: Path
    models: tuple[str, ...]
    label: str
    gpu: bool
    world_size: int
    max_seq_len: int | None = None
    adds_special_tokens: bool = True
    launched_by_hand: bool = False

    @property
    def tokenizer(self) -> Path:
        """The Hugging Face tokenizer folder."""
        return self.path / "preprocessing" / "1" / "tokenizer"


def read_repository(folder: Path) -> ModelRepository:
    """Look at a folder.

    Raises:
        UserError: it does not exist or holds no model.
    """
    path = folder.expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"The model repository '{folder}' does not exist.", todo="Make one: make repository")
    models = tuple(sorted(child.parent.name for child in path.glob("*/config.pbtxt")))
    if not models:
        raise UserError(
            f"'{folder}' is not a model repository: no folder in it has a config.pbtxt.",
            allowed="A model repository has one folder per model: <model>/config.pbtxt and <model>/1/.",
            todo="Make one: make repository",
        )
    described = _description(path)
    settings = described.get("settings") or {}
    return ModelRepository(
        path=path,
        models=models,
        label=str(described.get("label") or path.name),
        gpu=_backend(path) == "tensorrtllm",
        world_size=int(described.get("world_size") or 1),
        max_seq_len=(described.get("limits") or {}).get("max_seq_len"),
        adds_special_tokens=bool(settings.get("add_special_tokens", True)),
        launched_by_hand=bool(settings.get("participant_ids")) or int(settings.get("num_nodes") or 1) > 1,
    )


def refuse_elsewhere(repository: ModelRepository, *, from_wheel: bool) -> None:
    """Refuse a repository that the server found here cannot serve.

    Args:
        repository: what is to be served.
        from_wheel: whether the server is the one of nvidia-pytriton, which has the python backend only.

    Raises:
        UserError: it needs TensorRT-LLM's backend, or a launch over several machines.
    """
    if repository.gpu and from_wheel:
        raise UserError(
            f"'{repository.path}' runs on TensorRT-LLM's backend; the tritonserver here has the python backend only.",
            todo="Serve it inside NVIDIA's Triton container with TensorRT-LLM, or make one for this machine with "
            "engine=openvino.",
        )
    if repository.launched_by_hand:
        raise UserError(
            f"'{repository.path}' was made for several machines or for ranks that are started beforehand.",
            todo=f"`make scripts cluster=slurm serving.repository={repository.path}` writes what starts it on a "
            f"cluster; the bare command stands under 'start' in {repository.path / DESCRIPTION}.",
        )


def _description(path: Path) -> dict[str, Any]:
    """What the repository was made from; a hand-made one need not say."""
    file = path / DESCRIPTION
    if not file.is_file():
        return {}
    try:
        described = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}.", todo="Make the repository again.") from None
    return described if isinstance(described, dict) else {}


def _backend(path: Path) -> str:
    """The backend that the `tensorrt_llm` model names, or an empty string."""
    config = path / "tensorrt_llm" / "config.pbtxt"
    match = BACKEND.search(config.read_text()) if config.is_file() else None
    return match[1] if match else ""
