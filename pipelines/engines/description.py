"""Descriptions of engines: what each one needs and can do, readable without importing the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any, Literal

from pipelines.host.machine import Machine
from pipelines.settings.engine import EngineOptions, EngineSettings


class ServerBackend(StrEnum):
    """The Triton backend that serves an engine."""

    PYTHON = "python"
    """This project's own model.py, with the engine in the server's process."""
    TENSORRTLLM = "tensorrtllm"
    """TensorRT-LLM's compiled backend."""
    LLM_API = "llm_api"
    """NVIDIA's model.py, which calls TensorRT-LLM's LLM API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """Names, requirements and capabilities of one engine.

    Attributes:
        name: name in manifests, in an engine's config.json and in repository.json.
        setting: value of `engine=` on the command line.
        title: name shown to users.
        factory: "module:function" that makes its `port.Engine`; empty if this project neither builds nor runs it.
        install: command that installs the packages of the factory.
        identity: "module:function" that maps the build settings to those that determine the engine's bytes; empty
            means the limits alone.
        recommends: "module:function" that lists what its vendor advises for speed, see `pipelines.engines.tuning`;
            empty if there is nothing to set.
        version_from: "module:function" for the version an engine records; empty means the version of the first of
            `run_libraries`.
        build_libraries: distributions whose version determines the engine's bytes.
        run_libraries: distributions whose version determines its output.
        packages: what must be importable on the machine that builds and evaluates, except what `lacks` checks.
        options: name of its own group of settings under `engine`; empty if it has none.
        files: files of an engine folder; `{rank}` stands for each rank.
        needs_gpu: whether it computes on NVIDIA GPUs; otherwise on the CPU.
        builder: program that builds it, on the target GPU; empty if this project builds it.
        writes_engine: whether a build turns a TensorRT-LLM checkpoint into an engine; otherwise a Hugging Face
            checkpoint with the runtime's arguments takes the engine's place.
        example_scripts: whether TensorRT-LLM's example scripts prepare trained draft heads and vision encoders for it.
        evaluates: whether this project can measure its accuracy.
        gives_logits: whether it gives the logits after every token of a text (`port.LogitsSession`).
        chunks_scored_prompts: whether it scores prompts longer than max_num_tokens in pieces.
        keeps_ranks: whether each rank of a checkpoint runs in its own process; otherwise one process runs all ranks.
        spans_machines: whether its ranks may run on several machines.
        memory_model: what its modelled memory is compared with: "process", the resident memory of its process while
            serving; "rank", the build log's figure for the fullest rank; None if there is no model.
        policy: policy of the simulated scheduler that is most similar.
        server: the Triton backend that serves it; None if there is none.
        why_not_deployed: why no container image can serve it; empty if one can.
        lacks: lists what a machine lacks to build and run it.
        place: where it is built and run, as a sentence for users whose machine lacks something.
    """

    name: str
    setting: str
    title: str
    factory: str = ""
    install: str = ""
    identity: str = ""
    recommends: str = ""
    version_from: str = ""
    build_libraries: tuple[str, ...] = ()
    run_libraries: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    options: str = ""
    files: tuple[str, ...] = ()
    needs_gpu: bool = False
    builder: str = ""
    writes_engine: bool = True
    example_scripts: bool = False
    evaluates: bool = True
    gives_logits: bool = False
    chunks_scored_prompts: bool = False
    keeps_ranks: bool = False
    spans_machines: bool = False
    memory_model: Literal["process", "rank"] | None = None
    policy: Literal["inflight", "inflight_chunked"] = "inflight"
    server: ServerBackend | None = None
    why_not_deployed: str = ""
    lacks: Callable[[Machine], list[str]] = lambda _machine: []
    place: str = ""

    def options_of(self, settings: EngineSettings) -> EngineOptions | None:
        """Return the engine's own group of settings."""
        return getattr(settings, self.options) if self.options else None

    def files_of(self, world_size: int) -> list[str]:
        """Return the files of a complete engine folder besides its config.json."""
        return list(dict.fromkeys(name.format(rank=rank) for rank in range(world_size) for name in self.files))


def load_function(place: str) -> Callable[..., Any]:
    """Import a function given as "module:function"."""
    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
