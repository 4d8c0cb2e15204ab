"""Do something again and again beside other work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
