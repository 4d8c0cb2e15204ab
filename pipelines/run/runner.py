"""Run a plan: lock, write aside, commit. Finished stages stay finished whatever stops the run."""

import logging
import os
import resource
import shlex
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pipelines import __version__
from pipelines.domain.progress import Progress
from pipelines.domain.units import show_seconds
from pipelines.host.disk import disk_errors, relative_to_cwd
from pipelines.host.machine import git
from pipelines.host.screen import say, warn
from pipelines.plan.engine_nodes import Node
from pipelines.plan.plan import Plan, PlannedStep, node_key
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.store import store as measurements
from pipelines.store.manifest import MANIFEST, DamagedError
from pipelines.store.sources import InputSource
from pipelines.store.store import Artifact, Store

log = logging.getLogger("pipelines")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of one step: "cached" or "made", and the seconds it took."""

    node: Node
    artifact: Artifact
    state: str
    seconds: float


def run(plan: Plan, store: Store, overrides: Sequence[str], progress: Progress) -> list[StepOutcome]:
    """Run every step that is not cached, in order.

    Raises:
        UserError: a stage found a fault in its input, an input of the user changed, or the disk is full, read-only,
            failing or gone.
    """
    outcomes: list[StepOutcome] = []
    artifacts: dict[str, Artifact] = {}
    with store.leases.hold(*(step.artifact.path for step in plan.steps if step.artifact)) as use:
        for step in plan.steps:
            if step.artifact and (step.artifact.path / MANIFEST).is_file():
                outcome = StepOutcome(step.node, step.artifact, "cached", 0.0)
            else:  # not made yet, or removed since the plan found it
                outcome = _make(step, artifacts, plan, store, overrides, progress)
            use(outcome.artifact.path)
            artifacts[step.node.id] = outcome.artifact
            outcomes.append(outcome)
    return outcomes


def _make(
    step: PlannedStep,
    artifacts: dict[str, Artifact],
    plan: Plan,
    store: Store,
    overrides: Sequence[str],
    progress: Progress,
) -> StepOutcome:
    node = step.node
    paths, digests = {}, {}
    for name, wired in node.inputs.items():
        source: InputSource | Artifact
        if isinstance(wired, InputSource):
            wired.check(store.hashes)
            source = wired
        else:
            source = artifacts[wired] = _whole(wired, artifacts, plan, store, overrides, progress)
        paths[name], digests[name] = source.path, source.digest
    key, parts = node_key(node, digests)
    waiting = partial(say, f"{node.id}: another run is making {node.label}; waiting for it")
    with disk_errors(f"Stage {node.id}", store.root), store.lock(key, waiting):
        if artifact := _find(node, key, store):  # equal bytes from an earlier stage, or another run made it
            return StepOutcome(node, artifact, "cached", 0.0)
        say(f"{node.id}: {node.label}")
        import_module("numpy")  # torch swallows a Ctrl-C that comes while it imports numpy itself
        with store.staging(key) as staging:
            start = time.monotonic()
            manifest = {
                "key": key,
                "stage": node.stage.name,
                "label": node.label,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "made_from": parts,
                "input_paths": {name: str(path) for name, path in paths.items()},
                **provenance(plan, overrides),
            }
            _reset_peak_memory()
            with measurements.salvaging(staging, manifest, store) if node.stage.measures else nullcontext():
                facts = node.stage.run(paths, staging, progress)
            seconds = time.monotonic() - start
            manifest |= {"seconds": round(seconds, 3), "peak_memory_bytes": _peak_memory(), "facts": facts}
            artifact = store.commit(staging, manifest, node.label)
    say(f"{node.id}: made in {show_seconds(seconds)}")
    return StepOutcome(node, artifact, "made", seconds)


def _whole(
    node_id: str,
    artifacts: dict[str, Artifact],
    plan: Plan,
    store: Store,
    overrides: Sequence[str],
    progress: Progress,
) -> Artifact:
    """Return an artifact for a stage to read; if it was damaged since the plan was made, it is made again."""
    try:
        store.check(artifacts[node_id])
    except DamagedError:
        step = next(step for step in plan.steps if step.node.id == node_id)
        return _make(step, artifacts, plan, store, overrides, progress).artifact
    return artifacts[node_id]


def _find(node: Node, key: str, store: Store) -> Artifact | None:
    """Look an artifact up while holding its lock; a damaged one is set aside."""
    try:
        return store.find(node.stage.name, key)
    except DamagedError as error:
        place = relative_to_cwd(store.set_aside(error.folder))
        warn(f"{relative_to_cwd(error.folder)} {error.damage}. It is now {place} and is made again.")
        return None


def provenance(plan: Plan, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the manifest's record of how to repeat the run."""
    return {
        "repeat": shlex.join(["python", "-m", "pipelines", plan.command, *overrides]),
        "settings": plan.settings.model_dump(mode="json"),
        "pipelines_version": __version__,
        "git_commit": git_commit(),
        "machine": plan.deployment.machine.to_json(),
    }


def git_commit() -> str:
    """Return the project's commit, with "+changes" if the work tree differs; "unknown" outside git."""
    return git(PROJECT_ROOT, "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*") or "unknown"


def _reset_peak_memory() -> None:
    """Reset the kernel's high-water mark, so that a stage reports its own peak (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        log.debug("the peak memory mark cannot be reset here, so peaks include earlier stages")


def _peak_memory() -> int:
    """Return the highest resident memory since the last reset, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
