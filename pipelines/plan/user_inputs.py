"""Inspect what the user has on disk while planning: models, engine, adapters, texts, questions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from pipelines.checkpoint.tensors import read_header
from pipelines.domain.adapter import Adapter
from pipelines.domain.errors import Fault, UserError, collecting
from pipelines.domain.model_shape import ModelShape
from pipelines.plan.targets import EVALUATED, Target, is_elsewhere
from pipelines.settings.model import BUNDLED
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.settings.root import Settings
from pipelines.store.adapters import adapter_source
from pipelines.store.sources import PICKLES, BuiltEngine, InputSource, engine_source, files_source, model_source
from pipelines.store.store import HashCache


@dataclass(frozen=True)
class Found:
    """The inputs found on disk.

    Attributes:
        sources: folders and files by the names under which stages read them.
        shape: of the model; None if it is not on disk.
        built: facts of the engine given with engine.path.
        draft: shape of the draft model.
        same_vocabulary: whether draft and target have the same tokens; None if one of them is not on disk.
        pickled_heads: names of files with pickled weights in speculative.heads_path.
        adapters: by task id.
        vision_bytes: weights of the vision encoder at 16 bit; None if they are not on disk as safetensors.
    """

    sources: dict[str, InputSource] = field(default_factory=dict)
    shape: ModelShape | None = None
    built: BuiltEngine | None = None
    draft: ModelShape | None = None
    same_vocabulary: bool | None = None
    pickled_heads: tuple[str, ...] = ()
    adapters: Mapping[int, Adapter] = field(default_factory=dict)
    vision_bytes: int | None = None


def look(settings: Settings, target: Target, hashes: HashCache) -> Found:
    """Inspect every folder and file that the configuration names.

    Raises:
        UserError: some are missing or wrong; all of them are named at once.
    """
    sources: dict[str, InputSource] = {}
    adapters: dict[int, Adapter] = {}
    shape, built, draft, same, vision = None, None, None, None, None
    faults: list[Fault] = []
    elsewhere = is_elsewhere(settings, target)
    if settings.model.folder:
        with collecting(faults):
            weights = settings.engine.path is None and not elsewhere
            sources["model"], shape = model_source(settings.model.folder, hashes, weights=weights)
    if settings.engine.path is not None:
        with collecting(faults):
            sources["engine"], built = engine_source(settings.engine.path, hashes)
    for name, (key, path) in _places(settings, target).items():
        with collecting(faults):
            sources[name] = files_source(path, hashes, key)
    if settings.speculative.draft and settings.speculative.draft.folder and not elsewhere:
        with collecting(faults):
            folder = settings.speculative.draft.folder
            sources["draft"], draft = model_source(folder, hashes, key="speculative.draft.path")
            same = same_vocabulary(settings.model.folder, folder, hashes)
    if settings.multimodal.path is not None and "vision" in sources:
        with collecting(faults):
            vision = vision_bytes(sources["vision"].path)
    for task, folder in settings.lora.adapters.items() if not elsewhere else ():
        with collecting(faults):
            sources[f"lora.{task}"], adapters[task] = adapter_source(folder, hashes, f"lora.adapters.{task}")
    if faults:
        raise UserError.of(faults)
    return Found(sources, shape, built, draft, same, _pickles(settings.speculative.heads_path), adapters, vision)


VISION = ("vision_tower", "projector")
"""Parts of the names of tensors, or of folders, that belong to a vision encoder (LLaVA, VILA)."""


def vision_bytes(folder: Path) -> int | None:
    """Return the bytes of a vision encoder's weights at 16 bit, from the headers of a model's safetensors files.

    Raises:
        UserError: a file is truncated or not a safetensors file.
    """
    count = 0
    for path in sorted(folder.rglob("*.safetensors")):
        whole = any(part in piece for piece in path.relative_to(folder).parts[:-1] for part in VISION)
        count += sum(
            prod(info.shape)
            for name, info in read_header(path).items()
            if whole or any(part in name for part in VISION)
        )
    return 2 * count or None


def _pickles(heads: Path | None) -> tuple[str, ...]:
    """List pickled weights among trained heads; NVIDIA's scripts load them."""
    folder = heads.expanduser() if heads else None
    return tuple(sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))) if folder else ()


def _places(settings: Settings, target: Target) -> dict[str, tuple[str, Path]]:
    """Map each input name to (the setting that names it, its path)."""
    return {name: (key, path) for name, key, path in _named(settings, target) if path is not None}


def _named(settings: Settings, target: Target) -> Iterator[tuple[str, str, Path | None]]:
    calibration, evaluated = settings.calibration, target in EVALUATED
    if calibration.source == "bundled":
        yield "calibration", "calibration", BUNDLED / "corpus.jsonl"
    else:
        yield "calibration", "calibration.path", calibration.path
    if evaluated and settings.eval.dataset_path is None and settings.eval.task == "mini_mmlu":
        yield "dataset", "eval", PROJECT_ROOT / "eval" / "mini_mmlu" / "data"
    elif evaluated:
        yield "dataset", "eval.dataset_path", settings.eval.dataset_path
    yield "heads", "speculative.heads_path", settings.speculative.heads_path
    yield "vision", "multimodal.path", settings.multimodal.path


def same_vocabulary(target: Path | None, draft: Path, hashes: HashCache) -> bool | None:
    """Return whether two model folders have the same tokens with the same ids; None where that cannot be determined."""
    if target is None:
        return None
    for name in ("tokenizer.json", "tokenizer.model"):
        files = (target / name, draft / name)
        if all(file.is_file() for file in files):
            equal = hashes.sha256(files[0]) == hashes.sha256(files[1])
            return equal or (name == "tokenizer.json" and _tokens(files[0]) == _tokens(files[1]))
    return None


def _tokens(tokenizer: Path) -> object:
    """Read the tokens and their ids from a `tokenizer.json`.

    Raises:
        UserError: it is not a tokenizer.
    """
    try:
        raw = json.loads(tokenizer.read_text(encoding="utf-8"))
        added = [(token["id"], token["content"]) for token in raw.get("added_tokens") or ()]
        return raw["model"]["vocab"], added
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{tokenizer} is not a tokenizer: it has no model.vocab.") from None
