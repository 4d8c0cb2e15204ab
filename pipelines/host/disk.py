"""Errors of a disk in the user's words: full, read-only, failing, or gone."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.domain.errors import UserError


@dataclass(frozen=True, slots=True)
class _Trouble:
    """One way in which a disk fails.

    Attributes:
        codes: error numbers.
        texts: how native libraries say it in exceptions of their own, which carry no number.
        message: what happened, after `{what}`, at `{place}`.
        todo: what helps.
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
        (errno.EACCES, errno.EPERM, errno.EROFS),
        ("Read-only file system",),
        "no permission to write {place}.",
        "Give another folder: paths.store=/some/folder",
    ),
    _Trouble(
        (errno.EIO,),
        ("Input/output error",),
        "the disk of {place} fails: input/output error (EIO).",
        "The kernel's log (dmesg) names the device. Copy what you need from it, and give another folder: "
        "paths.store=/some/folder",
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
        if (said := disk_error(error, what, place)) is None:
            raise
        raise said from error


def disk_error(error: Exception, what: str, place: Path) -> UserError | None:
    """Return the error in the user's words if it is one of a disk."""
    trouble = next((each for each in _TROUBLES if _is(error, each)), None)
    if trouble is None or isinstance(error, UserError):
        return None
    reason = getattr(error, "strerror", None) or error
    where = getattr(error, "filename", None) or place
    return UserError(f"{what} stopped: {trouble.message.format(place=where, reason=reason)}", todo=trouble.todo)


def _is(error: Exception, trouble: _Trouble) -> bool:
    """Return whether the error is this one: by number, or by the text of a native library's own exception."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in trouble.codes
    return any(text in str(error) for text in trouble.texts)
