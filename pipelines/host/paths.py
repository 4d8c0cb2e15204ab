"""Paths as messages show them, and whether a folder can be where a setting puts it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipelines.domain.errors import Fault, UserError
from pipelines.host.disk import GONE


def relative_to_cwd(path: Path) -> str:
    """Return the path relative to the current folder where it lies inside it, and unchanged elsewhere."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def why_no_folder(folder: Path) -> str:
    """Return why there can be no folder at a path: "/etc/hosts is a file"; empty if there is one or it can be made."""
    for path in (folder, *folder.parents):
        try:
            path.lstat()
            if path.is_symlink() and not path.exists():
                return f"{path} is a link to {path.readlink()}, which does not exist"
            return "" if path.stat() and path.is_dir() else f"{path} is a file"
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "strerror", None) or error)
            return f"the file system is gone ({reason})" if getattr(error, "errno", None) in GONE else reason
    return ""


def _is_writable(folder: Path) -> bool:
    """Return whether a folder is writable; before it exists, its nearest existing parent decides."""
    return os.access(next(path for path in (folder, *folder.parents) if path.exists()), os.W_OK | os.X_OK)


def check_folders(folders: Mapping[str, Path], *, read: Mapping[str, Path] | None = None) -> None:
    """Check that everything can be written where settings put it; nothing is created.

    Args:
        folders: by the setting that names each.
        read: likewise, those that are only read, so that they need not be writable.

    Raises:
        UserError: a file or a dangling link is in the place of a folder, the path is too long, or it is not writable.
    """
    if faults := no_folders({**(read or {}), **folders}) + unwritable_folders(folders):
        raise UserError.of(faults)


def no_folders(folders: Mapping[str, Path]) -> list[Fault]:
    """List the folders that cannot be, on any machine with these files."""
    reasons = {key: why_no_folder(folder.absolute()) for key, folder in folders.items()}
    return [
        Fault(f"{key}='{folders[key]}' cannot be created: {why}.", todo="Give another folder.")
        for key, why in reasons.items()
        if why
    ]


def unwritable_folders(folders: Mapping[str, Path]) -> list[Fault]:
    """List the folders that this user cannot write or create."""
    return [
        Fault(f"{key}='{folder}' is not writable.", todo="Give another folder.")
        for key, folder in folders.items()
        if not why_no_folder(folder.absolute()) and not _is_writable(folder.absolute())
    ]
