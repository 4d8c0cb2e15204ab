"""Answers that the two engines of a fidelity measurement gave before, if the store has both evaluations."""

from __future__ import annotations

from pathlib import Path

from eval.fidelity.flips import Flips, flips
from eval.results import BASELINE, RESULT, EvalResult
from pipelines.store.manifest import Manifests
from pipelines.store.store import Artifact, Store, subfolders


def stored_flips(measured: Artifact, store: Store) -> Flips | None:
    """Return the flips between evaluations of both engines with the same prompts; None without any.

    Of several pairs it is the one with most questions, and the newest of these.

    Args:
        measured: artifact of the fidelity stage.
        store: where evaluations are looked for.
    """
    engines = measured.manifest["made_from"]["inputs"]
    in_turns = [
        (EvalResult.load(folder / BASELINE), EvalResult.load(folder / RESULT))
        for folder in _evaluated(store, engine=engines["engine"], baseline=engines["reference"])
    ]
    before, after = (_evaluations(store, engines[name]) for name in ("reference", "engine"))
    apart = [(a, b) for b in after for a in before if a.prompts_sha256 == b.prompts_sha256 and a.task == b.task]
    pairs = [*in_turns, *apart]
    return flips(*max(pairs, key=lambda pair: pair[1].questions)) if pairs else None


def _evaluations(store: Store, engine: str) -> list[EvalResult]:
    """Return the evaluations of an engine, newest first."""
    return [EvalResult.load(folder / RESULT) for folder in _evaluated(store, engine=engine)]


def _evaluated(store: Store, **digests: str) -> list[Path]:
    """Return the folders of evaluations with these inputs, newest first."""
    whole = Manifests.read(subfolders(store.root / "evaluate")).whole
    found = [
        folder
        for folder, made in whole.items()
        if RESULT in made["files"] and digests.items() <= made["made_from"]["inputs"].items()
    ]
    return sorted(found, key=lambda folder: (str(whole[folder]["created"]), folder), reverse=True)
