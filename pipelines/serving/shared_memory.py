"""Name the Python backend's regions in /dev/shm, and remove those whose owner is dead.

The keeper removes a region's name once the server and its stub have it open, and all of them when the server ends. Only
if it is killed while models load is something left: the starter removes it, and if that was killed too, the next start
does, because the name tells the owner. Names include the PID namespace, since containers may share /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

SHM = Path("/dev/shm")
NAME = re.compile(r"trtllm_pipelines_(?P<namespace>\d+)_(?P<owner>\d+)_\d+_")


def own_prefix(number: int) -> str:
    """Return the name prefix of the `number`-th server that this process starts."""
    return f"trtllm_pipelines_{_namespace()}_{os.getpid()}_{number}_"


def remove_own(prefix: str, folder: Path = SHM) -> None:
    """Remove the regions of a server of ours that has ended."""
    for region in folder.glob(f"{prefix}*") if prefix else ():
        with contextlib.suppress(OSError):
            region.unlink()


def remove_leftovers(folder: Path = SHM) -> list[str]:
    """Remove regions of dead owners, and return their names."""
    removed = []
    for region in folder.glob("trtllm_pipelines_*"):
        match = NAME.match(region.name)
        if match and int(match["namespace"]) == _namespace() and not _lives(int(match["owner"])):
            with contextlib.suppress(OSError):
                region.unlink()
                removed.append(region.name)
    return removed


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
