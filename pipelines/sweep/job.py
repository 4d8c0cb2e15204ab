"""Run one cell in a process of its own, for any launcher.

One process per cell, whatever the launcher: memory, GPUs and MPI are free again for the next cell, a crash ends nothing
else, and a sweep behaves the same wherever it runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipelines.host.child import child_process
from pipelines.host.screen import say
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.sweep.cells import SweepCell, read

STOP_S = 30.0  # time for a stopped cell to drain its server and remove drafts


@dataclass(frozen=True)
class RunCell:
    """Hydra's task function; pickled by launchers that start it elsewhere.

    Attributes:
        folder: of the sweep, on a disk that submitter and jobs share.
        files: of the cells, in the order of the jobs.
        shown: whether the cell prints to this terminal rather than to its log.
    """

    folder: Path
    files: tuple[Path, ...]
    shown: bool

    def __call__(self, _config: Any) -> None:
        """Run the cell of this job to the end."""
        from hydra.core.hydra_config import HydraConfig

        file = self.files[HydraConfig.get().job.num]
        if not file.is_file():
            say(f"{file} was removed, so its cell does not run")
            return
        cell = read(file)
        if self.shown:
            say(f"\n[{cell.number}] {cell.words}")
        code = self._run(cell)
        after = cell.fresh(self.folder)
        if not after.ended:
            after = after.failed(f"its process ended with {_how(code)}")
            after.write(self.folder)
        if self.shown and after.state == "failed":
            say(f"failed: {after.reason}")

    def _run(self, cell: SweepCell) -> int:
        command = [sys.executable, "-m", "pipelines.sweep.cell", str(cell.file(self.folder))]
        python_path = os.pathsep.join([str(PROJECT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": python_path}
        with (
            self._output(cell) as out,
            child_process(command, grace_s=STOP_S, stdout=out, stderr=out, env=env) as process,
        ):
            return process.wait()

    @contextmanager
    def _output(self, cell: SweepCell) -> Iterator[IO[bytes] | None]:
        if self.shown:
            yield None
        else:
            with cell.log(self.folder).open("ab") as file:
                yield file


def _how(code: int) -> str:
    """Describe an exit code, with a hint where the kernel may have run out of memory."""
    if code >= 0:
        return f"exit code {code} and no result"
    hint = ", which the kernel sends when memory runs out" if -code == signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{hint}"
