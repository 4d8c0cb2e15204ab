"""Inspect what the user has on disk while planning: models, engine, adapters, texts, questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from eval.dataset import read_own
from eval.fidelity.config import TEXTS
from eval.spec import BUNDLED as BUNDLED_TASKS
from pipelines.checkpoint.tensors import read_header
from pipelines.checkpoint.tokenizer import tokens_of
from pipelines.checkpoint.tokenizer_folder import TOKENIZER
from pipelines.compress.config import ABOUT
from pipelines.compress.texts import load_texts
from pipelines.domain.adapter import Adapter
from pipelines.domain.errors import Fault, UserError, collecting
from pipelines.domain.formats import FORMATS, KvFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.engines.registry import EngineDescription
from pipelines.host.machine import Machine
from pipelines.plan.targets import EVALUATED, Target, compares, compares_server, has_fidelity, is_elsewhere
from pipelines.predict.performance.gpus import resolved
from pipelines.rules.record import DeploymentFacts, Images
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.settings.root import Settings
from pipelines.store.adapters import adapter_source
from pipelines.store.hash_cache import HashCache
from pipelines.store.links import check_links
from pipelines.store.sources import (
    PICKLES,
    BuiltEngine,
    InputSource,
    check_tokenizer,
    engine_source,
    files_source,
    model_config,
    model_source,
)
from triton_repo.tensors import BLS


@dataclass(frozen=True)
class Found:
    """The inputs found on disk.

    Attributes:
        sources: folders and files by the names under which stages read them.
        shape: of the model; None if it is not on disk.
        reference: shape of another model to compare predictions with.
        rotary: how the model encodes positions; likewise.
        built: facts of the engine given with engine.path.
        draft: shape of the draft model.
        draft_rotary: how the draft model encodes positions.
        same_vocabulary: whether draft and target have the same tokens; None if one of them is not on disk.
        pickled_heads: names of files with pickled weights in speculative.heads_path.
        heads_bytes: size of all files with weights there; None without trained heads.
        adapters: by task id.
        few_texts: texts of the user's calibration data, if they are fewer than `ENOUGH_TEXTS`.
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


def look(settings: Settings, target: Target, hashes: HashCache) -> Found:
    """Inspect every folder and file that the configuration names.

    Raises:
        UserError: some are missing or wrong; all of them are named at once.
    """
    sources: dict[str, InputSource] = {}
    adapters: dict[int, Adapter] = {}
    shape, rotary, built, draft, draft_rotary, same, vision, few = None, None, None, None, None, None, None, None
    reference: ModelShape | None = None
    faults: list[Fault] = []
    elsewhere = is_elsewhere(settings, target)
    if folder := settings.model.folder:
        with collecting(faults):
            weights = settings.engine.path is None and not elsewhere
            sources["model"], shape = model_source(folder, hashes, weights=weights)
            rotary = Rotary.of(model_config(folder))
        if folder.is_dir() and _reads_text(settings, target):
            with collecting(faults):
                check_tokenizer(folder, "model.path")
    if settings.engine.path is not None:
        with collecting(faults):
            sources["engine"], built = engine_source(settings.engine.path, hashes)
    for name, (key, path) in _places(settings, target).items():
        with collecting(faults):
            sources[name] = _source(name, path, hashes, key)
    if settings.speculative.draft and settings.speculative.draft.folder and not elsewhere:
        with collecting(faults):
            folder = settings.speculative.draft.folder
            sources["draft"], draft = model_source(folder, hashes, key="speculative.draft.path")
            draft_rotary = Rotary.of(model_config(folder))
            same = same_vocabulary(settings.model.folder, folder)
    with collecting(faults):
        reference = _reference(settings, target, sources, hashes)
    if settings.multimodal.path is not None and "vision" in sources:
        with collecting(faults):
            vision = vision_bytes(sources["vision"].path)
    for task, folder in settings.lora.adapters.items() if not elsewhere else ():
        with collecting(faults):
            sources[f"lora.{task}"], adapters[task] = adapter_source(folder, hashes, f"lora.adapters.{task}")
    with collecting(faults):
        few = _read_texts(settings, target, sources)
    if settings.eval.path is not None and "dataset" in sources:
        with collecting(faults):
            read_own(sources["dataset"].path, settings.eval)
    if faults:
        raise UserError.of(faults)
    heads = _pickles(settings.speculative.heads_path), _heads_bytes(settings.speculative.heads_path)
    return Found(sources, shape, built, draft, same, *heads, adapters, vision, rotary, draft_rotary, few, reference)


def _reference(
    settings: Settings, target: Target, sources: dict[str, InputSource], hashes: HashCache
) -> ModelShape | None:
    """Add another model to compare predictions with to the sources, and return its shape; None without one."""
    path, key = settings.fidelity.reference_path, "fidelity.reference_path"
    if path is None or not compares(settings, target):
        return None
    folder = path.absolute()
    sources["reference_model"], shape = model_source(folder, hashes, key)
    check_tokenizer(folder, key)
    return shape


def _read_texts(settings: Settings, target: Target, sources: Mapping[str, InputSource]) -> int | None:
    """Read the beginnings of the user's texts; return what `few_texts` says of the calibration data."""
    if "text.user" in sources:
        few_texts(sources["text.user"].path, settings.fidelity.column)
    given = settings.calibration
    if given.source != "local" or "calibration" not in sources or not _calibrates(settings, target):
        return None
    return few_texts(sources["calibration"].path, given.column, given.size)


ENOUGH_TEXTS = 64
"""With fewer calibration texts the observed ranges of activations depend on the choice of texts."""


def few_texts(source: Path, column: str, size: int = 0) -> int | None:
    """Return the number of texts if they are fewer than `ENOUGH_TEXTS`; the first `size` are read, or that many.

    Raises:
        UserError: there are none, or one of them cannot be read.
    """
    count = sum(1 for _ in load_texts(source, size=max(size, ENOUGH_TEXTS), column=column))
    return count if count < ENOUGH_TEXTS else None


def _calibrates(settings: Settings, target: Target) -> bool:
    """Return whether texts are observed: by quantization of model or draft, by pruning, SparseGPT or training."""
    if settings.engine.path is not None or is_elsewhere(settings, target):
        return False
    formats = [*settings.quant.formats, settings.speculative.draft_qformat]
    return (
        any(FORMATS[each].calibrated for each in formats if each is not None)
        or settings.kv_cache.dtype != KvFormat.AUTO
        or settings.sparsity.method == "sparsegpt"
        or settings.prune.prunes
        or settings.recover.trains
    )


def text_notes(settings: Settings, target: Target, engine: EngineDescription) -> tuple[str, ...]:
    """Name the texts that are observed, and those that predictions are compared on."""
    calibration, fidelity = settings.calibration, settings.fidelity
    notes = []
    if _calibrates(settings, target):
        elsewhere = calibration.path or f"{calibration.dataset} on the Hub"
        notes.append(f"calibration text: {ABOUT.get(calibration.source, elsewhere)}")
    if has_fidelity(settings, target, engine) or compares_server(settings, target):
        names = [name for name in fidelity.texts or () if name != "calibration" or not calibration.shipped]
        notes.append(f"fidelity text: {', '.join([*names, *([str(fidelity.path)] if fidelity.path else [])])}")
    return tuple(notes)


def _reads_text(settings: Settings, target: Target) -> bool:
    """Return whether a stage needs the model's tokenizer."""
    return target != "build" or _calibrates(settings, target)


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
    return tuple(sorted(path.name for pattern in PICKLES for path in heads.glob(pattern))) if heads else ()


def _heads_bytes(heads: Path | None) -> int | None:
    """Return the bytes of the weights of trained heads, which are 16 bit on disk as in the engine."""
    if heads is None:
        return None
    files = {path for pattern in ("*.safetensors", *PICKLES) for path in heads.glob(pattern)}
    return sum(path.stat().st_size for path in files) or None


def _places(settings: Settings, target: Target) -> dict[str, tuple[str, Path]]:
    """Map each input name to (the setting that names it, its path)."""
    return {name: (key, path) for name, key, path in _named(settings, target) if path is not None}


FOREIGN = ("heads", "vision")
"""Inputs that others have made, besides models and adapters; texts and questions are the user's own."""


def _source(name: str, path: Path, hashes: HashCache, key: str) -> InputSource:
    if name in FOREIGN:
        check_links(path, key)
    return files_source(path, hashes, key, texts=name in ("calibration", "text.user"))


def _named(settings: Settings, target: Target) -> Iterator[tuple[str, str, Path | None]]:
    calibration, evaluated = settings.calibration, target in EVALUATED
    shipped = calibration.shipped
    yield "calibration", "calibration" if shipped else "calibration.path", shipped or calibration.path
    yield "teacher", "recover.teacher", settings.recover.teacher
    if evaluated and settings.eval.dataset_path is None and settings.eval.task in BUNDLED_TASKS:
        yield "dataset", "eval", PROJECT_ROOT / "eval" / "mini_mmlu" / "data"
    elif evaluated and settings.eval.path is not None:
        yield "dataset", "eval.path", settings.eval.path
    elif evaluated:
        yield "dataset", "eval.dataset_path", settings.eval.dataset_path
    if compares(settings, target):
        for name, path in settings.fidelity.shipped.items():
            yield f"text.{name}", "fidelity", path
        yield "text.user", "fidelity.path", settings.fidelity.path
    if target == "diagnose":
        yield "text.bundled", "diagnose", TEXTS["bundled" if settings.model.is_bundled else "prose"]
        for name, path in settings.diagnose.given.items():
            yield name, f"diagnose.{name}", path
    yield "heads", "speculative.heads_path", settings.speculative.heads_path
    yield "vision", "multimodal.path", settings.multimodal.path


def same_vocabulary(target: Path | None, draft: Path) -> bool | None:
    """Return whether two model folders have the same tokens with the same ids; None where that cannot be determined."""
    if target is None:
        return None
    if not all((folder / TOKENIZER).is_file() for folder in (target, draft)):
        return None
    return tokens_of(target) == tokens_of(draft)


# Turn settings into the record that the rules judge.


def deployment(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, machine: Machine, found: Found
) -> DeploymentFacts:
    """Return the facts of the planned deployment, for the rules."""
    target = resolved(settings.hardware, machine)
    guess, images = settings.speculative, settings.multimodal
    return DeploymentFacts(
        needs_gpu=engine.needs_gpu,
        writes_engine=engine.writes_engine,
        label=settings.model.label,
        shape=shape,
        qformat=settings.quant.qformat,
        candidates=settings.quant.mixed,
        dtype=settings.quant.dtype,
        kv_format=settings.kv_cache.dtype,
        group_size=settings.quant.group_size,
        sparsity=settings.sparsity.method,
        sm=target.sm,
        gpus_per_server=target.gpus_per_server,
        kv_reuse=settings.kv_cache.enable_block_reuse,
        chunked_context=settings.runtime.enable_chunked_context,
        build=settings.build,
        triton=settings.triton,
        dynamic_quantization=settings.engine.openvino.dynamic_quantization,
        through_bls=settings.benchmark.model_name == BLS,
        speculation=guess.mode,
        draft=found.draft or guess.draft_shape,
        draft_depth=guess.num_heads or guess.num_layers,
        same_vocabulary=found.same_vocabulary,
        pickled_heads=found.pickled_heads,
        adapters=found.adapters,
        images=(
            Images(images.model_type, images.visual_tokens, images.images_per_request)
            if images.visual_tokens is not None and images.model_type != "none"
            else None
        ),
        rotary=found.rotary,
    )
