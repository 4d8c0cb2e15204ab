"""Wait for what another process or thread is about to do, and look whether one lives."""

import time
from collections.abc import Callable

import psutil


def eventually(holds: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it holds within so many seconds: many, because a busy machine is late."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


def lives(process: psutil.Process) -> bool:
    """Whether it runs; it may end between two questions."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
