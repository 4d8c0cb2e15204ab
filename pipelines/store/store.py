"""The store: one folder per artifact, looked up by the inputs it was made from.

An artifact is `<store>/<stage>/<label>-<key>/` with a `manifest.json`. The key covers everything that determines
its bytes; the label is for people. An artifact is written in a staging folder and moved to its place by a single
rename, with the manifest inside, so a folder in its place is always complete, whatever stopped the run that made it.
"""

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from pipelines.document.show import count
from pipelines.domain.benchmark import RESULT, BenchmarkResult
from pipelines.domain.errors import ContinuableError
from pipelines.domain.progress import PARTIAL
from pipelines.host.files import sync, write_json
from pipelines.host.screen import say
from pipelines.store.leases import LEASES, Leases
from pipelines.store.manifest import (
    HASHES,
    MANIFEST,
    HashCache,
    Json,
    check_files,
    read_manifest,
    read_manifests,
    sealed,
)

if TYPE_CHECKING:
    from filelock import FileLock

PENDING = ".pending.json"
"""File in the staging folder of a measurement: the manifest as far as it is known. It is not removed then."""
LOCKS = ".locks"
STAGING = ".drafts"
"""Folder of the store for what is being made, and what was being made when a run was stopped."""
KEY_LENGTH = 16
SET_ASIDE = ".set_aside"
"""Folder of the store for damaged artifacts; nothing reads it."""
_NAMED = re.compile(rf".-[0-9a-f]{{{KEY_LENGTH}}}$")


def canonical(value: object) -> str:
    """Return the canonical JSON text of a value; fails for values without one (NaN, paths, sets)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def fingerprint(value: object) -> str:
    """Return the SHA-256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def content_digest(files: Mapping[str, str]) -> str:
    """Return one digest for a folder, from its files' relative names and SHA-256."""
    return fingerprint(sorted(files.items()))


@dataclass(frozen=True, slots=True)
class Artifact:
    """One finished folder.

    Attributes:
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
        self.hashes = HashCache(self.root / HASHES)
        self.leases = Leases(self.root / LEASES)

    def find(self, stage: str, key: str) -> Artifact | None:
        """Return the finished artifact of a key, or None.

        Raises:
            DamagedError: the artifact exists, but differs from what was written.
        """
        for folder in subfolders(self.root / stage):
            if folder.name.endswith(f"-{key[:KEY_LENGTH]}"):
                manifest = read_manifest(folder)
                if manifest["key"] == key:
                    artifact = Artifact(folder, manifest)
                    self.check(artifact)
                    return artifact
        return None

    def check(self, artifact: Artifact) -> None:
        """Compare the bytes of an artifact with its manifest; files whose hash is known are not read again.

        Raises:
            DamagedError: a file is missing or has other bytes.
        """
        self.hashes.prime([artifact.path / name for name in artifact.manifest["files"]])
        # the second reading is for the case that only the first went wrong
        check_files(artifact.path, artifact.manifest, self.hashes.sha256, self.hashes.from_disk)

    def set_aside(self, folder: Path) -> Path:
        """Move a damaged artifact to where nothing finds it, and return the place; call it while holding its lock."""
        parent = self.root / SET_ASIDE / folder.parent.name
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            place = parent / (f"{folder.name}.{number}" if number else folder.name)
            if not place.exists():
                return folder.rename(place)
        raise AssertionError("unreachable: the count has no end")

    def folders(self) -> list[Path]:
        """Return every folder that is named like an artifact, whatever is in it."""
        stages = [path for path in subfolders(self.root) if not path.name.startswith(".")]
        return sorted(path for stage in stages for path in subfolders(stage) if _NAMED.search(path.name))

    def history(self, stage: str) -> list[Json]:
        """Return the manifests of all artifacts of a stage, newest first, without damaged ones."""
        manifests = read_manifests(subfolders(self.root / stage), []).values()
        return sorted(manifests, key=lambda m: str(m["created"]), reverse=True)

    @contextmanager
    def lock(self, key: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the exclusive right to make the artifact of a key; the system releases it if this process dies."""
        lock, free = self._locked(key)
        if not free:
            on_wait()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _locked(self, key: str) -> "tuple[FileLock, bool]":
        """Return the lock of a key, and whether it was free and is held now."""
        from filelock import FileLock, Timeout  # 26 ms, which a run with nothing to do does not spend

        folder = self.root / LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{key[:KEY_LENGTH]}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return lock, False
        return lock, True

    @contextmanager
    def staging(self, key: str) -> Iterator[Path]:
        """Yield a folder to work in, removed afterwards unless committed, pending, or interrupted and continuable.

        It is empty, or a stopped run's unfinished folder of the same artifact, if that contains `PARTIAL`.

        Call it while holding the key's lock. Each call gets a folder of its own: if the locks of a shared file
        system only work within one host, two hosts may make the same artifact at once. A lease of the same name shows
        others that the folder is in use.
        """
        folder = self.root / STAGING / f"{key[:KEY_LENGTH]}.{token_hex(4)}"
        lease = self.leases.take(folder.name)
        interrupted = False
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            for other in subfolders(folder.parent):
                if other.name.startswith(f"{key[:KEY_LENGTH]}.") and (other / PARTIAL).is_dir():
                    holder = self.leases.find(other.name)
                    if holder is None or not holder.alive:
                        other.rename(folder)
                        break
            else:
                folder.mkdir()
            yield folder
        except (KeyboardInterrupt, SystemExit, ContinuableError):
            interrupted = True
            raise
        finally:
            if not (folder / PENDING).exists() and not (interrupted and (folder / PARTIAL).exists()):
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # it must not hide why the work failed
                lease.end()

    def abandoned_staging(self) -> Iterator[Path]:
        """Yield the staging folders of dead runs; the caller keeps what it wants of each and removes the rest."""
        for folder in subfolders(self.root / STAGING):
            if (lease := self.leases.find(folder.name)) is not None:
                if not lease.alive:
                    yield folder
            else:  # made by a version without leases: the key's lock says whether it still runs
                lock, free = self._locked(folder.name)
                try:
                    if free:
                        yield folder
                finally:
                    lock.release()  # does nothing to a lock that another run holds

    def commit(self, staging: Path, manifest: Json, label: str) -> Artifact:
        """Turn a staging folder into an artifact: hash its files, write the manifest last, rename once.

        Returns:
            the artifact, or that of another host if it finished first (see `staging`).
        """
        paths = sorted(p for p in staging.rglob("*") if p.is_file())
        for path in paths:
            sync(path)
        files = {
            path.relative_to(staging).as_posix(): {"size": path.stat().st_size, "sha256": self.hashes.sha256(path)}
            for path in paths
        }
        digest = content_digest({name: str(entry["sha256"]) for name, entry in files.items()})
        manifest = sealed({**manifest, "files": files, "digest": digest})
        write_json(staging / MANIFEST, manifest)
        target = self.root / manifest["stage"] / f"{label}-{manifest['key'][:KEY_LENGTH]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            staging.rename(target)
        except OSError:
            if other := self.find(manifest["stage"], manifest["key"]):
                return other
            raise
        sync(target.parent)
        return Artifact(target, manifest)


def subfolders(parent: Path) -> list[Path]:
    """Return the folders in a folder by name; none where there is no such folder."""
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


# Keep interrupted measurements and reclaim folders of killed runs: a finished level survives a crash and `kill -9`.
#
# While a stage measures, its staging folder contains `.pending.json`, the manifest as far as it is known. A run that
# fails turns the folder into an artifact marked incomplete. A killed run leaves it behind; the next run, of any
# command, keeps what was measured and removes the rest, and the staging folders of other stages.


@contextmanager
def salvaging(staging: Path, manifest: Json, store: Store) -> Iterator[None]:
    """Measure into `staging`; on failure, the finished levels become an artifact marked incomplete.

    If the disk does not take that artifact, the staging folder stays, for the next run to keep.
    """
    write_json(staging / PENDING, manifest)
    try:
        yield
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        with suppress(OSError):
            if _keep(staging, store, "interrupted" if interrupted else str(error) or type(error).__name__) is None:
                (staging / PENDING).unlink(missing_ok=True)
        raise
    (staging / PENDING).unlink()


def recover(store: Store, *, continuable: bool = True) -> list[Artifact]:
    """Reclaim the staging folders of killed runs and keep their measurements; runs in progress are left alone.

    Args:
        store: the store.
        continuable: leave staging folders that the next run of the same stage continues.
    """
    recovered = []
    with suppress(OSError):  # a full or read-only disk: the measurements stay in the staging folder until the next run
        for staging in store.abandoned_staging():
            if continuable and (staging / PARTIAL).is_dir():
                continue
            if artifact := _keep(staging, store, "the run was killed"):
                recovered.append(artifact)
            shutil.rmtree(staging, ignore_errors=True)
        store.leases.all(sweep=True)
    return recovered


def _keep(staging: Path, store: Store, reason: str) -> Artifact | None:
    """Commit the finished levels, marked incomplete; return None when there are none."""
    try:
        manifest: dict[str, Any] = json.loads((staging / PENDING).read_text())
        result = BenchmarkResult.from_json(json.loads((staging / RESULT).read_text()))
    except (OSError, ValueError):
        return None  # stopped before the first level finished
    if not result.levels:
        return None
    raw = result.to_json() | {"complete": False, "reason": result.reason or reason}
    write_json(staging / RESULT, raw)
    facts = {"levels": len(result.levels), "complete": False, "reason": raw["reason"]}
    manifest |= {"seconds": None, "peak_memory_bytes": None, "facts": facts}
    pending = (staging / PENDING).read_bytes()
    (staging / PENDING).unlink()  # it is not part of the artifact
    try:
        artifact = store.commit(staging, manifest, manifest["label"])
    except OSError:
        (staging / PENDING).write_bytes(pending)
        raise
    say(f"benchmark: kept {count(len(result.levels), 'finished level')}, marked incomplete ({raw['reason']})")
    say(f"  {artifact.path}")
    return artifact
