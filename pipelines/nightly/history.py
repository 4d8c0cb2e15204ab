"""The history: one JSON line per cell and run, append-only.

A line has a checksum of itself, and is written with one call and synced, under a lock, so that writers never
interleave. A line torn by `kill -9` stays as it is: the next writer starts a new line, and readers skip the torn one
with a note, as one that was changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.host.files import write_json
from pipelines.nightly.record import Record
from pipelines.store.manifest import CHECKSUM, seal_is_right, sealed

FILE = "history.jsonl"


@dataclass(frozen=True, slots=True)
class HistoryContents:
    """Content of a history: its records in the order in which they were written, and notes on skipped lines."""

    records: tuple[Record, ...]
    notes: tuple[str, ...]


def _record(line: bytes) -> Record:
    """Read a line; one of an older version has no checksum.

    Raises:
        ValueError: it is no line of a history, or was changed after it was written.
    """
    found = json.loads(line)
    if isinstance(found, dict) and CHECKSUM in found:
        if not seal_is_right(found):
            raise ValueError("it does not match its own checksum, so it was changed after it was written")
        del found[CHECKSUM]
    return Record.from_json(found)


class History:
    """The history in one folder."""

    def __init__(self, folder: Path) -> None:
        """Use this folder; nothing is created before the first line."""
        self.folder = folder.absolute()
        self.file = self.folder / FILE

    def read(self) -> HistoryContents:
        """Read every readable line."""
        records: list[Record] = []
        notes: list[str] = []
        lines = self.file.read_bytes().split(b"\n") if self.file.is_file() else []
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    records.append(_record(line))
                except (ValueError, AttributeError) as error:
                    torn = not line.endswith(b"}")
                    why = "was torn when its writer was killed" if torn else f"cannot be read: {error}"
                    notes.append(f"Line {number} of {FILE} {why} and was skipped.")
        return HistoryContents(tuple(records), tuple(notes))

    def append(self, record: Record) -> None:
        """Append one line; once this returns, the line survives a crash.

        Raises:
            UserError: the folder cannot be written.
        """
        line = json.dumps(sealed(record.to_json()), sort_keys=True, allow_nan=False).encode() + b"\n"
        with self._writing(), self._lock("history.lock"):
            handle = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(handle).st_size
                torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
                os.write(handle, (b"\n" if torn else b"") + line)
                os.fsync(handle)
            finally:
                os.close(handle)

    def keep_settings(self, digest: str, settings: Mapping[str, Any]) -> None:
        """Store the settings behind a digest once, so that a later change can be named."""
        place = self._settings(digest)
        if not place.is_file():
            with self._writing():
                place.parent.mkdir(exist_ok=True)
                write_json(place, settings)

    def settings(self, digest: str) -> dict[str, Any] | None:
        """Return the settings behind a digest, or None if they are missing."""
        try:
            found: dict[str, Any] = json.loads(self._settings(digest).read_text())
        except (OSError, ValueError):
            return None
        return found

    @contextmanager
    def only_run(self, host: str) -> Iterator[None]:
        """Hold an exclusive lock for measuring on this host: two runs at once would measure each other.

        Raises:
            UserError: another run holds it.
        """
        from filelock import Timeout

        with self._writing():
            lock = self._lock(f"run-{host}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise UserError(
                    f"Another nightly run measures on {host} with the history {self.folder}.",
                    todo="Wait until it ends: two at once would measure each other.",
                ) from None
        try:
            yield
        finally:
            lock.release()

    def _settings(self, digest: str) -> Path:
        return self.folder / "settings" / f"{digest}.json"

    def _lock(self, name: str) -> Any:
        from filelock import FileLock

        return FileLock(self.folder / name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise UserError(
                f"nightly.history='{self.folder}' cannot be written: {error.strerror}.",
                todo="Choose another folder: nightly.history=/some/folder",
            ) from None
