"""Download a model or a data set from the Hub: look up, choose, check, fetch, verify, link."""

import re
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download

from pipelines.checkpoint.tokenizer import VOCABULARIES
from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.domain.language_model import text_config
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import SILENT, Progress
from pipelines.domain.units import show_bytes
from pipelines.host.disk import nearest
from pipelines.host.files import FileRecord, link_or_copy, parse_json, sha256_file
from pipelines.hub.faults import HubFile, HubListing, HubSnapshot, HubSource, check_token, explained, patiently
from pipelines.hub.fetch import fetch, missing_bytes, remember_revision

# Choose the files to download: safetensors, configuration and tokenizer, never anything that can run.

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
QUANTIZED = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quanto_qmap.json")
"""Where libraries state how they quantized a model, if not in config.json."""
SMALL_PATTERNS = (
    CONFIG,
    *QUANTIZED,
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
)
# `*` also matches "/"
DATA_PATTERNS = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt")
RUNNABLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".py", ".h5", ".msgpack", ".joblib")
"""Pickles and other formats that can run code when loaded."""


def check_model(listing: HubListing) -> None:
    """Reject a repository that cannot be a usable model, before anything is fetched.

    Raises:
        UserError: no config.json, no safetensors weights, or no tokenizer; lists everything that is missing.
    """
    names, faults = listing.files, []
    if CONFIG not in names:
        faults.append(Fault(f"{listing.place} has no {CONFIG}.", todo="Give a Hugging Face Transformers model."))
    if INDEX not in names and WEIGHTS not in names:
        faults.append(_no_weights(listing))
    if not any(name in names for name in VOCABULARIES):
        faults.append(Fault(f"{listing.place} has no tokenizer.", f"One of {', '.join(VOCABULARIES)} is needed."))
    refuse(faults)


def check_shape(shape: ModelShape, expected: ModelShape, listing: HubListing) -> None:
    """Compare the repository's model with the configured one.

    Raises:
        UserError: fields differ; the message names each.
    """
    refuse(
        Fault(
            f"{CONFIG} of {listing.place} has {name}={getattr(shape, name)}, "
            f"but the configuration expects {getattr(expected, name)}.",
            todo="Correct the model's configuration, or choose the repository it describes.",
        )
        for name in expected.differences(shape)
    )


def model_files(listing: HubListing, index: Mapping[str, Any] | None) -> list[str]:
    """List the files that make up the model.

    Args:
        listing: files of the repository.
        index: content of model.safetensors.index.json, if the repository has one; it names the shards.

    Raises:
        UserError: shards named by the index are missing.
    """
    small = [name for name in listing.files if any(fnmatch(name, pattern) for pattern in SMALL_PATTERNS)]
    small = [name for name in small if "/" not in name]  # * also matches "/", and subfolders hold other models
    if index is None:
        return [*small, WEIGHTS]
    shards = _shards(listing, index)
    missing = [name for name in shards if name not in listing.files]
    if missing:
        raise UserError(
            f"{INDEX} of {listing.place} names {len(missing)} of {len(shards)} shards that are missing: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}.",
            todo="Unset HF_HUB_OFFLINE once to fetch them."
            if listing.offline
            else "Choose another revision: this upload is incomplete.",
        )
    return [*small, INDEX, *shards]


def dataset_files(listing: HubListing) -> list[str]:
    """List the data files of a repository, none of which can run code.

    Raises:
        UserError: there are none.
    """
    names = [name for name in listing.files if any(fnmatch(name, pattern) for pattern in DATA_PATTERNS)]
    if not names:
        raise UserError(
            f"{listing.place} has no data file that matches {', '.join(DATA_PATTERNS)}.",
            allowed=f"It has {_some(list(listing.files))}; {', '.join(RUNNABLE)} are never read.",
            todo="Choose a data set stored as Parquet, JSON, CSV or text.",
        )
    return names


def _shards(listing: HubListing, index: Mapping[str, Any]) -> list[str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{INDEX} of {listing.place} has no weight_map, so it names no shards.")
    shards = sorted({str(name) for name in weight_map.values()})
    if not all(name.endswith(".safetensors") for name in shards):
        raise UserError(
            f"{INDEX} of {listing.place} names {shards[0]}.",
            allowed="Only safetensors are read.",
        )
    return shards


def _no_weights(listing: HubListing) -> Fault:
    pickles = [name for name in listing.files if name.endswith(RUNNABLE)]
    if pickles:
        return Fault(
            f"{listing.place} has only pickled weights ({_some(pickles)}), which can run code when loaded.",
            "Only safetensors are read.",
            "Choose a repository or revision with model.safetensors, or convert it with save_pretrained().",
        )
    return Fault(
        f"{listing.place} has neither {WEIGHTS} nor {INDEX}.",
        f"It has {_some(list(listing.files))}.",
        "Choose a repository with a complete model in Transformers' layout.",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "no files"


# Look up a repository on the Hub, or in the local cache when HF_HUB_OFFLINE is set.

SHA256 = re.compile(r"[0-9a-f]{64}")
SHA1 = re.compile(r"[0-9a-f]{40}")


def look_up(source: HubSource) -> HubListing:
    """Resolve the revision to a commit and list its files with sizes and hashes.

    Raises:
        UserError: the token, a file's name or a hash is malformed.
    """
    return _from_cache(source) if constants.HF_HUB_OFFLINE else _from_hub(source)


def _from_hub(source: HubSource) -> HubListing:
    check_token()
    info: Any = HfApi().repo_info(
        source.repo_id,
        repo_type=source.repo_type,
        revision=source.revision,
        files_metadata=True,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,  # by default the client waits forever
    )
    files = {sibling.rfilename: _hub_file(source, sibling) for sibling in info.siblings or []}
    license_name = getattr(getattr(info, "card_data", None), "license", None)  # anything else there is not a name
    return HubListing(
        source, str(info.sha), files, offline=False, license=license_name if isinstance(license_name, str) else None
    )


def _hub_file(source: HubSource, sibling: Any) -> HubFile:
    name = str(sibling.rfilename)
    size, etag = (sibling.lfs.size, sibling.lfs.sha256) if sibling.lfs else (sibling.size, sibling.blob_id)
    if size is None or etag is None:
        return HubFile(name, 0, "", large=False)  # hidden without read access; the first fetch reports that
    # Name and hash become parts of local paths, so neither is trusted.
    path, pattern = PurePosixPath(name), SHA256 if sibling.lfs else SHA1
    if path.is_absolute() or ".." in path.parts or not pattern.fullmatch(etag):
        raise UserError(
            f"The Hub lists '{name}' of {source.repo_id} with the hash '{etag}'.",
            allowed="A relative name, and a SHA-256 or git SHA-1 hash.",
            todo="Check that HF_ENDPOINT names the Hub or a mirror that you trust.",
        )
    return HubFile(name, int(size), etag, large=sibling.lfs is not None)


def _from_cache(source: HubSource) -> HubListing:
    # The patterns only tell a client that cached the whole listing which missing files matter.
    patterns = DATA_PATTERNS if source.repo_type == "dataset" else (CONFIG,)
    folder = Path(
        snapshot_download(
            source.repo_id,
            repo_type=source.repo_type,
            revision=source.revision,
            local_files_only=True,
            allow_patterns=list(patterns),
        )
    )
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        # The cache's layout: snapshots/<commit>/<name> is a link to blobs/<etag>. One step only, since a blob may
        # itself be a link into a store shared by repositories, where names are other hashes.
        etag = path.readlink().name if path.is_symlink() else ""
        name = path.relative_to(folder).as_posix()
        files[name] = HubFile(name, path.stat().st_size, etag, bool(SHA256.fullmatch(etag)))
    return HubListing(source, folder.name, files, offline=True)


def download_model(
    source: HubSource, out_dir: Path, *, expected_shape: ModelShape | None, progress: Progress
) -> HubSnapshot:
    """Download a model's configuration, tokenizer and safetensors weights into a folder.

    The files live in the Hub's cache (HF_HOME), where other tools find them and a killed download resumes. Large files
    are hard links into it and must not be written to. The client reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE when
    the process starts.

    Args:
        source: the repository.
        out_dir: the folder, created if missing.
        expected_shape: the shape that config.json must have; None accepts any known architecture.
        progress: shows bytes.

    Raises:
        UserError: something is wrong with the repository, the network, the token, the disk or a file.
    """
    with explained(source):
        listing = patiently(lambda: look_up(source), progress.note)
        check_model(listing)
        stated_in = f"{CONFIG} of {listing.place}"
        shape = ModelShape.from_hf_config(text_config(_read_json(listing, CONFIG), stated_in), stated_in)
        if expected_shape is not None:
            check_shape(shape, expected_shape, listing)
        index = _read_json(listing, INDEX) if INDEX in listing.files else None
        return _deliver(listing, model_files(listing, index), out_dir, progress)


def download_dataset(source: HubSource, out_dir: Path, *, progress: Progress) -> HubSnapshot:
    """Download the data files of a data set into a folder, keeping the repository's subfolders.

    Args:
        source: the repository, of type "dataset".
        out_dir: the folder, created if missing; large files in it are hard links into the Hub's cache.
        progress: shows bytes.

    Raises:
        UserError: as for `download_model`, or no file matches.
    """
    with explained(source):
        listing = patiently(lambda: look_up(source), progress.note)
        return _deliver(listing, dataset_files(listing), out_dir, progress)


def why_not(source: HubSource) -> str:
    """Return why a repository cannot be downloaded, as far as its listing says; empty if it can."""
    try:
        with explained(source):
            patiently(lambda: look_up(source), SILENT.note, longest_s=4)  # a plan does not show that it waits
    except UserError as error:
        return " ".join(fault.message for fault in error.faults)
    return ""


def stated(source: HubSource) -> tuple[Path, int]:
    """Fetch the files that say what a model is, for a plan.

    Returns:
        their folder in the Hub's cache, and the bytes that a download of the model would have.

    Raises:
        UserError: they cannot be had.
    """
    with explained(source):
        listing = patiently(lambda: look_up(source), SILENT.note, longest_s=4)
        check_model(listing)
        files = [listing.files[name] for name in (CONFIG, *QUANTIZED) if name in listing.files]
        folder = fetch(listing, files, SILENT)[CONFIG].parent
        return folder, sum(file.size for name, file in listing.files.items() if fnmatch(name, "model*.safetensors"))


def _read_json(listing: HubListing, name: str) -> Mapping[str, Any]:
    path = fetch(listing, [listing.files[name]], SILENT)[name]
    try:
        content = parse_json(path.read_text())
    except ValueError as error:
        raise UserError(f"{name} of {listing.place} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(
            f"{name} of {listing.place} contains a {type(content).__name__}.", allowed="It must be a JSON object."
        )
    return content


def _deliver(listing: HubListing, names: Sequence[str], out_dir: Path, progress: Progress) -> HubSnapshot:
    files = [listing.files[name] for name in names]
    out_dir.mkdir(parents=True, exist_ok=True)
    _check_space(listing, files, out_dir)
    paths = fetch(listing, files, progress)
    remember_revision(listing)
    _place(files, paths, out_dir, progress)
    records: dict[str, FileRecord] = {
        file.name: {"size": file.size, "sha256": file.etag if file.large else sha256_file(paths[file.name])}
        for file in files
    }
    return HubSnapshot(listing.commit, records, listing.license)


def _check_space(listing: HubListing, files: Sequence[HubFile], out_dir: Path) -> None:
    """Fail before the first byte is fetched if the files will not fit."""
    folder = Path(constants.HF_HUB_CACHE)
    cache = nearest(folder)
    needs = {cache: missing_bytes(listing, files)}
    if cache.stat().st_dev != out_dir.stat().st_dev:
        needs[out_dir] = sum(file.size for file in files)
    for place, needed in needs.items():
        if needed > (free := shutil.disk_usage(place).free):
            raise UserError(
                f"{listing.place} needs {show_bytes(needed)} more space in {place}, which has {show_bytes(free)} free.",
                todo="Free some space, or set HF_HOME to a larger disk."
                if place == cache
                else "Free some space, or set HF_HOME to a folder on this disk, so that links can be used.",
            )


def _place(files: Sequence[HubFile], paths: Mapping[str, Path], out_dir: Path, progress: Progress) -> None:
    """Link large files and copy small ones, which people like to edit."""
    copied = 0
    for file in files:
        target, origin = out_dir / file.name, paths[file.name]
        if file.large:
            copied += 0 if link_or_copy(origin, target) else file.size
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copyfile(origin, target)
    if copied:
        progress.note(
            f"Copied {show_bytes(copied)}, because {out_dir} cannot hold hard links into {constants.HF_HUB_CACHE}."
        )
