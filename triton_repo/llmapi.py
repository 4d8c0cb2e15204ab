"""Repositories of the LLM API (TensorRT-LLM 1.3 and later): one model, its settings in model.yaml, no TensorRT engine.

Source: `triton_backend/all_models/llmapi` of TensorRT-LLM. The model's code is NVIDIA's and comes with their container;
the command in repository.json puts it in its place.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipelines import __version__
from pipelines.checkpoint import tokenizer_folder
from pipelines.checkpoint.tokenizer import BESIDE_WEIGHTS, VOCABULARIES
from pipelines.domain.errors import Fault, UserError, refuse, yaml_fault
from pipelines.engines.tensorrt_llm.llm_api import complaints
from pipelines.host.files import link_or_copy
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec, start_commands
from triton_repo.tensors import TENSORRT_LLM

OPTIONS = "extra_llm_api_options.yaml"
CHECKPOINT, DRAFT = "checkpoint", "draft"
"""Content of the folder that takes the place of an engine: the arguments, a Hugging Face checkpoint, and optionally a
draft model's checkpoint."""


def serve_command(host: str, port: int, checkpoint: str = CHECKPOINT, options: str = OPTIONS) -> str:
    """Return what serves the folder of an LLM API, typed inside it."""
    return f"trtllm-serve {checkpoint} --host {host} --port {port} --extra_llm_api_options {options}"


def read_arguments(path: Path, beside: Iterable[str] = ()) -> dict[str, Any]:
    """Return the arguments of `tensorrt_llm.LLM` from a YAML file.

    Raises:
        UserError: it is not a mapping, or no version of TensorRT-LLM takes one of the arguments.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {yaml_fault(error)}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}.", allowed="It must be a mapping.", todo=AGAIN)
    arguments = {name: value for name, value in content.items() if name not in beside}
    refuse([each.fault for each in complaints(arguments, None, f"{path}: ") if not each.ignored])
    return arguments


# The files of a repository: a model's folder, linked engines and tokenizers, and repository.json.

DESCRIPTION = "repository.json"
FORMAT = 1
BESIDE_CODE = {
    "preprocessing": ("tokenizer_folder.py", "pictures.py"),
    "postprocessing": ("tokenizer_folder.py",),
}
"""Models -> files of `pipelines.checkpoint` of which they have a copy."""
OF_THE_STORE = ("manifest.json", "trtllm-build.log")


def describe(
    out_dir: Path,
    settings: TritonSettings,
    spec: RepositorySpec,
    made_from: Mapping[str, Any],
    description: Mapping[str, Any],
) -> dict[str, Any]:
    """Write repository.json and return what the manifest should remember."""
    whole = {
        "format": FORMAT,
        "flavour": spec.flavour,
        "label": spec.label,
        "variant": spec.variant,
        "pipelines_version": __version__,
        "start": start_commands(settings, spec),
        "settings": settings.model_dump(mode="json"),
        **({"made_from": dict(made_from)} if made_from else {}),
        **description,
    }
    (out_dir / DESCRIPTION).write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in out_dir.rglob("*") if path.is_file())
    names = ("flavour", "models", "world_size", "engine_version", "settings_without_effect")
    return {**{name: whole[name] for name in names}, "bytes": size}


def write_model(folder: Path, config: str, sources: Path | None) -> None:
    """Write one model: config.pbtxt and version 1, with its code if it has any."""
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    if sources is None:
        (version / ".keep").touch()  # an empty version folder does not survive git or an object store
        return
    shutil.copytree(sources, version, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name in BESIDE_CODE.get(sources.name, ()):
        shutil.copy(Path(tokenizer_folder.__file__).with_name(name), version)


def tokenizer_files(folder: Path) -> list[Path]:
    """List the tokenizer files of a Hugging Face folder.

    Raises:
        UserError: it has no tokenizer.
    """
    files = sorted(
        {path for pattern in ("config.json", *BESIDE_WEIGHTS) for path in folder.glob(pattern) if path.is_file()}
    )
    if not any(path.name in VOCABULARIES for path in files):
        raise UserError(
            f"'{folder}' has no tokenizer, so the repository could not turn text into tokens.",
            allowed=f"One of {', '.join(VOCABULARIES)} must be in it.",
            todo="Take the model's own Hugging Face folder, or save its tokenizer there with save_pretrained().",
        )
    return files


def engine_files(folder: Path) -> list[Path]:
    """List all files of an engine, without the files that the store added."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in files if path.name not in OF_THE_STORE and not path.name.startswith(".")]


def link_files(files: Iterable[Path], root: Path, target: Path) -> None:
    """Link files below `target` with the same relative paths as below `root`, or copy where links are not possible."""
    for path in files:  # the Hub's cache holds symbolic links
        link_or_copy(path, target / path.relative_to(root))


def copy_files(files: Iterable[Path], root: Path, target: Path) -> None:
    """Copy small files that somebody may edit; through a link, that would change the repository too."""
    for path in files:
        place = target / path.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        shutil.copy2(path, place)


CHECKPOINT_DIR, DRAFT_DIR = f"{TENSORRT_LLM}/1/{CHECKPOINT}", f"{TENSORRT_LLM}/1/{DRAFT}"
MODEL_YAML = "model.yaml"
BESIDE_THE_ARGUMENTS = ("model", "backend", "triton_config")
AGAIN = "Make the repository again: make repository"
CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")


def checkpoint_files(folder: Path) -> list[Path]:
    """List weights, configuration and tokenizer, without the copies in other formats that the Hub often has."""
    files = {path for pattern in CHECKPOINT_FILES for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in files if path.name not in OF_THE_STORE)


def llmapi_faults(folder: Path) -> list[Fault]:
    """Find everything that would stop the LLM API from loading this repository."""
    path = folder / TENSORRT_LLM / "1" / MODEL_YAML
    try:
        arguments = read_arguments(path, BESIDE_THE_ARGUMENTS)
    except UserError as error:
        return list(error.faults)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    draft = (arguments.get("speculative_config") or {}).get("speculative_model")
    places = {str(content.get("model", CHECKPOINT_DIR)): True, **({} if draft is None else {str(draft): False})}
    return [fault for place, has_tokenizer in places.items() for fault in _missing(folder / place, has_tokenizer)]


def _missing(checkpoint: Path, has_tokenizer: bool) -> list[Fault]:
    """Find what a checkpoint lacks; a draft model uses its target's tokenizer."""
    missing = [] if (checkpoint / "config.json").is_file() else ["config.json"]
    missing += [] if list(checkpoint.glob("*.safetensors")) else ["*.safetensors"]
    if has_tokenizer and not any((checkpoint / name).is_file() for name in VOCABULARIES):
        missing.append("a tokenizer")
    return [Fault(f"The checkpoint '{checkpoint}' lacks {', '.join(missing)}.", todo=AGAIN)] if missing else []
