"""The files of a repository: a model's folder, linked engines and tokenizers, and repository.json."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipelines import __version__
from pipelines.checkpoint import tokenizer_folder
from pipelines.domain.errors import UserError
from pipelines.settings.triton import TritonSettings
from triton_repo.spec import RepositorySpec
from triton_repo.start import start_commands

DESCRIPTION = "repository.json"
FORMAT = 1
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
    "config.json",
    "generation_config.json",
)
READ_TOKENIZERS = ("preprocessing", "postprocessing")
"""Models with a copy of the project's reader of tokenizers."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
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
    remembered = ("flavour", "models", "world_size", "engine_version", "settings_without_effect")
    return {**{name: whole[name] for name in remembered}, "bytes": size}


def write_model(folder: Path, config: str, sources: Path | None) -> None:
    """Write one model: config.pbtxt and version 1, with its code if it has any."""
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    if sources is None:
        (version / ".keep").touch()  # an empty version folder does not survive git or an object store
        return
    shutil.copytree(sources, version, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    if sources.name in READ_TOKENIZERS:
        shutil.copy(tokenizer_folder.__file__, version)


def tokenizer_files(folder: Path) -> list[Path]:
    """List the tokenizer files of a Hugging Face folder.

    Raises:
        UserError: it has no tokenizer.
    """
    found = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    if not any(path.name in VOCABULARIES for path in found):
        raise UserError(
            f"'{folder}' has no tokenizer, so the repository could not turn text into tokens.",
            allowed=f"One of {', '.join(VOCABULARIES)} must be in it.",
            todo="Take the model's own Hugging Face folder, or save its tokenizer there with save_pretrained().",
        )
    return found


def engine_files(folder: Path) -> list[Path]:
    """List all files of an engine, without the files that the store added."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in files if path.name not in OF_THE_STORE and not path.name.startswith(".")]


def link_files(files: Iterable[Path], root: Path, target: Path) -> None:
    """Link files below `target` with the same relative paths as below `root`."""
    for path in files:
        _link(path.resolve(), _free(target / path.relative_to(root)))  # the Hub's cache holds symbolic links


def copy_files(files: Iterable[Path], root: Path, target: Path) -> None:
    """Copy small files that somebody may edit; through a link, that would change the repository too."""
    for path in files:
        shutil.copy2(path, _free(target / path.relative_to(root)))


def _free(place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    return place


def _link(source: Path, place: Path) -> None:
    """Make a hard link, or a copy where links are not possible."""
    try:
        os.link(source, place)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy2(source, place)
