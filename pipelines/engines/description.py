"""What the rest of the project may ask about an engine without importing it: a record of what it needs and can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any, Literal

from pipelines.host.machine import Machine
from pipelines.settings.engine import EngineOptions, EngineSettings


class ServerBackend(StrEnum):
    """How Triton serves an engine."""

    PYTHON = "python"
    """This project's own model.py, with the engine in the server's process."""
    TENSORRTLLM = "tensorrtllm"
    """TensorRT-LLM's compiled backend."""
    LLM_API = "llm_api"
    """NVIDIA's model.py, which calls TensorRT-LLM's LLM API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """One engine: its names, what it needs, what it can do.

    Attributes:
        name: in manifests, in an engine's config.json and in repository.json.
        setting: `engine=` on the command line.
        title: for people.
        factory: "module:function" that makes its `port.Engine`; empty where nothing here builds or runs it.
        install: command that installs the packages of the factory.
        identity: "module:function" from the build settings to those that decide the engine's bytes; empty is the
            limits alone.
        version_from: "module:function" for the version an engine records; empty is that of the first of
            `run_libraries`.
        build_libraries: distributions whose version decides the engine's bytes.
        run_libraries: distributions whose version decides its answers.
        packages: what must be importable on the machine that builds and evaluates; what `lacks` looks for is not here.
        options: name of its own group of settings under `engine`; empty where it has none.
        files: of an engine folder, `{rank}` standing for each rank.
        needs_gpu: it computes on NVIDIA GPUs; otherwise on the CPU.
        builder: program that builds it, on the GPU it is for; empty where this project builds it.
        writes_engine: a build turns a TensorRT-LLM checkpoint into an engine; otherwise a Hugging Face checkpoint with
            the runtime's arguments stands in the engine's place.
        example_scripts: TensorRT-LLM's example scripts prepare trained draft heads and vision encoders for it.
        evaluates: its accuracy can be measured from here.
        chunks_scored_prompts: scores prompts longer than max_num_tokens, in pieces.
        keeps_ranks: the ranks of a checkpoint are as many processes; otherwise one process runs all of it.
        spans_machines: its ranks may run on several machines.
        memory_model: what its modelled memory is compared with: "process", its whole process while it serves; "rank",
            what the build log says about the fullest rank; None where there is no model.
        policy: of the simulated scheduler that schedules most alike.
        server: how Triton serves it; None where nothing does.
        why_not_deployed: why no container image can serve it; empty where one can.
        lacks: what a machine lacks to build and run it.
        place: where it is built and run, in a sentence for those whose machine lacks something.
    """

    name: str
    setting: str
    title: str
    factory: str = ""
    install: str = ""
    identity: str = ""
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
        """The engine's own group of settings."""
        return getattr(settings, self.options) if self.options else None

    def files_of(self, world_size: int) -> list[str]:
        """Files that a complete engine folder has beside its config.json."""
        return list(dict.fromkeys(name.format(rank=rank) for rank in range(world_size) for name in self.files))


def load_function(place: str) -> Callable[..., Any]:
    """Import what "module:function" names."""
    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
