"""The store: one folder per artifact, looked up by the inputs it was made from.

An artifact is `<store>/<stage>/<label>-<key>/` with a `manifest.json`. The key covers everything that determines
its bytes; the label is for people. An artifact is written as a draft elsewhere and moved to its place by a single
rename, with the manifest inside, so a folder in its place is always complete, whatever stopped the run that made it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from pipelines.domain.errors import UserError
from pipelines.host.files import sync, write_json
from pipelines.host.hashing import sha256_file
from pipelines.store.leases import LEASES, Leases

if TYPE_CHECKING:
    from filelock import FileLock

MANIFEST = "manifest.json"
PENDING = ".pending.json"
"""File in the draft of a measurement: the manifest as far as it is known. A draft that still has it is not removed."""
KEY_LENGTH = 16
Json = dict[str, Any]


def canonical(value: object) -> str:
    """Return the canonical JSON text of a value; fails for values without one (NaN, paths, sets)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def fingerprint(value: object) -> str:
    """Return the SHA-256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def content_digest(files: Mapping[str, str]) -> str:
    """Return one digest for a folder, from its files' relative names and SHA-256."""
    return fingerprint(sorted(files.items()))


class HashCache:
    """Cache of SHA-256 hashes of files, valid while a file's size, mtime and inode stay the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[Any]] = {}
        self._dirty = False
        try:
            self._known = json.loads(path.read_text())
        except (OSError, ValueError):
            self._known = {}  # there is none yet, or it cannot be read: losing the cache only costs time

    def sha256(self, path: Path) -> str:
        """Return the SHA-256 of a file, 64 hex digits; reads the file only if its stat is new."""
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self._known.get(str(path))
        if known is None or known[:3] != stamp:
            self._known[str(path)] = known = [*stamp, sha256_file(path)]
            self._dirty = True
        return str(known[3])

    def save(self) -> None:
        """Write new hashes to disk; a store that does not exist, or that is full or read-only, is not an error here."""
        if self._dirty and self._path.parent.is_dir():
            with suppress(OSError):
                write_json(self._path, self._known)
                self._dirty = False


@dataclass(frozen=True, slots=True)
class Artifact:
    """One finished folder.

    Attributes:
        path: the folder.
        manifest: what it was made from, by what and when, and the facts found.
    """

    path: Path
    manifest: Json

    @property
    def digest(self) -> str:
        """Digest of its content, which goes into the keys of later stages."""
        return str(self.manifest["digest"])

    @property
    def facts(self) -> Json:
        """Facts that the stage reported."""
        return dict(self.manifest["facts"])


class Store:
    """All artifacts below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.hashes = HashCache(self.root / ".hashes.json")
        self.leases = Leases(self.root / LEASES)

    def find(self, stage: str, key: str) -> Artifact | None:
        """Return the finished artifact of a key, or None.

        Raises:
            UserError: the artifact exists, but one of its files differs from the manifest.
        """
        for folder in _folders(self.root / stage):
            if folder.name.endswith(f"-{key[:KEY_LENGTH]}"):
                manifest = _read_manifest(folder)
                if manifest is not None and manifest["key"] == key:
                    self._check(folder, manifest)
                    return Artifact(folder, manifest)
        return None

    def history(self, stage: str) -> list[Json]:
        """Return the manifests of all artifacts of a stage, newest first."""
        found = [_read_manifest(folder) for folder in _folders(self.root / stage)]
        return sorted((m for m in found if m), key=lambda m: str(m["created"]), reverse=True)

    def _check(self, folder: Path, manifest: Json) -> None:
        for name, entry in manifest["files"].items():
            path = folder / name
            try:
                stat = path.stat()
            except OSError:
                raise _changed(folder, name, "is missing") from None
            if stat.st_size != entry["size"]:
                raise _changed(folder, name, f"has {stat.st_size} bytes instead of {entry['size']}")
            if stat.st_mtime_ns != entry["mtime_ns"]:
                found = self.hashes.sha256(path)
                if found != entry["sha256"]:
                    raise _changed(folder, name, f"has SHA-256 {found[:12]} instead of {entry['sha256'][:12]}")

    @contextmanager
    def lock(self, key: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the exclusive right to make the artifact of a key; the system releases it if this process dies.

        Args:
            key: key of the artifact.
            on_wait: called once if another run holds the lock.
        """
        from filelock import Timeout

        lock = self._lock(key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_wait()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def try_lock(self, key: str) -> Iterator[bool]:
        """Take the lock of a key without waiting; yields whether it was free."""
        from filelock import Timeout

        lock = self._lock(key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _lock(self, key: str) -> FileLock:
        from filelock import FileLock

        folder = self.root / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{key[:KEY_LENGTH]}.lock")

    @contextmanager
    def draft(self, key: str) -> Iterator[Path]:
        """Yield an empty folder to work in, removed afterwards unless committed or pending.

        Call it while holding the key's lock. No two drafts share a folder: if the locks of a shared file system only work within one host, two hosts may
        make the same artifact at once. Each draft has a lease of the same name, by which others see that it is alive.
        """
        folder = self.root / ".drafts" / f"{key[:KEY_LENGTH]}.{token_hex(4)}"
        lease = self.leases.take(folder.name)
        try:
            folder.mkdir(parents=True)
            yield folder
        finally:
            if not (folder / PENDING).exists():
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # it must not hide why the draft failed
                lease.end()

    def abandoned_drafts(self) -> Iterator[Path]:
        """Yield the drafts whose makers are gone; the caller keeps what it wants of each and removes the rest."""
        for folder in _folders(self.root / ".drafts"):
            if (lease := self.leases.find(folder.name)) is not None:
                if not lease.alive:
                    yield folder
            else:  # made by a version without leases: the key's lock says whether it still runs
                with self.try_lock(folder.name) as free:
                    if free:
                        yield folder

    def commit(self, draft: Path, manifest: Json, label: str) -> Artifact:
        """Turn a draft into an artifact: hash its files, write the manifest last, rename once.

        Returns:
            the artifact, or that of another host if it finished first (see `draft`).
        """
        files: dict[str, Json] = {}
        for path in sorted(p for p in draft.rglob("*") if p.is_file()):
            stat = path.stat()
            files[path.relative_to(draft).as_posix()] = {
                "size": stat.st_size,
                "mtime_ns": stat.st_mtime_ns,
                "sha256": sha256_file(path),
            }
        digest = content_digest({name: entry["sha256"] for name, entry in files.items()})
        manifest = {**manifest, "files": files, "digest": digest}
        for path in draft.rglob("*"):
            if path.is_file():
                sync(path)
        write_json(draft / MANIFEST, manifest)
        target = self.root / manifest["stage"] / f"{label}-{manifest['key'][:KEY_LENGTH]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.rename(target)
        except OSError:
            if other := self.find(manifest["stage"], manifest["key"]):
                return other
            raise
        sync(target.parent)
        return Artifact(target, manifest)


def _folders(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []


def _read_manifest(folder: Path) -> Json | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: Json = json.loads(path.read_text())
    except ValueError:
        raise _changed(folder, MANIFEST, "is not readable JSON") from None
    return manifest


def _changed(folder: Path, name: str, how: str) -> UserError:
    return UserError(
        f"{folder} was changed after it was made: {name} {how}.",
        todo="Put the file back, or remove the folder to make it again:",
        command=("rm", "-r", str(folder)),
    )
