"""Process of one cell: `python -m pipelines.sweep.cell FILE` plans, runs and writes the result into FILE."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from pipelines.domain.errors import UserError, is_interruption
from pipelines.host.lifetimes import end_with, on_hangup
from pipelines.host.machine import Machine, gather
from pipelines.plan.plan import make_plan
from pipelines.plan.targets import MEASURED
from pipelines.run.session import run_target
from pipelines.settings.compose import load
from pipelines.store.store import Store
from pipelines.sweep.cells import SweepCell, read


def main(file: Path) -> int:
    """Run the cell that a file describes.

    Returns:
        0 if it is done, 1 if it failed, 130 if it was stopped.
    """
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    on_hangup(stop)
    end_with(os.getppid())  # a cell must not outlive its launcher
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see pipelines/__main__.py
    begin, machine = time.monotonic(), gather()
    cell = replace(read(file), state="running", host=os.uname().nodename, machine=machine.to_json(), reason="")
    cell.write(file.parent)
    try:
        cell = _run(cell, machine)
    except UserError as error:
        cell = cell.failed(str(error))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - its traceback is in the run's log
        cell = cell.failed(STOPPED if is_interruption(error) else f"crashed: {type(error).__name__}: {error}")
    replace(cell, seconds=round(time.monotonic() - begin, 1)).write(file.parent)
    if cell.state == "done":
        return 0
    return 130 if cell.reason == STOPPED else 1


STOPPED = "it was stopped early (Ctrl-C, scancel, time limit or preemption)"


class _Stop:
    """Unwinds SIGINT, SIGTERM and SIGHUP like Ctrl-C; only a further Ctrl-C disturbs the clean-up."""

    def __init__(self) -> None:
        self._stopping = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._stopping and number != signal.SIGINT:
            return
        self._stopping = True
        raise KeyboardInterrupt


def _run(cell: SweepCell, machine: Machine) -> SweepCell:
    """Plan and run; KeyboardInterrupt if the benchmark was told to stop, and kept what it had measured."""
    settings = load(cell.overrides)
    cell = replace(cell, model=settings.model.label, variant=settings.variant.label)
    store = Store(settings.paths.store)
    plan = make_plan(settings, cell.target, store, machine)
    cell = replace(cell, variant=plan.settings.variant.label)
    outcomes = run_target(plan, store, cell.overrides).outcomes
    cell = replace(cell, artifacts={outcome.node.id: str(outcome.artifact.path) for outcome in outcomes})
    facts = outcomes[-1].artifact.facts
    if cell.target in MEASURED and not facts["complete"]:
        if facts["reason"].startswith("interrupted"):
            raise KeyboardInterrupt
        return cell.failed(f"the benchmark is incomplete: {facts['reason']}")
    return replace(cell, state="done")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
