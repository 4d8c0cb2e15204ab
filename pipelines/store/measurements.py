"""Keep interrupted measurements, and reclaim what killed runs left: a finished level survives a crash and `kill -9`.

While a stage measures, its draft contains `.pending.json`, the manifest as far as it is known. A run that fails turns
the draft into an artifact marked incomplete. A killed run leaves the draft behind; the next run, of any command, keeps
what was measured and removes the rest, and the drafts of other stages.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipelines.document.show import count
from pipelines.domain.benchmark import RESULT, BenchmarkResult
from pipelines.domain.progress import PARTIAL
from pipelines.host.files import write_json
from pipelines.host.screen import say
from pipelines.store.manifest import Json
from pipelines.store.store import PENDING, Artifact, Store


@contextmanager
def kept(draft: Path, manifest: Json, store: Store) -> Iterator[None]:
    """Measure into `draft`; on failure, the finished levels become an artifact marked incomplete.

    If the disk does not take that artifact, the draft stays, for the next run to keep.
    """
    write_json(draft / PENDING, manifest)
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            if _keep(draft, store, str(error) or type(error).__name__) is None:
                (draft / PENDING).unlink(missing_ok=True)
        raise
    (draft / PENDING).unlink()


def recover(store: Store, *, continuable: bool = True) -> list[Artifact]:
    """Reclaim the drafts of killed runs, and keep what they had measured; runs still in progress are left alone.

    Args:
        store: the store.
        continuable: leave drafts that the next run of the same stage continues.
    """
    found = []
    with suppress(OSError):  # a full or read-only disk: what was measured stays where it is until the next run
        for draft in store.abandoned_drafts():
            if continuable and (draft / PARTIAL).is_dir():
                continue
            if artifact := _keep(draft, store, "the run was killed"):
                found.append(artifact)
            shutil.rmtree(draft, ignore_errors=True)
        store.leases.sweep()
    return found


def _keep(draft: Path, store: Store, reason: str) -> Artifact | None:
    """Commit the finished levels, marked incomplete; return None when there are none."""
    try:
        manifest: dict[str, Any] = json.loads((draft / PENDING).read_text())
        result = BenchmarkResult.from_json(json.loads((draft / RESULT).read_text()))
    except (OSError, ValueError):
        return None  # stopped before the first level finished
    if not result.levels:
        return None
    raw = result.to_json() | {"complete": False, "reason": result.reason or reason}
    write_json(draft / RESULT, raw)
    facts = {"levels": len(result.levels), "complete": False, "reason": raw["reason"]}
    manifest |= {"seconds": None, "peak_memory_bytes": None, "facts": facts}
    pending = (draft / PENDING).read_bytes()
    (draft / PENDING).unlink()  # it is not part of the artifact
    try:
        artifact = store.commit(draft, manifest, manifest["label"])
    except OSError:
        (draft / PENDING).write_bytes(pending)
        raise
    say(f"benchmark: kept {count(len(result.levels), 'finished level')}, marked incomplete ({raw['reason']})")
    say(f"  {artifact.path}")
    return artifact
