"""Sweep and compare: Hydra's multirun over a target; a failed cell is named at the end and does not stop the others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.artifacts import Store, write_json
from pipelines.compose import CONF, compose_config, diagnose, relative_to_cwd, to_raw
from pipelines.domain.errors import Fault, UserError
from pipelines.flow import MEASURED, Target
from pipelines.machine import gather
from pipelines.plan import make_plan
from pipelines.report.console import columns, comparison
from pipelines.screen import say
from pipelines.session import run_target
from pipelines.settings import validate

Cell = dict[str, Any]
"""What became of one combination: its overrides, model, variant and folders, or "failed" and the reason."""


def sweep(overrides: Sequence[str]) -> int:
    """Evaluate every combination and print one table.

    Returns:
        0, or 1 when a cell failed.

    Raises:
        UserError: Hydra cannot compose the combinations.
    """
    folder, cells = _run_cells("evaluate", overrides)
    good = [cell for cell in cells if "failed" not in cell]
    table = comparison([(Path(cell["baseline"]), Path(cell["after"])) for cell in good])
    write_json(folder / "accuracy.json", table.rows)
    say("\n" + table.text if good else "\nNo cell finished.")
    return _close(folder, cells)


def compare(overrides: Sequence[str]) -> int:
    """Everything for every combination, then one table, one plot and one report per model.

    Returns:
        0, or 1 when a cell failed.
    """
    from pipelines.measurements import recover
    from pipelines.reporting import write

    folder, cells = _run_cells("all", overrides)
    settings = validate(to_raw(compose_config(_single(overrides))))
    store = Store(settings.paths.store)
    recover(store)
    good = [cell for cell in cells if "after" in cell]
    code = _close(folder, cells)
    for model in dict.fromkeys(cell["model"] for cell in good):
        variants = dict.fromkeys(cell["variant"] for cell in good if cell["model"] == model)
        write(settings, store, model, list(variants), compared=True)
    return code


def _single(overrides: Sequence[str]) -> list[str]:
    """The overrides that are no sweep: where things are kept is the same for every cell."""
    return [text for text in overrides if text.startswith(("paths.", "report."))]


def _run_cells(target: Target, overrides: Sequence[str]) -> tuple[Path, list[Cell]]:
    """Run every combination of the comma lists through Hydra's sweeper and launcher."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    folder = _sweep_folder(overrides)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting itself
    before = sys.argv
    sys.argv = [f"pipelines {target}", "--multirun", f"hydra.sweep.dir='{folder}'", *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(partial(_cell, target))()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError.of(diagnose(overrides) or [Fault(str(error).strip().splitlines()[0])]) from None
    finally:
        sys.argv = before
    return folder, [json.loads(path.read_text()) for path in sorted(folder.glob("cell-*.json"), key=_number)]


def _sweep_folder(overrides: Sequence[str]) -> Path:
    """A new folder under paths.runs for Hydra's multirun.yaml and one result per cell."""
    root = Path(to_raw(compose_config(_single(overrides)))["paths"]["runs"]).absolute()
    return root / "sweeps" / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"


def _cell(target: Target, config: Any) -> None:
    """One combination: plan, run, and leave a result or the reason why there is none."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    overrides = list(hydra.overrides.task)
    say(f"\n[{hydra.job.num + 1}] {' '.join(overrides)}")
    cell: Cell = {"overrides": overrides}
    try:
        settings = validate(to_raw(config))
        store = Store(settings.paths.store)
        outcomes = run_target(make_plan(settings, target, store, gather()), store, overrides)
        done = {outcome.node.id: str(outcome.artifact.path) for outcome in outcomes}
        cell |= {"after": done["evaluate"], "baseline": done.get("baseline.evaluate", done["evaluate"])}
        cell |= {"model": settings.model.label, "variant": settings.variant}
        facts = outcomes[-1].artifact.facts
        if target in MEASURED and not facts["complete"]:
            if facts["reason"].startswith("interrupted"):
                raise KeyboardInterrupt
            cell["failed"] = f"the benchmark is incomplete: {facts['reason']}"
    except UserError as error:
        cell["failed"] = str(error)
        say(f"failed: {error}")
    except Exception as error:  # noqa: BLE001 - its traceback is in the cell's own log; the other cells go on
        cell["failed"] = f"crashed: {type(error).__name__}: {error}"
        say(cell["failed"])
    write_json(Path(hydra.sweep.dir) / f"cell-{hydra.job.num}.json", cell)


def _close(folder: Path, cells: Sequence[Cell]) -> int:
    """Name the cells that failed and where everything lies."""
    failed = [cell for cell in cells if "failed" in cell]
    if failed:
        say("\nfailed cells:\n" + columns([(" ".join(cell["overrides"]), cell["failed"]) for cell in failed]))
    say(f"\nsweep: {relative_to_cwd(folder)}")
    return 1 if failed else 0


def _number(path: Path) -> int:
    return int(path.stem.split("-")[1])
