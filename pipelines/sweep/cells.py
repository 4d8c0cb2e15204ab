"""One combination of a sweep and its outcome, as a JSON file that the cell's process writes and everyone else reads.

The file is all that the submitting side and a job share, so no launcher has to transport results, and a result
survives the process that wrote it.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from eval.results import RESULT
from pipelines.domain.units import show_seconds
from pipelines.host.disk import relative_to_cwd
from pipelines.host.files import write_json
from pipelines.host.lifetimes import child_process, end_with, repeated
from pipelines.host.screen import say, tell
from pipelines.plan.targets import Target
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.stages.evaluate import baseline_of


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One combination.

    Attributes:
        number: from 1, in the order of the command line.
        target: how far it goes.
        words: the overrides that differ between cells, for display.
        state: "waiting" until a launcher starts it.
        host: where it runs, or ran.
        machine: facts of that machine, as `Machine.to_json`.
        artifacts: path of each node's artifact, where done.
        variant: its compression as one word.
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

    def failed(self, reason: str) -> "SweepCell":
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

    def fresh(self, folder: Path) -> "SweepCell":
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


# Report on cells that run elsewhere: one line whenever something changes.

POLL_S = 1.0


class Watch:
    """Reads the files of a sweep's cells and prints the changes."""

    def __init__(self, folder: Path, cells: Sequence[SweepCell]) -> None:
        self.folder = folder
        self.cells = list(cells)
        self._shown_text: dict[int, str] = {}

    def poll(self, queued: Mapping[int, str] | None = None) -> list[SweepCell]:
        """Read every unfinished cell and print the changes.

        Args:
            queued: what the cluster reports about cells that have not started, by number: "queued (Priority)".

        Returns:
            all cells in their current state.
        """
        self.cells = [cell if cell.state == "done" else cell.fresh(self.folder) for cell in self.cells]
        changed = False
        for cell in self.cells:
            text = self._text(cell, (queued or {}).get(cell.number, "waiting"))
            if self._shown_text.get(cell.number, "waiting") != text:
                self._shown_text[cell.number] = text
                say(f"[{cell.number}] {text}")
                changed = True
        if changed and not all(cell.ended for cell in self.cells):
            counts = Counter[str](cell.state for cell in self.cells)
            states = ("waiting", "running", "done", "failed")
            say("    " + ", ".join(f"{counts[state]} {state}" for state in states if counts[state]))
        return self.cells

    def _text(self, cell: SweepCell, waiting: str) -> str:
        if cell.state == "running":
            return f"running on {cell.host}: {cell.words}, log {relative_to_cwd(cell.log(self.folder))}"
        if cell.state == "done":
            return f"done in {show_seconds(cell.seconds)}: {cell.words}"
        if cell.state == "failed":
            return f"failed: {cell.words}"
        return waiting

    def meanwhile(self) -> AbstractContextManager[None]:
        """Poll while a launcher works in the `with` block."""
        return repeated(self.poll, POLL_S, "sweep-watch")


# Run one cell in a process of its own, for any launcher.
#
# One process per cell, whatever the launcher: memory, GPUs and MPI are free again for the next cell, a crash ends
# nothing else, and a sweep behaves the same wherever it runs.

STOP_S = 90.0  # time for a stopped cell to drain its server and remove staging folders


def run_process(cell: SweepCell, folder: Path, *, shown: bool = False, timeout_s: float | None = None) -> SweepCell:
    """Run a cell in a process of its own to the end, and return its result; without one it has failed.

    Args:
        cell: as its file in `folder` has it.
        folder: of the sweep.
        shown: whether it prints to this terminal rather than to its log.
        timeout_s: seconds after which it is stopped.

    Raises:
        subprocess.TimeoutExpired: it was stopped.
    """
    command = [sys.executable, "-m", "pipelines.sweep.cell", str(cell.file(folder))]
    python_path = os.pathsep.join([str(PROJECT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": python_path}
    with (
        nullcontext() if shown else cell.log(folder).open("ab") as out,
        child_process(command, grace_s=STOP_S, stdout=out, stderr=out, env=env) as process,
    ):
        code = process.wait(timeout_s)
    after = cell.fresh(folder)
    if not after.ended:
        after = after.failed(f"its process ended with {_how(code)}")
        after.write(folder)
    return after


@dataclass(frozen=True)
class RunCell:
    """Hydra's task function; pickled by launchers that start it elsewhere.

    Attributes:
        folder: of the sweep, on a disk that submitter and jobs share.
        files: of the cells, in the order of the jobs.
        shown: whether the cell prints to this terminal rather than to its log.
        submitter: process on this machine that this one must not outlive, if it is another.
    """

    folder: Path
    files: tuple[Path, ...]
    shown: bool
    submitter: int | None = None

    def __call__(self, _config: Any) -> None:
        """Run the cell of this job to the end."""
        from hydra.core.hydra_config import HydraConfig

        if self.submitter is not None:
            end_with(self.submitter)
        file = self.files[HydraConfig.get().job.num]
        if not file.is_file():
            tell(f"{file} was removed, so its cell does not run")
            return
        cell = read(file)
        if self.shown:
            say(f"\n[{cell.number}] {cell.words}")
        after = run_process(cell, self.folder, shown=self.shown)
        if self.shown and after.state == "failed":
            tell(f"failed: {after.reason}")


def _how(code: int) -> str:
    """Describe an exit code, with a hint where the kernel may have run out of memory."""
    if code >= 0:
        return f"exit code {code} and no result"
    hint = ", which the kernel sends when memory runs out" if -code == signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{hint}"
