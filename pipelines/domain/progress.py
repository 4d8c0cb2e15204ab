"""How long work tells that it is alive, without knowing who shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[float], None]


class Progress(Protocol):
    """A place where long work shows how far it is."""

    def task(self, title: str, total: float | None, unit: str = "") -> AbstractContextManager[Advance]:
        """Open one line; the yielded function advances it by an amount of `unit`.

        Args:
            title: what is being done, e.g. "calibrating".
            total: amount of work, or None when unknown.
            unit: what is counted: "batches", "layers", "bytes", "questions".
        """
        ...

    def note(self, text: str) -> None:
        """Show one line that stays."""
        ...


class SilentProgress:
    """Shows nothing; for tests and for callers that have no screen."""

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        yield lambda _amount: None

    def note(self, text: str) -> None:
        """See `Progress.note`."""
