"""Inspect the user's files while planning: models, engine, adapters, texts, questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from eval.config import SHIPPED_TEXTS
from eval.dataset import MINI_MMLU, MINI_PICTURES, read_own
from eval.spec import BUNDLED as BUNDLED_TASKS
from eval.spec import PICTURES
from pipelines.checkpoint.tensors import read_header
from pipelines.checkpoint.tokenizer import beyond, tokens_of
from pipelines.checkpoint.tokenizer_folder import TOKENIZER
from pipelines.compress.texts import load_texts
from pipelines.domain.adapter import Adapter
from pipelines.domain.errors import Fault, collecting, refuse
from pipelines.domain.formats import reads_texts
from pipelines.domain.language_model import whole
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.host.files import check_links, json_object
from pipelines.plan.targets import EVALUATED, Goal
from pipelines.settings.model import ModelSettings
from pipelines.store.manifest import HashCache
from pipelines.store.sources import (
    PICKLES,
    BuiltEngine,
    InputSource,
    adapter_source,
    check_tokenizer,
    engine_source,
    files_source,
    model_config,
    model_source,
)


@dataclass(frozen=True)
class UserInputs:
    """The inputs found on disk.

    Attributes:
        sources: folders and files by the names under which stages read them.
        shape: of the model; None if neither the disk nor the Hub has its config.json.
        reference: shape of another model to compare predictions with.
        rotary: how the model encodes positions; likewise.
        built: facts of the engine given with engine.path.
        draft_rotary: how the draft model encodes positions.
        same_vocabulary: whether draft and target have the same tokens; None if one of them is not on disk.
        pickled_heads: names of files with pickled weights in speculative.heads_path.
        heads_bytes: size of all files with weights there; None without trained heads.
        adapters: by task id.
        few_texts: texts of the user's calibration data, if they are fewer than `ENOUGH_TEXTS`.
        whole: architecture of the model if its language model is one part, which is taken out; else None.
        hub_folders: what is on this machine of models that come from the Hub: at least their config.json.
        hub_bytes: weights of such models, by their names there.
        unread: models of which the Hub does not give it, each with the reason.
        unknown_tokens: of the tokenizer, whose ids the model does not have.
        vision_bytes: weights of the vision encoder at 16 bit; None if they are not on disk as safetensors.
    """

    sources: dict[str, InputSource] = field(default_factory=dict)
    shape: ModelShape | None = None
    built: BuiltEngine | None = None
    draft: ModelShape | None = None
    same_vocabulary: bool | None = None
    pickled_heads: tuple[str, ...] = ()
    heads_bytes: int | None = None
    adapters: Mapping[int, Adapter] = field(default_factory=dict)
    vision_bytes: int | None = None
    rotary: Rotary | None = None
    draft_rotary: Rotary | None = None
    few_texts: int | None = None
    reference: ModelShape | None = None
    whole: str | None = None
    hub_folders: Mapping[ModelSettings, Path] = field(default_factory=dict)
    hub_bytes: Mapping[str, int] = field(default_factory=dict)
    unread: Sequence[str] = ()
    unknown_tokens: tuple[str, ...] = ()


def inspect_inputs(goal: Goal, hashes: HashCache) -> UserInputs:
    """Inspect every folder and file that the configuration names.

    Raises:
        UserError: some are missing or wrong; all of them are named at once.
    """
    settings = goal.settings
    sources: dict[str, InputSource] = {}
    adapters: dict[int, Adapter] = {}
    facts: dict[str, Any] = {"sources": sources, "adapters": adapters}
    faults: list[Fault] = []
    elsewhere = goal.is_elsewhere
    if folder := settings.model.folder:
        with collecting(faults):
            weights = settings.engine.path is None and not elsewhere
            sources["model"], facts["shape"] = model_source(folder, hashes, weights=weights)
            facts["rotary"] = Rotary.of(model_config(folder))
            facts["whole"] = whole(json_object(folder / "config.json"))
        if folder.is_dir() and (goal.target != "build" or calibrates(goal)):  # a stage needs the tokenizer
            with collecting(faults):
                tokens = check_tokenizer(folder, "model.path")
                facts["unknown_tokens"] = tuple(beyond(tokens, facts["shape"].vocab_size)) if "shape" in facts else ()
    if settings.engine.path is not None:
        with collecting(faults):
            sources["engine"], facts["built"] = engine_source(settings.engine.path, hashes)
    for name, (key, path) in _places(goal).items():
        with collecting(faults):
            sources[name] = _source(name, path, hashes, key)
    if settings.speculative.draft and settings.speculative.draft.folder and not elsewhere:
        with collecting(faults):
            folder = settings.speculative.draft.folder
            sources["draft"], facts["draft"] = model_source(folder, hashes, key="speculative.draft.path")
            facts["draft_rotary"] = Rotary.of(model_config(folder))
            facts["same_vocabulary"] = same_vocabulary(settings.model.folder, folder)
    with collecting(faults):
        facts["reference"] = _reference(goal, sources, hashes)
    if settings.multimodal.path is not None and "vision" in sources:
        with collecting(faults):
            facts["vision_bytes"] = vision_bytes(sources["vision"].path)
    for task, folder in settings.lora.adapters.items() if not elsewhere else ():
        with collecting(faults):
            sources[f"lora.{task}"], adapters[task] = adapter_source(folder, hashes, f"lora.adapters.{task}")
    with collecting(faults):
        facts["few_texts"] = _read_texts(goal, sources)
    if settings.eval.path is not None and "dataset" in sources:
        with collecting(faults):
            read_own(sources["dataset"].path, settings.eval)
    refuse(faults)
    facts["pickled_heads"], facts["heads_bytes"] = _heads(settings.speculative.heads_path)
    return UserInputs(**facts)


def _reference(goal: Goal, sources: dict[str, InputSource], hashes: HashCache) -> ModelShape | None:
    """Add another model to compare predictions with to the sources, and return its shape; None without one."""
    path, key = goal.settings.fidelity.reference_path, "fidelity.reference_path"
    if path is None or not goal.compares:
        return None
    folder = path.absolute()
    sources["reference_model"], shape = model_source(folder, hashes, key)
    check_tokenizer(folder, key)
    return shape


def _read_texts(goal: Goal, sources: Mapping[str, InputSource]) -> int | None:
    """Read the beginnings of the user's texts; return what `few_texts` says of the calibration data."""
    if "text.user" in sources:
        few_texts(sources["text.user"].path, goal.settings.fidelity.column)
    calibration = goal.settings.calibration
    if calibration.source != "local" or "calibration" not in sources or not calibrates(goal):
        return None
    return few_texts(sources["calibration"].path, calibration.column, calibration.size)


ENOUGH_TEXTS = 64
"""With fewer calibration texts the observed ranges of activations depend on the choice of texts."""


def few_texts(source: Path, column: str, size: int = 0) -> int | None:
    """Return the number of texts if they are fewer than `ENOUGH_TEXTS`; the first `size` are read, or that many.

    Raises:
        UserError: there are none, or one of them cannot be read.
    """
    count = sum(1 for _ in load_texts(source, size=max(size, ENOUGH_TEXTS), column=column))
    return count if count < ENOUGH_TEXTS else None


def calibrates(goal: Goal) -> bool:
    """Return whether texts are observed: by quantization of model or draft, by pruning, SparseGPT or training."""
    settings = goal.settings
    if settings.engine.path is not None or goal.is_elsewhere:
        return False
    formats = [*settings.quant.formats, settings.speculative.draft_qformat]
    return (
        reads_texts([each for each in formats if each is not None], settings.kv_cache.dtype)
        or settings.sparsity.method == "sparsegpt"
        or settings.prune.prunes
        or settings.recover.trains
    )


VISION = ("vision_tower", "projector")
"""Parts of the names of tensors, or of folders, that belong to a vision encoder."""


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


def _heads(folder: Path | None) -> tuple[tuple[str, ...], int | None]:
    """Return pickles among trained heads, which NVIDIA's scripts load, and the bytes of their weights, in 16 bit."""
    if folder is None:
        return (), None
    pickles = {path for pattern in PICKLES for path in folder.glob(pattern)}
    size = sum(path.stat().st_size for path in pickles.union(folder.glob("*.safetensors")))
    return tuple(sorted(path.name for path in pickles)), size or None


FOREIGN = ("heads", "vision")
"""Inputs that others have made, besides models and adapters; texts and questions are the user's own."""


def _source(name: str, path: Path, hashes: HashCache, key: str) -> InputSource:
    if name in FOREIGN:
        check_links(path, key)
    return files_source(path, hashes, key, texts=name in ("calibration", "text.user"))


def _places(goal: Goal) -> dict[str, tuple[str, Path]]:
    """Map each input name to (the setting that names it, its path)."""
    settings, calibration = goal.settings, goal.settings.calibration
    shipped = calibration.shipped
    places: dict[str, tuple[str, Path | None]] = {
        "calibration": ("calibration" if shipped else "calibration.path", shipped or calibration.path),
        "teacher": ("recover.teacher", settings.recover.teacher),
    }
    if goal.target in EVALUATED:
        questions = settings.eval
        if questions.dataset_path is None and questions.task in BUNDLED_TASKS:
            places["dataset"] = "eval", MINI_PICTURES if questions.task == PICTURES else MINI_MMLU
        elif questions.path is not None:
            places["dataset"] = "eval.path", questions.path
        else:
            places["dataset"] = "eval.dataset_path", questions.dataset_path
    if goal.compares:
        places |= {f"text.{name}": ("fidelity", path) for name, path in settings.fidelity.shipped.items()}
        places["text.user"] = "fidelity.path", settings.fidelity.path
    if goal.target == "diagnose":
        places["text.bundled"] = "diagnose", SHIPPED_TEXTS["bundled" if settings.model.is_bundled else "prose"]
        places |= {name: (f"diagnose.{name}", path) for name, path in settings.diagnose.given.items()}
    places["heads"] = "speculative.heads_path", settings.speculative.heads_path
    places["vision"] = "multimodal.path", settings.multimodal.path
    return {name: (key, path) for name, (key, path) in places.items() if path is not None}


def same_vocabulary(target: Path | None, draft: Path) -> bool | None:
    """Return whether two model folders have the same tokens with the same ids; None where that cannot be determined."""
    if target is None or not all((folder / TOKENIZER).is_file() for folder in (target, draft)):
        return None
    return tokens_of(target) == tokens_of(draft)
