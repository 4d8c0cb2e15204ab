"""Show the progress of loading models while a server starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.domain.progress import Advance, Progress
from pipelines.domain.units import show_seconds
from pipelines.serving.logs import LOADED, LOADING

STILL_LOADING_S = 15.0  # interval at which a silent wait reports that it continues


@dataclass(slots=True)
class LoadWatch:
    """Turns a growing log into progress.

    Attributes:
        advance: of the task that counts models.
        progress: for reports on a long wait.
        limit_s: how long the wait may take.
    """

    advance: Advance
    progress: Progress
    limit_s: float
    _loaded: int = 0
    _told_s: float = 0.0

    def update(self, lines: Sequence[str], elapsed_s: float) -> None:
        """Update from the log as it is `elapsed_s` after the start."""
        loaded = {match["model"] for line in lines if (match := LOADED.search(line))}
        if len(loaded) > self._loaded:
            self.advance(len(loaded) - self._loaded)
            self._loaded, self._told_s = len(loaded), elapsed_s
        elif elapsed_s - self._told_s >= STILL_LOADING_S:
            self._told_s = elapsed_s
            waiting = ", ".join(loading_now(lines)) or "the server"
            self.progress.note(f"{waiting}: {show_seconds(elapsed_s)} of at most {show_seconds(self.limit_s)}")


def loading_now(lines: Sequence[str]) -> list[str]:
    """List the models that have begun loading and not finished."""
    begun = dict.fromkeys(match["model"] for line in lines if (match := LOADING.search(line)))
    ended = {match["model"] for line in lines if (match := LOADED.search(line))}
    return [model for model in begun if model not in ended]
