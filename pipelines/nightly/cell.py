"""Measure one cell in its own process: `python -m pipelines.nightly.cell RESULT SINCE key=value ...`.

A crash in native code, or the kernel running out of memory, ends this process and not the night. RESULT is written when
the cell ends: its measurements ("facts", "loads"), or the reason why there are none ("not possible" if the plan refuses
the combination, else "failed"). SINCE is the ISO time at which the run began.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.host.files import write_json
from pipelines.host.lifetimes import end_with
from pipelines.host.machine import gather
from pipelines.nightly import facts
from pipelines.plan.plan import make_plan
from pipelines.run.session import run_target
from pipelines.settings.compose import load
from pipelines.store.store import Store


def main(arguments: Sequence[str]) -> int:
    """Run everything for one cell.

    Returns:
        0 if the result contains measurements, 1 if it contains the reason why there are none.
    """
    result, since, overrides = Path(arguments[0]), datetime.fromisoformat(arguments[1]), list(arguments[2:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_with(os.getppid())  # when the night is killed, unwind as after Ctrl-C and stop the server
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        answer = _run(overrides, since)
    except UserError as error:
        answer = {"failed": str(error)}
    except Exception as error:
        write_json(result, {"failed": f"crashed: {type(error).__name__}: {error}"})
        raise
    write_json(result, answer)
    return 0 if "loads" in answer else 1


def _run(overrides: list[str], since: datetime) -> dict[str, Any]:
    settings = load(overrides)
    store = Store(settings.paths.store)
    try:
        plan = make_plan(settings, "all", store, gather())
    except UserError as error:
        return {"not possible": str(error)}
    outcomes = run_target(plan, store, overrides).outcomes
    measured = outcomes[-1].artifact
    if not measured.facts["complete"]:
        return {"failed": f"the benchmark is incomplete: {measured.facts['reason']}"}
    artifacts = {outcome.node.id: outcome.artifact.path for outcome in outcomes}
    return {"facts": facts.of_artifacts(artifacts, since), "loads": facts.loads(measured.path)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
