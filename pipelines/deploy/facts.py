"""Facts that a deployment reads from its repository, so that the user need not state them again."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.domain.units import GIB
from pipelines.engines.registry import ENGINES, describe

DESCRIPTION = "repository.json"
USUAL_KV_BYTES = GIB
"""Default size of the CPU engine's paged KV cache (upper bound)."""

NEEDED = {"flavour", "label", "variant", "world_size", "settings", "engine_version"}

Kind = Literal["cpu", "gpu", "multinode"]


@dataclass(frozen=True, slots=True)
class RepositoryFacts:
    """A model repository, as its own files describe it.

    Attributes:
        folder: name of its folder, which contains the store's key and so identifies the content.
        label: of the model.
        variant: label of the compression.
        gpu: whether it runs on TensorRT-LLM.
        world_size: ranks, each with a GPU.
        num_nodes: machines that one server spans.
        size_bytes: of all files.
        engine_bytes: of the engine alone.
        engine_version: version of the library that built it.
        kv_bytes: host memory of the KV cache: the CPU engine's pool, or the part a GPU engine offloads.
        threads: of the CPU engine; None takes every core.
    """

    folder: str
    label: str
    variant: str
    gpu: bool
    world_size: int
    num_nodes: int
    size_bytes: int
    engine_bytes: int
    engine_version: str
    kv_bytes: int
    threads: int | None = None

    @property
    def kind(self) -> Kind:
        """Name of the overlay for this repository."""
        if not self.gpu:
            return "cpu"
        return "gpu" if self.num_nodes == 1 else "multinode"

    @property
    def gpus_per_node(self) -> int:
        """Ranks of one pod; 0 on the CPU."""
        return self.world_size // self.num_nodes if self.gpu else 0


def read_served(path: Path) -> RepositoryFacts:
    """Read the facts of a repository.

    Raises:
        UserError: it has no description, cannot be deployed, or its ranks cannot be spread over its nodes.
    """
    described = _described(path)
    settings = described["settings"]
    engine, world, nodes = describe(described["flavour"]), int(described["world_size"]), int(settings["num_nodes"])
    if engine.why_not_deployed:
        deployed = (each.name for each in ENGINES.values() if not each.why_not_deployed)
        raise UserError(
            f"'{path}' is of flavour '{engine.name}': {engine.why_not_deployed}.",
            allowed=f"Repositories of flavour {' and '.join(deployed)} can be deployed.",
        )
    if world % nodes:
        raise UserError(
            f"triton.num_nodes={nodes} does not divide the engine's {count(world, 'rank')}.",
            todo="Every node needs the same number of GPUs: write the repository again with another triton.num_nodes.",
        )
    gpu = engine.needs_gpu
    return RepositoryFacts(
        folder=path.resolve().name,
        label=described["label"],
        variant=described["variant"],
        gpu=gpu,
        world_size=world,
        num_nodes=nodes,
        size_bytes=_size(path),
        engine_bytes=_size(path / "tensorrt_llm" / "1"),
        engine_version=str(described["engine_version"]),
        kv_bytes=int(settings["kv_cache_host_memory_bytes"])
        if gpu
        else _parameter(path, "openvino_kv_cache_bytes") or USUAL_KV_BYTES,
        threads=None if gpu else _parameter(path, "openvino_num_threads"),
    )


def _described(path: Path) -> dict[str, Any]:
    """Read repository.json and check that it has every required key."""
    file = path / DESCRIPTION
    try:
        described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        missing = sorted(NEEDED - set(described))
    except (OSError, ValueError) as error:
        described, missing = {}, [getattr(error, "strerror", None) or str(error)]
    if missing:
        raise UserError(
            f"'{path}' has no complete description: {DESCRIPTION}: {', '.join(missing)}.",
            todo="Give a repository written by this project: make repository, or serving.repository=/its/folder",
        )
    return described


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _parameter(path: Path, name: str) -> int | None:
    """Read a number from the parameters of `tensorrt_llm` in config.pbtxt."""
    text = (path / "tensorrt_llm" / "config.pbtxt").read_text(encoding="utf-8")
    match = re.search(rf'key: "{name}"\s*value \{{\s*string_value: "(\d+)"', text)
    return int(match[1]) if match else None
