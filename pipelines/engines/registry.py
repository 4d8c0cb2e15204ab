"""Registry of all engines. Nothing here imports an engine, so that planning stays cheap."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module, metadata
from typing import Any, Literal

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.engines.config import EngineOptions, EngineSettings
from pipelines.engines.port import Engine
from pipelines.host.machine import Machine, library_versions

# Requirements and capabilities of engines, readable without importing them.


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
        factory: "module:callable" that makes its `port.Engine`; empty if this project neither builds nor runs it.
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
        on_device: whether another device builds and serves it, with programs that this project does not start.
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
    on_device: bool = False
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
    loaded: Callable[..., Any] = getattr(import_module(module), function)
    return loaded


def why_no_tensorrt_engines(machine: Machine) -> str:
    """Explain why the installed TensorRT-LLM cannot build or run TensorRT engines; empty if it can.

    Source: TensorRT-LLM `docs/source/legacy/tensorrt-backend-removal.md`: 1.2 is the last release line with engines.
    """
    if not machine.has_tensorrt_llm:
        return "the Python package tensorrt_llm is not installed"
    version = library_versions(("tensorrt-llm",))["tensorrt-llm"]
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return f"tensorrt_llm {version} no longer supports TensorRT engines; 1.2 does" if numbers >= [1, 3] else ""


def lacks_for_tensorrt_engines(machine: Machine) -> list[str]:
    """List what this machine lacks to build and run a TensorRT engine.

    Source: TensorRT-LLM `commands/build.py`: trtllm-build uses at least one CUDA GPU.
    """
    lacks = [] if machine.gpus else [f"there is no NVIDIA GPU ({machine.no_gpu_reason})"]
    if shutil.which("trtllm-build") is None:
        lacks.append("trtllm-build is not on PATH")
    return [*lacks, *filter(None, [why_no_tensorrt_engines(machine)])]


def lacks_for_llm_api(machine: Machine) -> list[str]:
    """List what this machine lacks to run TensorRT-LLM's LLM API."""
    lacks = [] if machine.gpus else [f"there is no NVIDIA GPU ({machine.no_gpu_reason})"]
    return lacks if machine.has_tensorrt_llm else [*lacks, "the Python package tensorrt_llm is not installed"]


OPENVINO = EngineDescription(
    name="openvino",
    setting="openvino",
    title="OpenVINO",
    factory="pipelines.engines.openvino.engine:make_engine",
    install="make setup",
    version_from="pipelines.engines.openvino.build:runtime_version",
    build_libraries=("openvino",),
    run_libraries=("openvino", "openvino-genai"),
    packages=("openvino", "openvino_genai"),
    options="openvino",
    files=("openvino_model.xml", "openvino_model.bin"),
    gives_logits=True,
    chunks_scored_prompts=True,
    memory_model="process",
    policy="inflight_chunked",  # prompts (in pieces if they do not fit) and single tokens share an iteration
    server=ServerBackend.PYTHON,
)
TENSORRT_LLM = EngineDescription(
    name="tensorrt_llm",
    setting="tensorrt_llm",
    title="TensorRT-LLM",
    factory="pipelines.engines.tensorrt_llm.engine:TensorRtEngine",
    install="make shell, NVIDIA's Triton container",
    identity="pipelines.engines.tensorrt_llm.folder:identity",
    recommends="pipelines.engines.tensorrt_llm.advice:recommend_build",
    build_libraries=("tensorrt-llm", "tensorrt"),
    run_libraries=("tensorrt-llm", "tensorrt"),
    files=("rank{rank}.engine",),
    needs_gpu=True,
    builder="trtllm-build",
    example_scripts=True,
    keeps_ranks=True,
    spans_machines=True,
    memory_model="rank",
    server=ServerBackend.TENSORRTLLM,
    lacks=lacks_for_tensorrt_engines,
    place="A TensorRT engine is built and run in NVIDIA's Triton container with TensorRT-LLM 1.2, on the GPU it is "
    "for.",
)
LLM_API = EngineDescription(
    name="llmapi",
    setting="tensorrt_llm_llmapi",
    title="TensorRT-LLM",
    recommends="pipelines.engines.tensorrt_llm.advice:recommend_llm_api",
    run_libraries=("tensorrt-llm",),
    packages=("tensorrt_llm",),
    needs_gpu=True,
    writes_engine=False,
    evaluates=False,
    keeps_ranks=True,
    spans_machines=True,
    server=ServerBackend.LLM_API,
    lacks=lacks_for_llm_api,
)
EDGE = EngineDescription(
    name="tensorrt_edge",
    setting="tensorrt_edge",
    title="TensorRT Edge-LLM",
    needs_gpu=True,
    on_device=True,
    writes_engine=False,
    evaluates=False,
    lacks=lambda _machine: ["TensorRT Edge-LLM builds and serves on the device"],
)
_DESCRIPTIONS = (
    OPENVINO,
    TENSORRT_LLM,
    LLM_API,
    EDGE,
)
ENGINES = {engine.name: engine for engine in _DESCRIPTIONS}
"""Name -> engine."""


def describe(name: str) -> EngineDescription:
    """Return the description of an engine.

    Raises:
        UserError: no engine has this name.
    """
    if name not in ENGINES:
        raise UserError(
            f"engine='{name}' is not known.",
            allowed=f"Choose one of {', '.join(ENGINES)}.",
            todo=did_you_mean(name, ENGINES),
        )
    return ENGINES[name]


def with_setting(setting: str) -> EngineDescription | None:
    """Return the engine that `engine=` names; None for `auto`."""
    return next((engine for engine in ENGINES.values() if engine.setting == setting), None)


def runs_on_cpu(name: str | None) -> bool:
    """Return whether a result names an engine that computes on the CPU; names from other tools are not known."""
    return name in ENGINES and not ENGINES[name].needs_gpu


def runtime_version(name: str) -> str | None:
    """Return the version of the runtime installed here for an engine, as engines record it; None if not installed."""
    engine = describe(name)
    try:
        if engine.version_from:
            version: str = load_function(engine.version_from)()
            return version
        return metadata.version(engine.run_libraries[0])
    except (ModuleNotFoundError, metadata.PackageNotFoundError):
        return None


def open_engine(name: str, **options: Any) -> Engine:
    """Create the engine called `name`.

    Raises:
        UserError: the name is unknown, this project does not run it, or a package it needs is not installed.
    """
    described = describe(name)
    if not described.factory:
        raise UserError(
            f"engine='{name}' cannot be opened here: it runs only inside {described.title}.",
            allowed=f"Choose one of {', '.join(each.name for each in ENGINES.values() if each.factory)}.",
        )
    try:
        engine: Engine = load_function(described.factory)(**options)
    except ModuleNotFoundError as missing:
        if missing.name is not None and missing.name.startswith("pipelines"):
            raise
        raise UserError(
            f"engine={name} needs the Python package '{missing.name}', which is not installed here.",
            todo=f"To install: {described.install}.",
        ) from None
    return engine


# Choose the engine of a run, with the reason.


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine and the reason for choosing it, for the first line of a run's output."""

    engine: EngineDescription
    reason: str


def choose(setting: str, machine: Machine, hardware: str = "auto") -> EngineChoice:
    """Resolve `engine.name`: `auto` chooses TensorRT-LLM where it can run, otherwise OpenVINO, and gives the reason.

    Args:
        setting: value of `engine=`.
        machine: facts of this machine.
        hardware: value of `hardware=`; a GPU by name is planned for with TensorRT-LLM, wherever that is.

    Raises:
        UserError: the engine does not exist.
    """
    if setting != "auto":
        return EngineChoice(with_setting(setting) or describe(setting), "asked for")
    missing = why_no_tensorrt_engines(machine)
    if hardware != "auto" and (missing or not machine.gpus):
        return EngineChoice(
            TENSORRT_LLM, f"engine=auto: planned for hardware={hardware}; engine=openvino plans for this machine's CPU"
        )
    if not machine.gpus:
        return EngineChoice(OPENVINO, f"engine=auto: no NVIDIA GPU here, {machine.no_gpu_reason}")
    if missing:
        return EngineChoice(OPENVINO, f"engine=auto: {missing}")
    return EngineChoice(TENSORRT_LLM, f"engine=auto: {machine.gpus[0].name} and tensorrt_llm are available")
