"""A child process that never outlives the work that waits for it."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def child_process(command: Sequence[str], *, grace_s: float, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; if the block is left by an exception, such as Ctrl-C, stop the command before it goes on.

    Args:
        command: program and arguments.
        grace_s: seconds between SIGTERM and SIGKILL.
        options: arguments of subprocess.Popen.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        with _signals_deferred():  # an interrupt inside of Popen would lose a child that runs already
            process = subprocess.Popen(command, **options)
        yield process
    except BaseException:
        if process is not None:
            _stop(process, grace_s)
        raise


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM only after the block; other threads than the main one never get them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in arrived:
        signal.raise_signal(late)
