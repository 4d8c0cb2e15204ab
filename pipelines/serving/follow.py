"""Print the server's log as it is written, for containers, where standard output is collected."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType

LOOK_S = 0.2


class LogFollower:
    """Copies what is appended to a file to standard output, as long as the `with` block lasts."""

    def __init__(self, log_file: Path) -> None:
        self._file = log_file
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> LogFollower:
        self._log = self._file.open("rb")
        self._log.seek(0, 2)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._log.close()

    def _follow(self) -> None:
        """Copy complete lines, and once more after the end."""
        last = False
        while True:
            while line := self._log.readline():
                sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()
            if last:
                return
            last = self._done.wait(LOOK_S)
