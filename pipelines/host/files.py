"""Replace files atomically: a reader sees either the old content or the new, even after a run is killed; hash files.

Everything written outside a staging folder of the store goes through here. Inside one, plain writes are enough: the
store renames the whole folder.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypedDict

from pipelines.domain.errors import UserError
from pipelines.domain.progress import Advance

NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems, or pairs of them, without hard links."""
HOST = os.uname().nodename
"""Goes into file names that must differ between machines on a shared file system."""

MOST_SMALL_BYTES = 16 * 2**20
"""Largest config.json or tokenizer_config.json that is read into memory; published ones have up to 200 KiB."""

MANIFEST = "manifest.json"
"""What the store knows of an artifact, in its folder; never part of what a stage makes of it."""


@contextmanager
def disk_faults(message: str, todo: str = "") -> Iterator[None]:
    """Report an error of the disk as a fault: the message, the system's reason, and what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{message}: {error.strerror}.", todo=todo) from None


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a free path beside `target`; on success, the block's output there replaces `target`.

    Missing parent folders are created. If the block raises (Ctrl-C, a full disk), `target` is unchanged and nothing is
    left beside it.
    A file changes in one step. A folder needs two renames; if the second fails, the old folder is put back.
    """
    fresh = target.with_name(f".{target.name}.{HOST}.{os.getpid()}.{threading.get_native_id()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove(fresh)  # left behind by a killed process with the same process id
    try:
        yield fresh
        for path in fresh.rglob("*") if fresh.is_dir() else (fresh,):
            if path.is_file():
                sync(path)
        if fresh.is_dir() and target.is_dir():
            old = fresh.with_name(f"{fresh.name}.old")
            _remove(old)
            target.rename(old)
            try:
                fresh.rename(target)
            finally:
                if not target.exists():
                    old.rename(target)
                _remove(old)
        else:
            fresh.replace(target)
    except OSError as error:
        error.filename = error.filename or str(target)  # write(2) names no file
        raise
    finally:
        _remove(fresh)


def write_bytes(path: Path, content: bytes) -> Path:
    """Replace the content of a file with bytes and return its path."""
    with replacing(path) as fresh:
        fresh.write_bytes(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Replace the content of a file with UTF-8 text, line ends unchanged, and return its path."""
    return write_bytes(path, text.encode())


def write_json(path: Path, value: object, *, sort_keys: bool = True) -> Path:
    """Replace the content of a file with JSON, indented by one space per level, and return its path."""
    return write_text(path, json.dumps(value, indent=1, sort_keys=sort_keys) + "\n")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that others wrote.

    Raises:
        ValueError: it is not JSON, or nested deeper than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def small_text(path: Path, most: int = MOST_SMALL_BYTES) -> str:
    """Read a small UTF-8 file that others wrote.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: it is none to read (a folder, a pipe, a link to nowhere), or is too large.
        ValueError: it is not UTF-8.
    """
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise UserError(f"{path} is not an ordinary file.", todo="Put the file itself there, or remove it.")
        if facts.st_size > most:
            raise UserError(f"{path} has {facts.st_size:,} bytes.", allowed=f"It may have {most:,}.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            raise
        where = f" -> '{path.readlink()}'" if path.is_symlink() else ""
        raise UserError(f"{path}{where} cannot be read: {error.strerror}.", todo="Restore the file.") from None


def json_object(path: Path, most: int = MOST_SMALL_BYTES, *, todo: str = "") -> dict[str, Any]:
    """Read a small JSON object that others wrote.

    Args:
        path: of the file.
        most: bytes that it may have.
        todo: what to do about a file that is none, for messages.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: it cannot be read (see `small_text`), or is not a JSON object.
    """
    try:
        content = parse_json(small_text(path, most))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.", todo=todo) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object: it holds a {type(content).__name__}.", todo=todo)
    return content


def link_to(folder: Path, link: Path) -> None:
    """Point `link` to a folder, replacing its old target.

    The link is relative, so that it leads to the same folder where both are mounted in a container.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.{HOST}.{os.getpid()}")
    fresh.unlink(missing_ok=True)  # left behind by a killed process with the same process id
    fresh.symlink_to(os.path.relpath(folder, link.parent.resolve()))
    fresh.replace(link)


def link_or_copy(source: Path, place: Path) -> bool:
    """Hard-link a file, following symbolic links, or copy it where links are not possible; return whether it is linked.

    Missing folders are created, and what is at the place is replaced.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    origin = source.resolve()
    try:
        os.link(origin, place)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        shutil.copyfile(origin, place)
        return False
    return True


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk, so that they survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# Generated files in a folder: all or none, and never over files changed by hand.

INDEX = ".generated.json"
"""SHA-256 of every file as written; reveals files changed since."""


def write_folder(folder: Path, files: Mapping[str, str], *, command: str, setting: str) -> bool:
    """Make the folder hold exactly these files.

    Returns:
        whether anything changed.

    Raises:
        UserError: the folder has files that were not generated or were changed by hand, or it cannot be written.
    """
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    present = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    index = present.pop(INDEX, None)
    present_digests = {name: sha256_file(path) for name, path in present.items()}
    if present_digests == digests and index is not None:
        return False
    written = json.loads(index.read_text(encoding="utf-8")) if index else {}
    if foreign := sorted(name for name, digest in present_digests.items() if written.get(name) != digest):
        raise UserError(
            f"'{folder}' holds files that `{command}` did not write or that were changed since: {', '.join(foreign)}.",
            todo="Keep changes in another folder; to write this one again, remove these files, or give another folder: "
            f"{setting}=/some/folder",
        )
    todo = f"Give another folder: {setting}=/some/folder"
    with disk_faults(f"{setting}='{folder.parent}' cannot be written", todo), replacing(folder) as fresh:
        for name, text in files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).write_text(text, encoding="utf-8")
        (fresh / INDEX).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    return True


# Symbolic links in folders that come from elsewhere, such as models and adapters.

CACHED = ("models--", "datasets--")
"""How the Hub's client names a repository's folder in its cache; `blobs` and `snapshots` lie in it."""
SHOWN = 3


def check_links(folder: Path, key: str) -> None:
    """Refuse links that lead out of a folder: a model from elsewhere could name any file of this machine.

    Links within the folder are followed, and links into a Hub cache, whose snapshots consist of them. Dangling
    links fail when they are read. Hidden folders are skipped, because nothing reads them.

    Raises:
        UserError: some links lead elsewhere; the message names them.
    """
    root = Path(os.path.realpath(folder))
    outside = []
    for link in _links(folder):
        target = Path(os.path.realpath(link))
        if target.exists() and not target.is_relative_to(root) and not _is_cached(target):
            outside.append(f"{link.relative_to(folder)} -> '{target}'")
    if outside:
        more = f" and {len(outside) - SHOWN} more" if len(outside) > SHOWN else ""
        raise UserError(
            f"{key}='{folder}' has links that lead out of it: {', '.join(outside[:SHOWN])}{more}.",
            allowed="Links are followed only inside the folder and into a Hub cache, because a model could name any "
            "file of this machine.",
            todo="If you trust them, put the files themselves in their places.",
        )


def _links(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in (*folders, *sorted(files)):
            path = Path(parent) / name
            if path.is_symlink():
                yield path


def _is_cached(target: Path) -> bool:
    """Return whether a file belongs to a repository in a Hub cache, `models--org--name/blobs/...` for example."""
    return any(
        repository.name.startswith(CACHED)
        and (repository / "snapshots").is_dir()
        and target.relative_to(repository).parts[0] in ("blobs", "snapshots")
        for repository in target.parents
    )


# SHA-256 of single files, and of a folder against its record. Standard library only, so that planning can use it.

CHUNK_BYTES = 1 << 20
THREADS = 2  # hashlib releases the interpreter lock; more threads than this only make the disk seek


class FileRecord(TypedDict):
    """Record of one file: `size` in bytes and `sha256`, 64 hex digits."""

    size: int
    sha256: str


def sha256_file(path: Path, advance: Advance | None = None) -> str:
    """Return the SHA-256 of a file's content as 64 hex digits."""
    return _digest(hashlib.sha256(), path, advance)


def sha256_on_disk(path: Path, advance: Advance | None = None) -> str:
    """Return the SHA-256 of the file on disk, 64 hex digits, bypassing the page cache.

    Pages that a running process maps stay in memory, and are read from there.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return sha256_file(path, advance)


def git_blob_sha1(path: Path) -> str:
    """Return git's blob hash of a file, 40 hex digits; the Hub's name for files outside large file storage."""
    header = f"blob {path.stat().st_size}\0".encode()
    return _digest(hashlib.sha1(header, usedforsecurity=False), path, None)


def one_at_a_time(advance: Advance) -> Advance:
    """Wrap a progress callback, which is not thread-safe, so that several threads can call it."""
    lock = Lock()

    def locked(amount: float) -> None:
        with lock:
            advance(amount)

    return locked


def _digest(algorithm: Any, path: Path, advance: Advance | None) -> str:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            algorithm.update(buffer[:count])
            if advance is not None:
                advance(count)
    return str(algorithm.hexdigest())
