"""One combination of a sweep and its outcome, as a JSON file that the cell's process writes and everyone else reads.

The file is all that the submitting side and a job share, so no launcher has to transport results, and a result
survives the process that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from eval.results import RESULT
from pipelines.host.files import write_json
from pipelines.plan.targets import Target
from pipelines.stages.evaluate import baseline_of


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One combination.

    Attributes:
        number: from 1, in the order of the command line.
        target: how far it goes.
        overrides: of this combination.
        words: the overrides that differ between cells, for display.
        state: "waiting" until a launcher starts it.
        host: where it runs, or ran.
        machine: facts of that machine, as `Machine.to_json`.
        artifacts: path of each node's artifact, where done.
        model: label of the model.
        variant: its compression as one word.
        reason: why it failed.
        seconds: how long it took.
    """

    number: int
    target: Target
    overrides: tuple[str, ...]
    words: str
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    host: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    model: str = ""
    variant: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the cell is done or failed."""
        return self.state in ("done", "failed")

    @property
    def after(self) -> Path:
        """The cell's result."""
        return Path(self.artifacts["evaluate"]) / RESULT

    @property
    def baseline(self) -> Path | None:
        """Result of the uncompressed model, its own for an uncompressed cell; None if skipped."""
        return baseline_of({name: Path(place) for name, place in self.artifacts.items()}, self.variant)

    @property
    def is_unasked(self) -> bool:
        """Whether its loss was to be judged, and there were no questions."""
        return "evaluate" not in self.artifacts and "baseline.build" in self.artifacts

    def failed(self, reason: str) -> SweepCell:
        """Return a copy marked as failed."""
        return replace(self, state="failed", reason=reason)

    def file(self, folder: Path) -> Path:
        """Return the cell's file in the sweep's folder."""
        return folder / f"cell-{self.number}.json"

    def log(self, folder: Path) -> Path:
        """Return the file with the output of the cell's process, unless that went to the terminal."""
        return folder / f"cell-{self.number}.log"

    def write(self, folder: Path) -> None:
        """Write the cell's file."""
        write_json(self.file(folder), asdict(self))

    def fresh(self, folder: Path) -> SweepCell:
        """Read the cell's current state; it failed if its file was removed (`make clean` while it ran)."""
        try:
            return read(self.file(folder))
        except FileNotFoundError:
            return self.failed(f"{self.file(folder)} was removed while it ran; what it made is in the store")


def cells_of(target: Target, combinations: Sequence[Sequence[str]]) -> list[SweepCell]:
    """Make one cell per combination of overrides."""
    common = set(combinations[0]).intersection(*combinations) if len(combinations) > 1 else set()
    return [
        SweepCell(
            number, target, tuple(words), " ".join(word for word in words if word not in common) or "(as configured)"
        )
        for number, words in enumerate(combinations, 1)
    ]


def read(path: Path) -> SweepCell:
    """Read a cell from its file."""
    raw = json.loads(path.read_text())
    return SweepCell(**{**raw, "overrides": tuple(raw["overrides"])})
