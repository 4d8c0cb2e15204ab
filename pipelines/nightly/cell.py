"""One measurement of one cell, as a process of its own: `python -m pipelines.nightly.cell RESULT key=value ...`.

A crash of native code, or the system that ends a process when memory runs out, ends this process and not the night.
RESULT is written when the cell is done: where its artifacts lie, or why there are none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pipelines.artifacts import Store, write_json
from pipelines.composed import raw_config
from pipelines.domain.errors import UserError
from pipelines.machine import gather
from pipelines.plan import make_plan
from pipelines.session import run_target
from pipelines.settings import validate

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: Sequence[str]) -> int:
    """Run everything for one cell.

    Returns:
        0 when the result holds artifacts, 1 when it holds the reason why not.
    """
    result, overrides = Path(arguments[0]), list(arguments[1:])
    signal.signal(signal.SIGTERM, _terminate)
    _end_with_parent()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        found = _run(overrides)
    except UserError as error:
        found = {"failed": str(error)}
    except Exception as error:
        write_json(result, {"failed": f"crashed: {type(error).__name__}: {error}"})
        raise
    write_json(result, found)
    return 1 if "failed" in found else 0


def _run(overrides: list[str]) -> dict[str, Any]:
    settings = validate(raw_config(overrides))
    store = Store(settings.paths.store)
    plan = make_plan(settings, "all", store, gather())
    outcomes = run_target(plan, store, overrides)
    facts = outcomes[-1].artifact.facts
    if not facts["complete"]:
        return {"failed": f"the benchmark is incomplete: {facts['reason']}"}
    return {"artifacts": {outcome.node.id: str(outcome.artifact.path) for outcome in outcomes}}


def _end_with_parent() -> None:
    """When the night is killed, the cell unwinds as after Ctrl-C and takes its server along."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            raise KeyboardInterrupt


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
