"""How far a compression that works layer by layer has come, so that a killed run is continued.

The record lies in a folder `.partial` within the output, which is removed when the work is complete. It is written
after each layer, once everything it speaks of is on disk.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.compress.calibration import CalibrationSet
from pipelines.compress.model_folder import ModelFolder
from pipelines.compress.weight_files import raw
from pipelines.domain.errors import ContinuableError, UserError
from pipelines.domain.progress import PARTIAL, Progress
from pipelines.host.files import write_json

_RECORD = "layers.json"


class ProgressRecord:
    """The layers that are complete, and what belongs to them.

    Attributes:
        folder: for files that only the unfinished work needs.
        layers: number of complete layers.
        notes: JSON-serializable results of the complete layers.
    """

    def __init__(self, out_dir: Path, identity: dict[str, Any]) -> None:
        """Continue the work in `out_dir` if it is the same, else begin it anew.

        Args:
            out_dir: folder of the output; created if missing.
            identity: everything that determines the bytes of the output, JSON-serializable.
        """
        self.folder, self._identity = out_dir / PARTIAL, json.loads(json.dumps(identity))
        self.layers, self.notes = 0, dict[str, Any]()
        try:
            found = json.loads((self.folder / _RECORD).read_text())
        except (OSError, ValueError):
            found = {}
        if found.get("identity") == self._identity:
            self.layers, self.notes = found["layers"], found["notes"]
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def announce(self, layers: int, progress: Progress) -> None:
        """Say that a stopped run is continued, if one is; the model has so many layers."""
        if self.layers:
            progress.note(f"continuing a run that was stopped: {self.layers} of {layers} layers are complete")

    def complete(self, layers: int) -> None:
        """Record that the first `layers` layers are on disk."""
        self.layers = layers
        write_json(
            self.folder / _RECORD, {"identity": self._identity, "layers": layers, "notes": self.notes}, sort_keys=False
        )

    def close(self) -> None:
        """Remove the record and its files: the output is complete."""
        shutil.rmtree(self.folder)


@contextmanager
def new_files_removed(out_dir: Path) -> Iterator[None]:
    """Remove what the block has put into `out_dir` if it ends with an error that running again would not mend."""
    before = set(out_dir.iterdir()) if out_dir.is_dir() else None
    try:
        yield
    except ContinuableError:
        raise
    except UserError:
        for path in set(out_dir.iterdir()) - (before or set()) if out_dir.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if before is None and out_dir.is_dir():
            out_dir.rmdir()
        raise


def stamp(source: ModelFolder) -> list[object]:
    """Return what changes when someone changes the model folder, without reading the weights."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.weight_files]
    return [source.config, files]


def tokens_digest(data: CalibrationSet | None) -> str:
    """Return a digest of the calibration batches."""
    digest = hashlib.sha256()
    for batch in data.batches if data is not None else ():
        digest.update(repr(tuple(batch.shape)).encode())
        digest.update(raw(batch))
    return digest.hexdigest()
