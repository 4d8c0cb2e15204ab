"""Inputs on the user's disk: model folders, texts, data sets. Inspected while planning, never copied."""

import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.checkpoint.adapter_files import CONFIG, WEIGHTS, AdapterFiles
from pipelines.checkpoint.tensors import read_header
from pipelines.checkpoint.tokenizer import BESIDE_WEIGHTS, Tokens, check_files, tokens_of
from pipelines.checkpoint.tokenizer_folder import MOST_TOKENIZER_BYTES, TOKENIZER
from pipelines.domain.adapter import Adapter
from pipelines.domain.errors import Fault, UserError, collecting, refuse, shown
from pipelines.domain.formats import BY_QUANT_ALGO, KvFormat, stored_as
from pipelines.domain.language_model import language_config, whole
from pipelines.domain.mixture_layers import was_grouped
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import rope_as_read
from pipelines.domain.units import MIB
from pipelines.domain.variant import Variant
from pipelines.host.files import check_links, json_object, parse_json, small_text
from pipelines.settings.base import HUB_NAME
from pipelines.settings.model import ModelSettings
from pipelines.store.manifest import HashCache
from pipelines.store.store import content_digest

MODEL_PATTERNS = (
    *("config.json", "hf_quant_config.json", "*.safetensors", "*.safetensors.index.json"),
    *BESIDE_WEIGHTS,
)
"""The files of a Hugging Face folder that determine what is made from it."""
MOST_INDEX_BYTES = 64 * MIB
"""Largest index of safetensors; that of 1,000 experts in 100 layers has 20 MiB."""
HF_FOLDER = "a Hugging Face folder: config.json, tokenizer.json and *.safetensors"
READING = "\0reading"
"""Stands among a folder's files for `InputSource.reading`; no file has this name."""
PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")
OTHER_LAYOUTS = {
    "*.gguf": ("GGUF, llama.cpp's format", "Give the Hugging Face folder that it was made from."),
    "params.json": (
        "the layout of Mistral or Meta",
        "Give the Hugging Face folder, or convert it with transformers' convert_mistral_weights_to_hf.py or "
        "convert_llama_weights_to_hf.py.",
    ),
    "adapter_config.json": (
        "a LoRA adapter",
        "Serve it beside its base model (lora=adapters), or merge it with peft's merge_and_unload().",
    ),
    "rank*.safetensors": ("a TensorRT-LLM checkpoint", "Give the Hugging Face folder that it was made from."),
    "rank*.engine": ("a TensorRT engine", "Set engine.path to it, and model.path to the model it was built from."),
    "openvino_model.xml": ("an OpenVINO model", "Give the Hugging Face folder that it was made from."),
    "*.onnx": ("an ONNX model", "Give the Hugging Face folder that it was made from."),
    "*.npz": ("an older layout of MLX", "Give the Hugging Face folder that it was made from."),
    "*.nemo": ("a NeMo archive", "Convert it to a Hugging Face folder with NeMo's exporter."),
}
"""Files that only other layouts have -> the layout, and what to do."""


@dataclass(frozen=True, slots=True)
class InputSource:
    """One input folder or file.

    Attributes:
        files: the files that count.
        key: setting that names it.
        reading: what counts beside the files, as text: how they are read where they do not say so themselves.
    """

    path: Path
    digest: str
    files: tuple[Path, ...] = ()
    key: str = ""
    reading: str = ""

    def check(self, hashes: HashCache) -> None:
        """Check that the files are still those whose digest went into the keys.

        Raises:
            UserError: a file has changed since, or cannot be read any more.
        """
        if self.files and _digest(self.path, self.files, hashes, self.key, self.reading) != self.digest:
            raise UserError(
                f"{self.key}='{self.path}' changed while this ran.",
                todo="Run the same command again when nothing writes to it any more; finished stages are kept.",
            )


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that the user already has, as its config.json describes it."""

    flavour: str
    variant: Variant
    tp_size: int
    pp_size: int
    grouped_experts: bool = False


def engine_source(folder: Path, hashes: HashCache) -> tuple[InputSource, BuiltEngine]:
    """Inspect an engine folder.

    Raises:
        UserError: the folder does not exist, or has no readable config.json of an engine.
    """
    source = files_source(folder, hashes, "engine.path")
    config = source.path / "config.json"
    try:
        return source, _built(parse_json(config.read_text(encoding="utf-8")), config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise UserError(
            f"engine.path='{folder}' is not an engine: it has no config.json with pretrained_config and build_config.",
            todo="Give a folder that trtllm-build or `make build` wrote.",
        ) from None


def _built(raw: Any, config: Path) -> BuiltEngine:
    """Read an engine's config.json; a malformed one raises the error of the failing access."""
    pretrained, _ = raw["pretrained_config"], raw["build_config"]
    mapping, quantization = pretrained.get("mapping") or {}, pretrained.get("quantization") or {}
    quant_algo, kv_algo = quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo")
    if quant_algo not in BY_QUANT_ALGO:
        raise UserError(
            f"{config} has quant_algo={shown(quant_algo)}, which is not supported.",
            allowed=f"Supported: {', '.join(str(algo) for algo in BY_QUANT_ALGO)}.",
        )
    qformat = stored_as(quant_algo, bool(quantization.get("pre_quant_scale")))
    variant = Variant(quant=qformat.value, kv_cache=kv_algo.lower() if kv_algo else KvFormat.AUTO.value)
    flavour = str(raw.get("engine", {}).get("flavour", "tensorrt_llm"))
    tp_size, pp_size = int(mapping.get("tp_size", 1)), int(mapping.get("pp_size", 1))
    if tp_size < 1 or pp_size < 1:
        raise ValueError
    return BuiltEngine(flavour, variant, tp_size, pp_size, was_grouped(raw))


def model_source(
    folder: Path, hashes: HashCache, key: str = "model.path", *, weights: bool = True
) -> tuple[InputSource, ModelShape]:
    """Inspect a local Hugging Face folder.

    Args:
        folder: with config.json, safetensors and a tokenizer.
        hashes: cache, so that each file is hashed only once.
        key: setting that names the folder, for messages.
        weights: whether the weights are needed; if only the tokenizer is, they may be missing.

    Returns:
        the source and the model's shape.

    Raises:
        UserError: the folder is not a model, or a file cannot be read; the message says what is missing.
    """
    if (folder / "config.json").exists():
        check_links(folder, key)
    config = model_config(folder, key)
    shape = ModelShape.from_hf_config(config, str(folder / "config.json"))  # before anybody fetches missing weights
    if weights:
        _check_weights(folder, key)
    meant = _is_meant if weights else Path.is_file
    files = sorted({path for pattern in MODEL_PATTERNS for path in folder.glob(pattern) if meant(path)})
    for path in files:  # before hashing, which takes long for large files
        if path.suffix != ".safetensors" and path.exists():
            size = path.stat().st_size
            if size > (most := MOST_INDEX_BYTES if path.name.endswith(".index.json") else MOST_TOKENIZER_BYTES):
                raise UserError(f"{path} has {size:,} bytes.", allowed=f"It may have {most:,}.")
    return _source(folder, files, hashes, key, _reading(config)), shape


def _reading(config: Mapping[str, Any]) -> str:
    """Return a marker for inputs that earlier versions read differently, so artifacts are not reused; "" for none."""
    reading: dict[str, Any] = {"rope": rope} if (rope := rope_as_read(config)) else {}
    block = config.get("quantization_config")
    if isinstance(block, Mapping) and block.get("quant_method") == "gptq" and block.get("sym") is False:
        reading["zero_points"] = "of whole words"
    return json.dumps(reading) if reading else ""


def shape_of(model: ModelSettings) -> ModelShape | None:
    """Return the shape of a model, as it is stated or as its folder has it; None if it is not on this machine.

    Raises:
        UserError: config.json is missing, not JSON, or of a model that is not built.
    """
    if model.shape is not None:
        return model.shape.to_shape()
    return None if model.folder is None else ModelShape.from_hf_config(model_config(model.folder))


def model_config(folder: Path, key: str = "model.path") -> dict[str, Any]:
    """Read config.json of a local Hugging Face folder; that of the language model if it is one part of the model.

    Raises:
        UserError: the file is missing or not JSON.
    """
    if folder.is_file():
        _refuse_other_layout([folder], folder, key)
    if not folder.is_dir():
        name = _hub_name(folder)
        hub = f" For a model of the Hub: model=hub model.hub_id={name}" if name else ""
        raise UserError(f"{key}='{folder}' is not a folder.", todo=f"Give a Hugging Face model folder.{hub}")
    config = folder / "config.json"
    if not config.is_file():
        _refuse_other_layout(folder.iterdir(), folder, key)
        below = sorted(f"'{file.parent}'" for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.json"))
        raise UserError(
            f"{key}='{folder}' is not a Hugging Face model: it has no config.json.",
            todo=f"These folders below it have one: {', '.join(below[:3])}." if below else f"Give {HF_FOLDER}.",
        )
    content = json_object(config)
    if "architectures" not in content:  # checkpoints and engines have a config.json of their own
        _refuse_other_layout(folder.iterdir(), folder, key)
    if (architecture := whole(content)) is None:
        return content
    if key != "model.path":
        raise UserError(f"{key}='{folder}' is a whole {architecture}.", todo="Give the folder of a text model.")
    return language_config(content, str(config))


def _refuse_other_layout(files: Iterable[Path], place: Path, key: str) -> None:
    """Refuse a model in another known layout, by name."""
    for path in sorted(files):
        for pattern, (layout, todo) in OTHER_LAYOUTS.items():
            if path.match(pattern):
                raise UserError(
                    f"{key}='{place}' is {layout} ({path.name}), which is not read.",
                    allowed=f"It takes {HF_FOLDER}.",
                    todo=todo,
                )


LONGEST_NAME = 255
"""Bytes of a file's name, at most, on Linux."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def is_pointer(path: Path) -> bool:
    """Return whether a file is the pointer that `git clone` leaves without Git LFS, instead of the file itself."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def _pointer_error(key: str, folder: Path, path: Path) -> UserError:
    return UserError(
        f"{key}='{folder}': {path.name} is a Git LFS pointer of {path.stat().st_size} bytes, not the file itself.",
        todo="Run `git lfs pull` in the folder, or download the model with `hf download`.",
    )


def _check_weights(folder: Path, key: str) -> None:
    """Compare the header of every safetensors file with its size, and the index with the files."""
    paths = sorted(folder.glob("*.safetensors"))
    if odd := [path for path in paths if path.exists() and not path.is_file()]:
        raise UserError(f"{odd[0]} is not an ordinary file.", todo="Put the file itself there, or remove it.")
    if files := [path for path in paths if path.is_file()]:
        faults: list[Fault] = []
        tensors = 0
        for path in files:
            with collecting(faults):
                if is_pointer(path):
                    raise _pointer_error(key, folder, path)
                tensors += len(read_header(path))
        for index in sorted(folder.glob("*.safetensors.index.json")):
            with collecting(faults):
                _check_index(folder, index, key)
        refuse(faults)
        if not tensors:
            raise UserError(
                f"{key}='{folder}' has no tensors: the header of {files[0].name} is empty.",
                todo="Download the model again.",
            )
        return
    if paths:
        return  # links that lead nowhere, which reading the files reports
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{key}='{folder}' has only pickled weights ({pickles[0]}), which can run code when loaded.",
            allowed="Only safetensors are read.",
            todo="Convert it with transformers' save_pretrained().",
        )
    _refuse_other_layout(folder.iterdir(), folder, key)
    raise UserError(f"{key}='{folder}' has no *.safetensors file.")


def _check_index(folder: Path, index: Path, key: str) -> None:
    try:
        needed = sorted(set(parse_json(small_text(index, MOST_INDEX_BYTES))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} is not an index of safetensors: it has no weight_map.") from None
    for name in needed:
        plain = isinstance(name, str) and Path(name).name == name and "\0" not in name
        if not plain or len(name.encode(errors="replace")) > LONGEST_NAME:
            raise UserError(
                f"{index} names {shown(name)}, which is not the name of a file in its folder.",
                todo="Download the model again.",
            )
    if missing := [name for name in needed if not (folder / name).exists() and not (folder / name).is_symlink()]:
        raise UserError(
            f"{key}='{folder}' lacks {len(missing)} of the {len(needed)} files that {index.name} names: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}.",
            todo="Download the model again.",
        )


def check_tokenizer(folder: Path, key: str) -> Tokens:
    """Check that a model folder has a tokenizer.json, as far as it can be seen without loading it; return its tokens.

    Raises:
        UserError: there is none, or one of its files is empty, damaged or a Git LFS pointer.
    """
    check_files(folder)
    path = folder / TOKENIZER
    if path.is_file() and is_pointer(path):
        raise _pointer_error(key, folder, path)
    if path.is_file() and path.stat().st_size == 0:
        raise UserError(f"{key}='{folder}': {TOKENIZER} is empty.", todo="Download the model's tokenizer again.")
    return tokens_of(folder)


def files_source(
    path: Path, hashes: HashCache, key: str, only: Sequence[str] = (), *, texts: bool = False
) -> InputSource:
    """Inspect a file, or all files of a folder except hidden ones, or `only` those with these names.

    Args:
        path: file or folder.
        hashes: remembers digests.
        key: the setting, for messages.
        only: names of files in the folder.
        texts: whether texts are read from it, without the byte order mark of a .txt file, which once was part of them.

    Raises:
        UserError: the path does not exist, is empty, or contains a file that cannot be read.
    """
    path = path.absolute()
    if path.is_file():
        return _source(path, [path], hashes, key, _marked([path]) if texts else "")
    if not path.is_dir():
        raise UserError(f"{key}='{path}' does not exist.", todo=f"Give a file or a folder.{_by_hand(path)}")
    candidates = [path / name for name in only] or path.rglob("*")
    files = sorted(p for p in candidates if _is_meant(p) and not p.name.startswith("."))
    if not files:
        raise UserError(f"{key}='{path}' is an empty folder.")
    return _source(path, files, hashes, key, _marked(files) if texts else "")


def adapter_source(folder: Path, hashes: HashCache, key: str) -> tuple[InputSource, Adapter]:
    """Inspect a LoRA adapter written by peft, without reading a weight.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors; nothing else in it counts.
        hashes: cache, so that each file is hashed only once.
        key: setting that names the folder, for messages.

    Raises:
        UserError: the folder was not written by peft, its weights are pickled, or it is more than LoRA matrices.
    """
    path = folder.absolute()
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        todo = f"Give a folder that peft's save_pretrained() wrote.{_by_hand(folder)}"
        raise UserError(f"{key}='{folder}' {state}.", todo=todo)
    check_links(path, key)
    adapter = AdapterFiles.read(path, f"{key}='{folder}'").described  # before hashing, which takes long for large files
    return files_source(path, hashes, key, only=(CONFIG, WEIGHTS)), replace(adapter, place=str(folder))


def _hub_name(path: Path) -> str:
    """Return org/name if a path that does not exist may be meant as a repository of the Hub, else an empty string."""
    name = os.path.relpath(path)
    return name if "/" in name and HUB_NAME.fullmatch(name) else ""


def _by_hand(path: Path) -> str:
    name = _hub_name(path)
    return f" For a repository of the Hub, first: hf download {name} --local-dir FOLDER" if name else ""


def _marked(files: Iterable[Path]) -> str:
    """Return how files with a byte order mark are read; empty if there are none."""
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            if path.suffix.lower() == ".txt" and file.read(len(BOM_UTF8)) == BOM_UTF8:
                return "without byte order mark"
    return ""


def _is_meant(path: Path) -> bool:
    """Return whether a path is a file or a dangling link, which must be reported instead of skipped."""
    return path.is_file() or not path.exists()


def _source(root: Path, files: Sequence[Path], hashes: HashCache, key: str, reading: str = "") -> InputSource:
    hashes.prime(files)
    return InputSource(root, _digest(root, files, hashes, key, reading), tuple(files), key, reading)


def _digest(root: Path, files: Sequence[Path], hashes: HashCache, key: str, reading: str = "") -> str:
    """Return the digest of a folder's files and their relative names, or of a single file regardless of its name."""
    digests = {}
    for file in files:
        try:
            digests["" if file == root else file.relative_to(root).as_posix()] = hashes.sha256(file)
        except OSError as error:
            where = f" -> '{file.readlink()}'" if file.is_symlink() else ""
            raise UserError(
                f"{key}='{root}': {file.name}{where} cannot be read ({error.strerror}).",
                todo="Restore the file, or remove this entry from the folder.",
            ) from None
    return content_digest(digests | ({READING: reading} if reading else {}))
