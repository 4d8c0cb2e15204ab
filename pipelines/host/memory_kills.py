"""Count the processes that the kernel has killed because memory ran out."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

APART_S = 10.0
COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKills:
    """The kernel's own count of this process's control group, which its children are in too.

    Where the group's is not shown, it is that of the whole machine.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._file, self._before = self._find()
        self._latest, self._looked = self._before, clock()

    def look(self) -> None:
        """Forget kills of other processes, of which there may have been some: those before the last look but one.

        Looks within `APART_S` count as one, because a large process takes a while to end after it was killed.
        """
        if self._clock() - self._looked >= APART_S:
            self._before, self._latest, self._looked = self._latest, self._count(), self._clock()

    def happened(self) -> bool | None:
        """Return whether a process was killed for want of memory; None where the kernel does not say."""
        now = self._count()
        return None if now is None or self._before is None else now > self._before

    def _count(self) -> int | None:
        return _count(self._file) if self._file else None

    def _find(self) -> tuple[Path | None, int | None]:
        for file in self._candidates():
            if (count := _count(file)) is not None:
                return file, count
        return None, None

    def _candidates(self) -> Iterator[Path]:
        """Yield the files that may have the count: control groups of version 2 and 1, and the machine's."""
        groups = self._root / "sys/fs/cgroup"
        with contextlib.suppress(OSError):
            for line in (self._root / "proc/self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                # inside a container the path may be the host's, while only the container's own group is mounted
                for place in (path.lstrip("/"), ""):
                    if not controllers:
                        yield groups / place / "memory.events"
                    elif "memory" in controllers.split(","):
                        yield groups / "memory" / place / "memory.oom_control"
        yield self._root / "proc/vmstat"


def _count(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        if match := COUNT.search(file.read_text()):
            return int(match[1])
    return None
