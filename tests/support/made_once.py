"""Folders that every worker of a run uses and whichever comes first makes; nobody writes into them afterwards."""

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return the folder; if it is not there, let `make` write it, while the other workers wait."""
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            staging = folder.with_name(f"{folder.name}.staging")
            shutil.rmtree(staging, ignore_errors=True)  # of a worker that was killed
            make(staging)
            staging.rename(folder)
    return folder
