"""The manifest of an artifact: what it was made from, the SHA-256 of every file, and a checksum of the manifest itself.

An artifact whose bytes differ from its manifest is damaged, through an edit or through disk corruption.
"""

import hashlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

from pipelines.domain.errors import Fault, UserError, collecting
from pipelines.domain.progress import Advance
from pipelines.host.files import MANIFEST as MANIFEST
from pipelines.host.files import THREADS, one_at_a_time, sha256_file, sha256_on_disk, write_json
from pipelines.host.screen import ScreenProgress

CHECKSUM = "checksum"
Json = dict[str, Any]


class DamagedError(UserError):
    """An artifact differs from its manifest.

    Attributes:
        damage: the verdict and the first difference: "was changed after it was made: config.json is missing".
    """

    def __init__(
        self,
        folder: Path,
        damage: str,
        manifest: object = None,
        mend: str = "Put the file back",
        verdict: str = "was changed after it was made",
    ) -> None:
        """Name the artifact, how to mend it, and the command that makes it again as far as its manifest can be read."""
        self.folder, self.damage = folder, f"{verdict}: {damage}"
        todo = f"{mend}, or remove the folder to make it again:"
        command: tuple[str, ...] = ("rm", "-r", str(folder))
        if repeat := _repeat(manifest):
            made_from = manifest.get("made_from") if isinstance(manifest, dict) else None
            if isinstance(made_from, dict) and "measured_at" in made_from:  # repeated, it makes another artifact
                todo = f"{mend}, or remove the folder and measure again ({shlex.join(repeat)}):"
            else:
                todo, command = f"{mend}, or make it again:", repeat
        super().__init__(f"{folder} {self.damage}.", todo=todo, command=command)


def sealed(value: Mapping[str, Any]) -> Json:
    """Return a JSON object with a checksum of its other keys, as it will be read back."""
    plain: Json = json.loads(json.dumps({key: each for key, each in value.items() if key != CHECKSUM}))
    return {**plain, CHECKSUM: _checksum(plain)}


def seal_is_right(value: object) -> bool:
    """Return whether a JSON object is as `sealed` returned it."""
    return isinstance(value, dict) and CHECKSUM in value and value[CHECKSUM] == _checksum(value)


def read_manifest(folder: Path) -> Json:
    """Read the manifest of an artifact.

    Raises:
        DamagedError: it is missing or unreadable, or was altered.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(folder, f"{MANIFEST} is missing") from None
    except OSError as error:
        raise DamagedError(folder, f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise DamagedError(folder, f"{MANIFEST} is not readable JSON") from None
    if isinstance(manifest, dict) and CHECKSUM not in manifest:
        damage = f"{MANIFEST} has no checksum of its own, as early versions wrote it"
        raise DamagedError(folder, damage, manifest, "Leave it unused", "cannot be verified")
    if not seal_is_right(manifest):
        raise DamagedError(folder, f"{MANIFEST} does not match its own checksum", manifest)
    return dict(manifest)


def read_manifests(folders: Iterable[Path], faults: list[Fault]) -> dict[Path, Json]:
    """Return the manifest of each artifact that has a sound one, and append the faults of the others."""
    manifests = {}
    for folder in folders:
        with collecting(faults):
            manifests[folder] = read_manifest(folder)
    return manifests


def check_files(folder: Path, manifest: Mapping[str, Any], *hashes: Callable[[Path], str]) -> None:
    """Compare every file of an artifact with its manifest.

    Args:
        folder: of the artifact.
        manifest: as `read_manifest` returned it.
        hashes: ways to get the SHA-256 of a file; a file is damaged if none of them gives the right one.

    Raises:
        DamagedError: a file is missing, cannot be read, or has other bytes, or one was added.
    """
    for name, entry in manifest["files"].items():
        try:
            damage = _damage(folder / name, entry, hashes)
        except FileNotFoundError:
            damage = "is missing"
        except OSError as error:
            damage = f"cannot be read ({error.strerror})"
        if damage is not None:
            raise DamagedError(folder, f"{name} {damage}", manifest)
    if added := [name for name in unlisted_files(folder, manifest) if not HARMLESS.fullmatch(name)]:
        named = f"{', '.join(added[:3])}{', ...' if len(added) > 3 else ''}"
        raise DamagedError(
            folder, f"{named} {'was' if len(added) == 1 else 'were'} added", manifest, "Remove what was added"
        )


HARMLESS = re.compile(r"(.*/)?(__pycache__/.*|\.nfs[0-9a-f]+|\.DS_Store)")
"""Files beside those of an artifact that nothing reads as part of it: Python's, and those of file systems."""


def _damage(path: Path, entry: Mapping[str, Any], hashes: Sequence[Callable[[Path], str]]) -> str | None:
    size, digest = path.stat().st_size, ""
    if size != entry["size"]:
        return f"has {size} bytes instead of {entry['size']}"
    for sha256 in hashes:
        if (digest := sha256(path)) == entry["sha256"]:
            return None
    return f"has SHA-256 {digest[:12]} instead of {entry['sha256'][:12]}"


def unlisted_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the files that were added to an artifact after it was made."""
    names = (
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()
    )
    return sorted(name for name in names if name != MANIFEST and name not in manifest["files"])


def _checksum(value: Mapping[str, Any]) -> str:
    rest = {key: each for key, each in value.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _repeat(manifest: object) -> tuple[str, ...]:
    """Return the command that made an artifact, as a list; empty if its manifest has none."""
    repeat = manifest.get("repeat") if isinstance(manifest, dict) else None
    try:
        return tuple(shlex.split(repeat)) if isinstance(repeat, str) else ()
    except ValueError:
        return ()


# Hashes of files, kept between runs, so that a file is not read by every run.

HASHES = ".hashes.json"
"""File of the store."""
TRUSTED_S = 30 * 24 * 3600
TICK_NS = 20_000_000
"""Times of files advance in steps of the kernel's clock, which are 10 ms at most."""
MUCH_BYTES = 1 << 30
"""Reading this much takes long enough to be shown, and to be shared by threads."""
_Hash = Callable[[Path], str]


class HashCache:
    """Cache of the SHA-256 of files, valid for a month while a file's size, modification and change time stay the same.

    No program can set the change time back, so bytes written in place are noticed even if the modification time was
    restored. Silent disk corruption changes no time: hence the month, and `from_disk`. Files are known by
    device and inode, so that hard links, and a store that is mounted elsewhere, share an entry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes = _load(path)
        self._dirty = False

    def sha256(self, path: Path) -> str:
        """Return the SHA-256 of a file, 64 hex digits; reads the file only if its stat is new."""
        return self._remembered(path) or self._read(path, sha256_file)

    def from_disk(self, path: Path, advance: Advance | None = None) -> str:
        """Return the SHA-256 of the file on disk, 64 hex digits."""
        return self._read(path, lambda path: sha256_on_disk(path, advance))

    def prime(self, paths: Iterable[Path]) -> None:
        """Read those of many files whose hash is not known, several at a time, and show it if it takes long."""
        unknown = [path for path in paths if path.is_file() and self._remembered(path) is None]
        total = sum(path.stat().st_size for path in unknown)
        if total < MUCH_BYTES:
            return  # they are read when they are asked for
        stop = Event()
        with ScreenProgress().task("checking files", total, "bytes") as show, ThreadPoolExecutor(THREADS) as pool:

            def advance(amount: float) -> None:
                if stop.is_set():
                    raise InterruptedError
                locked(amount)

            def read(path: Path) -> None:
                try:
                    self._read(path, lambda path: sha256_file(path, advance))
                except OSError:
                    return  # hashing it later reports that it is unreadable

            locked = one_at_a_time(show)
            try:
                list(pool.map(read, unknown))
            except BaseException:
                stop.set()
                raise

    def save(self) -> None:
        """Write new hashes to disk; a store that does not exist, or that is full or read-only, is not an error here."""
        if self._dirty and self._path.parent.is_dir():
            hashes = {**_load(self._path), **self._hashes}  # another run may have saved hashes in between
            with suppress(OSError):
                write_json(self._path, sealed({"files": hashes}))
                self._dirty = False

    def _remembered(self, path: Path) -> str | None:
        """Return the known hash of a file that has not changed since it was read."""
        name, stamp = _identity(path)
        size, mtime, ctime, read_at, sha256 = self._hashes.get(name, [None] * 5)
        if [size, mtime, ctime] != stamp or not _is_recent(read_at):
            return None
        return str(sha256)

    def _read(self, path: Path, sha256: _Hash) -> str:
        name, stamp = _identity(path)
        age = time.time_ns() - stamp[2]
        if 0 <= age < TICK_NS:  # a later change could get the same time
            time.sleep((TICK_NS - age) / 1e9)
        digest = sha256(path)
        if _identity(path) == (name, stamp):
            self._hashes[name] = [*stamp, int(time.time()), digest]
            self._dirty = True
        return digest


def _identity(path: Path) -> tuple[str, list[int]]:
    """Return the identity of a file, and the fields that every change of it changes."""
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}", [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _is_recent(read_at: int) -> bool:
    return 0 <= time.time() - read_at < TRUSTED_S


def _load(path: Path) -> dict[str, list[Any]]:
    """Read the hashes that are still valid; none if the file is unreadable, which only costs time."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not seal_is_right(saved):
        return {}
    return {name: entry for name, entry in saved["files"].items() if _is_recent(entry[3])}
