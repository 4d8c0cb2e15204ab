"""Answers that the two engines of a fidelity measurement gave before, if the store has both evaluations."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from eval.fidelity.flips import Flips, flips
from eval.results import EvalResult
from pipelines.stages.evaluate import RESULT
from pipelines.store.manifest import DamagedError, read_manifest
from pipelines.store.store import Artifact, Store, subfolders


def stored_flips(measured: Artifact, store: Store) -> Flips | None:
    """Return the flips between the newest evaluations of both engines with the same prompts; None without any.

    Args:
        measured: artifact of the fidelity stage.
        store: where evaluations are looked for.
    """
    engines = measured.manifest["made_from"]["inputs"]
    before, after = (_evaluations(store, engines[name]) for name in ("reference", "engine"))
    pairs = ((a, b) for b in after for a in before if a.prompts_sha256 == b.prompts_sha256 and a.task == b.task)
    found = next(pairs, None)
    return None if found is None else flips(*found)


def _evaluations(store: Store, engine: str) -> list[EvalResult]:
    """Return the evaluations of an engine, newest first."""
    found: list[tuple[str, Path]] = []
    for folder in subfolders(store.root / "evaluate"):
        with suppress(DamagedError):
            manifest = read_manifest(folder)
            if manifest["made_from"]["inputs"].get("engine") == engine:
                found.append((str(manifest["created"]), folder))
    return [EvalResult.load(folder / RESULT) for _, folder in sorted(found, reverse=True)]
