"""Check any Triton repository, and list every fault that would stop or impair serving."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.text_format import ParseError
from tritonclient.grpc import model_config_pb2 as pb

from pipelines.checkpoint.tokenizer import VOCABULARIES
from pipelines.domain.errors import Fault, UserError
from pipelines.engines.limits import SIZES, EngineLimits
from pipelines.engines.registry import ServerBackend
from triton_repo.consistency import config_faults, draft_engine_faults, parameter, tensor_faults
from triton_repo.generate import parse
from triton_repo.llmapi import AGAIN, DESCRIPTION, MODEL_YAML, llmapi_faults
from triton_repo.parameters import OF_NVIDIA
from triton_repo.tensors import DRAFT, ENCODERS, ENSEMBLE, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

PLACEHOLDER = re.compile(r"\$\{(\w*)\}")
COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)


def check_repository(
    folder: Path, *, running_version: Callable[[str], str | None] | None = None, to_be_served: bool = True
) -> list[Fault]:
    """Check a repository.

    Args:
        folder: its root.
        to_be_served: whether the parts from NVIDIA's container must already be present.
        running_version: maps an engine's name to the version of the library that will run it; None skips the check.

    Returns:
        all faults; an empty list if it can be served.
    """
    files = sorted(folder.glob("*/config.pbtxt"))
    if not files:
        return [
            Fault(
                f"'{folder}' is not a model repository: no folder in it has a config.pbtxt.",
                "A model repository has one folder per model: <model>/config.pbtxt and <model>/1/.",
                "Make one: make repository",
            )
        ]
    configs, faults = read_configs(files)
    llmapi = (folder / TENSORRT_LLM / "1" / MODEL_YAML).is_file()
    faults += tensor_faults(configs, llmapi=llmapi)
    faults += _missing_files(folder, configs, llmapi=llmapi, to_be_served=to_be_served)
    faults += _ensemble_faults(folder, configs)
    if llmapi:
        return [*faults, *llmapi_faults(folder)]
    if TENSORRT_LLM not in configs:
        return faults
    place = parameter(configs[TENSORRT_LLM], "gpt_model_path")
    if not place:
        return [
            *faults,
            Fault(f"{TENSORRT_LLM} has no parameter gpt_model_path.", "It names the engine's folder.", AGAIN),
        ]
    try:
        limits = EngineLimits.load(folder / place)
    except UserError as error:
        return [*faults, *error.faults]
    faults += config_faults(configs, limits)
    faults += _draft_faults(folder, configs, limits)
    faults += _backend_faults(configs[TENSORRT_LLM], limits)
    faults += _description_faults(folder / DESCRIPTION, limits)
    faults += _version_faults(limits, running_version(limits.flavour) if running_version else None)
    return faults


def _draft_faults(folder: Path, configs: dict[str, pb.ModelConfig], limits: EngineLimits) -> Iterator[Fault]:
    on_cpu = parameter(configs[TENSORRT_LLM], "openvino_draft_dir")
    place = parameter(configs[DRAFT], "gpt_model_path") if DRAFT in configs else on_cpu
    if place:
        try:
            yield from draft_engine_faults(limits, EngineLimits.load(folder / place))
        except UserError as error:
            yield from error.faults


def read_configs(files: list[Path]) -> tuple[dict[str, pb.ModelConfig], list[Fault]]:
    """Parse every config.pbtxt; a file with a placeholder in place of a number cannot be parsed."""
    configs: dict[str, pb.ModelConfig] = {}
    faults: list[Fault] = []
    for file in files:
        model = file.parent.name
        text = COMMENT.sub("", file.read_text(encoding="utf-8", errors="replace"))
        left = sorted(set(PLACEHOLDER.findall(text)))
        if left:
            names = ", ".join(f"${{{name}}}" for name in left)
            faults.append(
                Fault(
                    f"{model}/config.pbtxt still has {names}.",
                    "Every placeholder of a template must be filled in.",
                    "Fill them in with fill_template.py, or make the repository here: make repository",
                )
            )
        try:
            config = parse(text)
        except ParseError as error:
            if not left:
                faults.append(Fault(f"{model}/config.pbtxt is not a model configuration: {error}.", todo=AGAIN))
            continue
        configs[model] = config
        if config.name not in ("", model):
            faults.append(Fault(f"{model}/config.pbtxt names the model '{config.name}'.", f"It must be '{model}'."))
    return configs, faults


def _missing_files(
    folder: Path, configs: dict[str, pb.ModelConfig], *, llmapi: bool, to_be_served: bool
) -> Iterator[Fault]:
    """Find missing version folders, code and tokenizers; for images and llmapi, some code is in NVIDIA's container."""
    for name, config in configs.items():
        version = folder / name / "1"
        if not version.is_dir():
            yield Fault(f"{name} has no version folder '{name}/1'.", todo=AGAIN)
        elif config.backend == "python" and not (version / "model.py").is_file():
            if llmapi:
                if to_be_served:
                    what = f"{name} has no '{name}/1/model.py': its code is NVIDIA's, of TensorRT-LLM 1.3."
                    yield Fault(what, f"The commands in {DESCRIPTION} copy it.", "Or add serving.server=trtllm_serve.")
            elif ENCODERS not in configs or name not in OF_NVIDIA:
                yield Fault(f"{name} has no '{name}/1/model.py', and its backend is python.", todo=AGAIN)
            elif to_be_served:
                yield Fault(
                    f"{name} has no '{name}/1/model.py': where there are images its code is NVIDIA's.",
                    f"It stands in {OF_NVIDIA[name]}/{name}/1 of their Triton container up to TensorRT-LLM 1.2.",
                    f"Copy it, as the commands in {DESCRIPTION} do.",
                )
        if name in (PREPROCESSING, POSTPROCESSING):
            place = parameter(config, "tokenizer_dir")
            if not any((folder / place / vocabulary).is_file() for vocabulary in VOCABULARIES):
                yield Fault(f"{name} has tokenizer_dir='{place}', where no tokenizer is.", todo=AGAIN)


def _ensemble_faults(folder: Path, configs: dict[str, pb.ModelConfig]) -> Iterator[Fault]:
    """Find steps of the ensemble that name missing models or tensors."""
    if ENSEMBLE in configs:
        for step in configs[ENSEMBLE].ensemble_scheduling.step:
            if not (folder / step.model_name / "config.pbtxt").is_file():
                yield Fault(f"{ENSEMBLE} calls the model '{step.model_name}', which is not here.", todo=AGAIN)


def _backend_faults(config: pb.ModelConfig, limits: EngineLimits) -> Iterator[Fault]:
    """Find an engine of one kind under the backend of another."""
    # TensorRT-LLM's own Python runtime also serves its engines from the Python backend
    if limits.engine.server is ServerBackend.PYTHON and config.backend != ServerBackend.PYTHON:
        yield Fault(
            f"{TENSORRT_LLM} has backend '{config.backend}', and its engine is built by {limits.engine.title}.",
            f"It must be '{ServerBackend.PYTHON}'.",
            AGAIN,
        )


def _description_faults(file: Path, limits: EngineLimits) -> Iterator[Fault]:
    """Check repository.json against the actual engine."""
    if not file.is_file():
        return
    try:
        described: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Fault(f"{file.name} is not valid JSON: {error}.", todo=AGAIN)
        return
    if not isinstance(described, dict):
        yield Fault(f"{file.name} holds a {type(described).__name__}.", "It must be a mapping.", AGAIN)
        return
    recorded = {**(described.get("limits") or {}), "version": described.get("engine_version")}
    for name in ("version", "world_size", *SIZES):
        if name in recorded and recorded[name] != getattr(limits, name):
            yield Fault(
                f"The repository was made for an engine with {name}={recorded[name]}; the engine in it has "
                f"{getattr(limits, name)}.",
                "The engine was exchanged after the repository was made.",
                AGAIN,
            )


def _version_faults(limits: EngineLimits, running: str | None) -> Iterator[Fault]:
    if running is not None and running != limits.version:
        tool = limits.engine.title
        yield Fault(
            f"The engine was built by {tool} {limits.version}; this server runs {tool} {running}.",
            "An engine runs only under the version that built it.",
            "Build engine and repository again with this version: make repository",
        )
