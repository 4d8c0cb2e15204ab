"""Bind lifetimes: a child to the work that waits for it, a process to its parent, a loop to a block."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


@contextmanager
def child_process(command: Sequence[str], *, grace_s: float, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; if the block is left by an exception, such as Ctrl-C, stop the command before it goes on."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with _signals_deferred():  # an interrupt inside of Popen would lose a child that runs already
            process = subprocess.Popen(command, **options)
        yield process
    except BaseException:
        if process is not None:
            process.terminate()
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        raise


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM only after the block; other threads than the main one never get them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    with signal_handlers((signal.SIGINT, signal.SIGTERM), lambda number, _: arrived.append(number)):
        yield
    for late in arrived:
        signal.raise_signal(late)


@contextmanager
def signal_handlers(numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handle these signals in another way in the block; only the main thread can do that."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def end_with(pid: int) -> None:
    """Send this process SIGTERM as soon as another one has ended, however it ended; needs Linux 5.3.

    Unlike PR_SET_PDEATHSIG, it does not end this process with a mere thread of the other, and reaches grandparents.
    """
    handle = None
    with suppress(AttributeError, PermissionError):  # another system, or an old container that forbids the call
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGTERM)
    if handle is None:
        return

    def follow() -> None:
        select.select([handle], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="follow", daemon=True).start()


@contextmanager
def repeated(work: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Call `work` in a thread of this name every so many seconds of the block, and once more after it."""
    done = threading.Event()

    def loop() -> None:
        while not done.wait(every_s):
            work()

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        work()
