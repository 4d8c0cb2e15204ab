"""Cut a text at a stop string, even if the string arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text through, holding back only what may become a stop string.

    The engine stops at tokens, which may begin before the stop string or end after it; OpenAI's answers end before it.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """Take the stop strings, and whether the one that ends the text is shown."""
        self._stops, self._keep = tuple(stops), keep
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Add a piece and return the text that can be shown so far."""
        if self.stopped:
            return ""
        text = self._held + text
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            place, stop = min(places)
            return text[: place + len(stop) if self._keep else place]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Return what was held back, once no more text arrives."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
