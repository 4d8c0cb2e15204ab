"""Progress of long work, independent of how it is displayed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[float], None]

PARTIAL = ".partial"
"""Folder in an unfinished output whose making can be continued; it is removed when the output is complete."""


class Progress(Protocol):
    """A display on which long work reports its progress."""

    def task(self, title: str, total: float | None, unit: str = "") -> AbstractContextManager[Advance]:
        """Open one line; the yielded function advances it by an amount of `unit`.

        Args:
            title: of the work, e.g. "calibrating".
            total: amount of work, or None if unknown.
            unit: of the amount: "batches", "layers", "bytes", "questions".
        """
        ...

    def note(self, text: str) -> None:
        """Show one permanent line."""
        ...


class SilentProgress:
    """Shows nothing; for tests and for callers without a screen."""

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        yield lambda _amount: None

    def note(self, text: str) -> None:
        """See `Progress.note`."""


SILENT = SilentProgress()
"""Default of functions that programs without a screen call, too."""
