"""Download a model or a data set from the Hub: look up, choose, check, fetch, verify, link."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import Progress, SilentProgress
from pipelines.domain.units import show_bytes
from pipelines.host.files import parse_json
from pipelines.host.hashing import FileRecord, sha256_file
from pipelines.hub import choice
from pipelines.hub.faults import explained
from pipelines.hub.fetch import fetch, missing_bytes, remember_revision
from pipelines.hub.listing import look_up
from pipelines.hub.source import HubFile, HubListing, HubSnapshot, HubSource

NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


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
        listing = look_up(source)
        choice.check_model(listing)
        shape = ModelShape.from_hf_config(_read_json(listing, choice.CONFIG), f"{choice.CONFIG} of {listing.place}")
        if expected_shape is not None:
            choice.check_shape(shape, expected_shape, listing)
        index = _read_json(listing, choice.INDEX) if choice.INDEX in listing.files else None
        return _deliver(listing, choice.model_files(listing, index), out_dir, progress)


def download_dataset(
    source: HubSource, out_dir: Path, *, patterns: Sequence[str] | None = None, progress: Progress
) -> HubSnapshot:
    """Download the data files of a data set into a folder, keeping the repository's subfolders.

    Args:
        source: the repository, of type "dataset".
        out_dir: the folder, created if missing; large files in it are hard links into the Hub's cache.
        patterns: of file names, where `*` also matches "/"; None means `choice.DATA_PATTERNS`.
        progress: shows bytes.

    Raises:
        UserError: as for `download_model`, or no file matches.
    """
    with explained(source):
        listing = look_up(source)
        return _deliver(listing, choice.dataset_files(listing, patterns), out_dir, progress)


def why_not(source: HubSource) -> str:
    """Return why a repository cannot be downloaded, as far as its listing says; empty if it can."""
    try:
        with explained(source):
            look_up(source)
    except UserError as error:
        return " ".join(fault.message for fault in error.faults)
    return ""


def _read_json(listing: HubListing, name: str) -> Mapping[str, Any]:
    path = fetch(listing, [listing.files[name]], SilentProgress())[name]
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
    records = {file.name: _record(file, paths[file.name]) for file in files}
    return HubSnapshot(listing.commit, records, listing.license)


def _check_space(listing: HubListing, files: Sequence[HubFile], out_dir: Path) -> None:
    """Fail before the first byte is fetched if the files will not fit.

    Raises:
        UserError: the cache's disk is too small, or the folder's disk is, if the folder cannot link into the cache.
    """
    cache = _existing(Path(constants.HF_HUB_CACHE))
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


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _place(files: Sequence[HubFile], paths: Mapping[str, Path], out_dir: Path, progress: Progress) -> None:
    """Link large files and copy small ones, which people like to edit."""
    copied = 0
    for file in files:
        target, origin = out_dir / file.name, paths[file.name].resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if file.large and _link(origin, target):
            continue
        shutil.copyfile(origin, target)
        copied += file.size if file.large else 0
    if copied:
        progress.note(
            f"Copied {show_bytes(copied)}, because {out_dir} cannot hold hard links into {constants.HF_HUB_CACHE}."
        )


def _link(origin: Path, target: Path) -> bool:
    try:
        os.link(origin, target)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        return False
    return True


def _record(file: HubFile, path: Path) -> FileRecord:
    return {"size": file.size, "sha256": file.etag if file.large else sha256_file(path)}
