"""The manifest of an artifact: what it was made from, the SHA-256 of every file, and a checksum of the manifest itself.

An artifact whose bytes differ from its manifest is damaged, through an edit or through disk corruption.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.domain.errors import Fault, UserError
from pipelines.host.files import MANIFEST as MANIFEST

CHECKSUM = "checksum"
Json = dict[str, Any]


class DamagedError(UserError):
    """An artifact differs from its manifest.

    Attributes:
        damage: the first difference, e.g. "config.json is missing".
    """

    def __init__(self, folder: Path, damage: str, manifest: object = None, mend: str = "Put the file back") -> None:
        """Name the artifact, how to mend it, and the command that makes it again as far as its manifest can be read."""
        self.folder, self.damage = folder, damage
        todo = f"{mend}, or remove the folder to make it again:"
        command: tuple[str, ...] = ("rm", "-r", str(folder))
        if repeat := _repeat(manifest):
            made_from = manifest.get("made_from") if isinstance(manifest, dict) else None
            if isinstance(made_from, dict) and "measured_at" in made_from:  # repeated, it makes another artifact
                todo = f"{mend}, or remove the folder and measure again ({shlex.join(repeat)}):"
            else:
                todo, command = f"{mend}, or make it again:", repeat
        super().__init__(f"{folder} was changed after it was made: {damage}.", todo=todo, command=command)


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
    if not seal_is_right(manifest):
        raise DamagedError(folder, f"{MANIFEST} does not match its own checksum", manifest)
    return dict(manifest)


@dataclass(frozen=True, slots=True)
class Manifests:
    """Manifests of several artifacts, read together."""

    whole: Mapping[Path, Json]
    faults: tuple[Fault, ...]

    @classmethod
    def read(cls, folders: Sequence[Path]) -> Manifests:
        """Read the manifest in each folder."""
        whole: dict[Path, Json] = {}
        faults: list[Fault] = []
        for folder in folders:
            try:
                whole[folder] = read_manifest(folder)
            except DamagedError as error:
                faults += error.faults
        return cls(whole, tuple(faults))


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
