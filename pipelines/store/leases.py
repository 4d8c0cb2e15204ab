"""Leases: what a process is using in the store, and whether it still lives. Standard library only.

A lease is a file that its holder keeps locked and touches every `BEAT_S` seconds. It holds neither a host's name nor a
process id to go by: containers change the one and share the other. A lease lives

- while its lock is held, if it was made under this kernel and on this mount, where locks are always seen, whatever
  container either side runs in;
- never while it is empty and free: its holder was killed before it named anything, or is about to take another one;
- elsewhere (another host on a shared file system, whose locks may hold on one host only) until its last beat is older
  than `DEAD_S`, by the clock of the file system: both times are stamped by the same file server, so that the hosts'
  clocks do not matter. (Few file systems let their clients stamp; there the clocks must agree to within `DEAD_S`.)
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from threading import Event, Lock, Thread

LEASES = ".leases"
"""Folder of the store with one file per lease."""
BEAT_S, DEAD_S = 20.0, 600.0
HOST = os.uname().nodename
"""For people only."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
log = logging.getLogger("pipelines")


class Lease:
    """A lease that this process holds."""

    def __init__(self, path: Path) -> None:
        """Make the file, lock it, and begin to touch it.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            locked = _lock(self._handle, fcntl.LOCK_EX)  # waits for a process that is inspecting it
            if os.fstat(self._handle).st_nlink:
                break
            os.close(self._handle)  # it was still empty, and was swept away
        try:
            self._write(f"{_kernel(self._handle) if locked else ''} {HOST} {os.getpid()}")
        except OSError:  # a full disk takes the file and not its content
            path.unlink()
            os.close(self._handle)
            raise
        self._ended, self._writing = Event(), Lock()

        def beat() -> None:
            while not self._ended.wait(BEAT_S):
                with self._writing, suppress(OSError):  # a disk that fails now and then must not end the lease
                    if self._handle >= 0:
                        os.utime(self._handle)

        Thread(target=beat, name="lease", daemon=True).start()

    def use(self, folder: Path) -> None:
        """Name an artifact that must stay, and remember when it was used last."""
        touch(folder)
        with self._writing, suppress(OSError):  # a run can read its artifacts even if the disk is full
            self._write(folder.name)

    def end(self) -> None:
        """Give the lease back."""
        self._ended.set()
        with self._writing:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1

    def _write(self, line: str) -> None:
        os.write(self._handle, f"{line}\n".encode())


@dataclass(frozen=True, slots=True)
class Seen:
    """A lease as another process sees it.

    Attributes:
        holder: host and process id, for people.
        uses: names of artifacts.
    """

    path: Path
    alive: bool
    holder: str
    uses: frozenset[str]


class Leases:
    """All leases of one store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, name: str = "") -> Lease:
        """Take a lease; without a name it gets one that nothing else has."""
        return Lease(self._folder / (name or token_hex(8)))

    @contextmanager
    def hold(self, *uses: Path) -> Iterator[Callable[[Path], None]]:
        """Hold a lease on artifacts, and yield the function that adds further ones.

        A read-only store has no leases; nothing in it can be removed either.
        """
        try:
            lease = self.take()
        except OSError as error:
            log.info("no lease: %s", error)
            yield lambda _: None
            return
        try:
            for folder in uses:
                lease.use(folder)
            yield lease.use
        finally:
            with suppress(OSError):
                lease.end()

    def all(self, *, sweep: bool = False) -> list[Seen]:
        """Inspect every lease; `sweep` removes those whose holders are gone."""
        if not self._folder.is_dir():
            return []
        now = file_system_time(self._folder)
        return [seen for path in sorted(self._folder.iterdir()) if (seen := _inspect(path, now, sweep=sweep))]

    def find(self, name: str) -> Seen | None:
        """Inspect one lease; None where there is none."""
        path = self._folder / name
        return _inspect(path, file_system_time(self._folder)) if path.is_file() else None


@contextmanager
def in_use(artifact: Path) -> Iterator[None]:
    """Keep an artifact from being removed while the block runs; a folder outside of any store needs no keeping."""
    place = artifact.resolve()
    leases = place.parent.parent / LEASES
    if not leases.is_dir():
        yield
        return
    with Leases(leases).hold(place):
        yield


def touch(folder: Path) -> None:
    """Remember that an artifact was used: the folder's own time, which nothing else changes once it is finished."""
    with suppress(OSError):
        os.utime(folder)


def file_system_time(folder: Path) -> float:
    """Return the current time in seconds, by the clock of the folder's file system."""
    with suppress(OSError):
        os.utime(folder)  # without a time of ours, a file server stamps its own
        return folder.stat().st_mtime
    return time.time()  # a store that cannot be written


def _inspect(path: Path, now: float, *, sweep: bool = False) -> Seen | None:
    """Inspect a lease; with `sweep`, remove it if its holder is gone."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None  # given back just now
    try:
        free = _lock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # locked from here on: no new holder can appear
        text = os.read(handle, 1 << 20).decode(errors="replace")
        head, _, uses = text.partition("\n")
        kernel, _, holder = head.partition(" ")
        if free and not text:
            alive = False
        elif kernel and kernel == _kernel(handle):
            alive = not free
        else:
            alive = now - os.fstat(handle).st_mtime < DEAD_S
        if sweep and not alive:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)
    return Seen(path, alive, holder, frozenset(uses.split("\n")) - {""})


def _kernel(handle: int) -> str:
    """Identify the kernel and the mount of an open file; empty where the system does not say."""
    try:
        return f"{BOOT_ID.read_text().strip()}:{os.fstat(handle).st_dev}"
    except OSError:
        return ""


def _lock(handle: int, kind: int) -> bool:
    """Lock an open file; return whether it is locked now. Without locks on this file system it never is."""
    try:
        fcntl.flock(handle, kind)
    except OSError:
        return False
    return True
