"""Registry of all engines. Nothing here imports an engine, so that planning stays cheap."""

from __future__ import annotations

import shutil
from importlib import metadata
from typing import Any

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.engines.description import EngineDescription, ServerBackend, load_function
from pipelines.engines.port import Engine
from pipelines.host.machine import Machine, library_versions


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
    factory="pipelines.engines.tensorrt_llm.engine:make_engine",
    install="make shell, NVIDIA's Triton container",
    identity="pipelines.engines.tensorrt_llm.command:identity",
    recommends="pipelines.engines.tensorrt_llm.tuning:recommend",
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
    run_libraries=("tensorrt-llm",),
    packages=("tensorrt_llm",),
    needs_gpu=True,
    writes_engine=False,
    evaluates=False,
    keeps_ranks=True,
    server=ServerBackend.LLM_API,
    why_not_deployed="no released Triton container holds the TensorRT-LLM it needs",
    lacks=lacks_for_llm_api,
)
_DESCRIPTIONS = (
    OPENVINO,
    TENSORRT_LLM,
    LLM_API,
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

    Args:
        name: a key of `ENGINES`.
        options: passed to the factory, under the engine's own names.

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
