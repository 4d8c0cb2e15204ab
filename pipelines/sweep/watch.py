"""Report on cells that run elsewhere: one line whenever something changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pipelines.domain.units import show_seconds
from pipelines.host.paths import relative_to_cwd
from pipelines.host.repeating import repeated
from pipelines.host.screen import say
from pipelines.sweep.cells import SweepCell

LOOK_S = 1.0


class Watch:
    """Reads the files of a sweep's cells and prints what changed."""

    def __init__(self, folder: Path, cells: Sequence[SweepCell]) -> None:
        self.folder = folder
        self.cells = list(cells)
        self._told: dict[int, str] = {}

    def look(self, queued: Mapping[int, str] | None = None) -> list[SweepCell]:
        """Read every unfinished cell and print what changed.

        Args:
            queued: what the cluster reports about cells that have not started, by number: "queued (Priority)".

        Returns:
            all cells in their current state.
        """
        self.cells = [cell if cell.state == "done" else cell.fresh(self.folder) for cell in self.cells]
        changed = False
        for cell in self.cells:
            text = self._text(cell, (queued or {}).get(cell.number, "waiting"))
            if self._told.get(cell.number, "waiting") != text:
                self._told[cell.number] = text
                say(f"[{cell.number}] {text}")
                changed = True
        if changed and not all(cell.ended for cell in self.cells):
            say(f"    {self._counts()}")
        return self.cells

    def _text(self, cell: SweepCell, waiting: str) -> str:
        if cell.state == "running":
            return f"running on {cell.host}: {cell.words}, log {relative_to_cwd(cell.log(self.folder))}"
        if cell.state == "done":
            return f"done in {show_seconds(cell.seconds)}: {cell.words}"
        if cell.state == "failed":
            return f"failed: {cell.words}"
        return waiting

    def _counts(self) -> str:
        states = ("waiting", "running", "done", "failed")
        counts = {state: sum(cell.state == state for cell in self.cells) for state in states}
        return ", ".join(f"{count} {state}" for state, count in counts.items() if count)

    def meanwhile(self) -> AbstractContextManager[None]:
        """Poll while a launcher works in the `with` block."""
        return repeated(self.look, LOOK_S, "sweep-watch")
