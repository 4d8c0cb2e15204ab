"""Notice a server that caught a fatal signal and did not end."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

GRACE_S = 20.0
"""For a stack and a core dump. tritonserver's handler collects its stack with functions that take locks: a crash while
the crashing thread holds one of them never ends, and the other threads go on answering health checks."""
CAUGHT = re.compile(rb"^Signal \((?P<number>\d+)\) received", re.MULTILINE)
_LONGEST = len(b"\nSignal (11) received")


class CrashWatch:
    """Reads on in a server's log for the first words of its crash handler."""

    def __init__(self, log_file: Path, start: int) -> None:
        """Remember where to begin.

        Args:
            log_file: of the server.
            start: bytes of it that were written before this server was ready.
        """
        self._caught: signal.Signals | None = None
        self._log_file = log_file
        self._read = start
        self._since = 0.0

    def hung(self) -> signal.Signals | None:
        """Return the signal that was caught more than `GRACE_S` ago; None if there was none."""
        if self._caught is None:
            self._look()
        return self._caught if time.monotonic() - self._since >= GRACE_S else None

    def _look(self) -> None:
        with self._log_file.open("rb") as log:
            log.seek(max(self._read - _LONGEST, 0))  # the words may have arrived in two parts
            text = log.read()
            self._read = log.tell()
        if match := CAUGHT.search(text):
            self._caught = signal.Signals(int(match["number"]))
            self._since = time.monotonic()
