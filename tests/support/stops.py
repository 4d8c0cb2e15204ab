"""A display of progress that stops the work, as Ctrl-C does."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.domain.progress import Advance, SilentProgress


class Stops(SilentProgress):
    """Raises KeyboardInterrupt after some steps of one task.

    Attributes:
        notes: what was said.
    """

    def __init__(self, title: str, steps: int) -> None:
        """Stop after `steps` of the task whose title begins so; never if it is negative."""
        self._title, self._left = title, steps
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep what is said."""
        self.notes.append(text)

    @contextmanager
    def task(self, title: str, total: int | None, unit: str = "") -> Iterator[Advance]:
        """Count the steps of the task."""

        def advance(_amount: float) -> None:
            if title.startswith(self._title):
                self._left -= 1
                if not self._left:
                    raise KeyboardInterrupt

        yield advance
