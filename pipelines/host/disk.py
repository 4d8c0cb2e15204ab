"""Errors of a disk in the user's words: full, read-only, failing, or gone."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.domain.errors import Fault, UserError, refuse


@dataclass(frozen=True, slots=True)
class _Trouble:
    """One way in which a disk fails.

    Attributes:
        texts: how native libraries say it in exceptions of their own, which carry no number.
        message: what happened, after `{what}`, at `{place}`.
    """

    codes: tuple[int, ...]
    texts: tuple[str, ...]
    message: str
    todo: str


GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ESHUTDOWN)
"""Errors of a file system that was unmounted or whose server does not answer."""
_TROUBLES = (
    _Trouble(
        (errno.ENOSPC, errno.EDQUOT),
        ("No space left on device", "Disk quota exceeded"),
        "the disk of {place} is full.",
        "Free some space and run the same command again; finished stages are kept.",
    ),
    _Trouble(
        (errno.EFBIG,),
        ("File too large",),
        "{place} would be larger than a file may be here.",
        "`ulimit -f` shows the limit of this shell; on FAT it is 4 GiB. Raise it, or give another folder: {elsewhere}",
    ),
    _Trouble(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        ("Read-only file system",),
        "no permission to read or write {place}.",
        "Give another folder: {elsewhere}",
    ),
    _Trouble(
        (errno.EIO,),
        ("Input/output error",),
        "the disk of {place} fails: input/output error (EIO).",
        "The kernel's log (dmesg) names the device. Copy what you need from it, and give another folder: {elsewhere}",
    ),
    _Trouble(
        GONE,
        ("Transport endpoint is not connected", "Software caused connection abort", "Stale file handle"),
        "the file system of {place} is gone ({reason}).",
        "Mount it again and run the same command again; finished stages are kept.",
    ),
)


@contextmanager
def disk_errors(what: str, place: Path) -> Iterator[None]:
    """Turn errors of a disk into a UserError, whichever library raised them.

    Args:
        what: what stopped, e.g. "Stage build".
        place: named where the error itself names no file.
    """
    try:
        yield
    except Exception as error:
        if (fault := disk_error(error, what, place)) is None:
            raise
        raise fault from error


def why_not_written(file: Path, size: int) -> OSError | None:
    """Return why the disk does not take a file of `size` bytes, for libraries that do not say it; None if it does."""
    try:
        with file.open("wb") as probe:
            os.posix_fallocate(probe.fileno(), 0, size)
    except OSError as error:
        error.filename = str(file)
        return error
    finally:
        file.unlink(missing_ok=True)
    return None


def disk_error(
    error: Exception, what: str, place: Path, elsewhere: str = "paths.store=/some/folder"
) -> UserError | None:
    """Return the error in the user's words if it is one of a disk; `elsewhere` sets another folder."""
    code = error.errno if isinstance(error, OSError) else None

    def is_this(trouble: _Trouble) -> bool:  # a native library's own exception has a text instead of a number
        return any(text in str(error) for text in trouble.texts) if code is None else code in trouble.codes

    trouble = next(filter(is_this, _TROUBLES), None)
    if trouble is None or isinstance(error, UserError):
        return None
    reason = getattr(error, "strerror", None) or error
    # of a copy or a rename the file that is written
    where = getattr(error, "filename2", None) or getattr(error, "filename", None) or place
    return UserError(
        f"{what} stopped: {trouble.message.format(place=where, reason=reason)}",
        todo=trouble.todo.format(elsewhere=elsewhere),
    )


# Paths as messages show them, and whether a folder can be where a setting puts it.


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


def check_folders(folders: Mapping[str, Path], *, read: Mapping[str, Path] | None = None) -> None:
    """Check that everything can be written where settings put it; nothing is created.

    Args:
        folders: by the setting that names each.
        read: likewise, those that are only read, so that they need not be writable.

    Raises:
        UserError: a file or a dangling link is in the place of a folder, the path is too long, or it is not writable.
    """
    refuse(no_folders({**(read or {}), **folders}) + unwritable_folders(folders))


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
        if not why_no_folder(folder.absolute()) and not is_writable(folder.absolute())
    ]


def nearest(folder: Path) -> Path:
    """Return an absolute folder, or the nearest of its parents that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def is_writable(folder: Path) -> bool:
    """Return whether this user can write an absolute folder, or make it where its nearest existing parent is."""
    parent = nearest(folder)
    # nobody makes anything in /proc, although root has every permission there
    return os.access(parent, os.W_OK | os.X_OK) and parent.stat().st_dev != Path("/proc").stat().st_dev
