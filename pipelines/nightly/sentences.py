"""The verdict of a night as sentences, for the terminal and the report."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipelines.domain.errors import UserError
from pipelines.host.files import disk_faults, write_json
from pipelines.nightly.accuracy import Record, Regression, named, shown
from pipelines.nightly.verdict import NightVerdict
from pipelines.store.manifest import CHECKSUM, seal_is_right, sealed

# The history: one JSON line per cell and run, append-only.
#
# A line has a checksum of itself, and is written with one call and synced, under a lock, so that writers never
# interleave. A line torn by `kill -9` stays as it is: the next writer starts a new line, and readers skip the torn one
# with a note, as one that was changed.

FILE = "history.jsonl"
WAIT = "Wait until it ends: two at once would measure each other."


@dataclass(frozen=True, slots=True)
class HistoryContents:
    """Content of a history: its records in the order in which they were written, and notes on skipped lines."""

    records: tuple[Record, ...]
    notes: tuple[str, ...]


def _record(line: bytes) -> Record:
    """Read a line; ValueError if it is none of a history, or was changed after it was written."""
    fields = json.loads(line)
    if isinstance(fields, dict) and CHECKSUM not in fields:
        raise ValueError("it has no checksum, as early versions wrote it")
    if not seal_is_right(fields):
        raise ValueError("it does not match its own checksum, so it was changed after it was written")
    del fields[CHECKSUM]
    return Record.from_json(fields)


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
        with self._writing(), self._lock("history.lock"), self.file.open("ab+", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            rest = (b"\n" if torn else b"") + line
            try:
                while rest:  # a disk that is nearly full takes a part
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise

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
            settings: dict[str, Any] = json.loads(self._settings(digest).read_text())
        except (OSError, ValueError):
            return None
        return settings

    @contextmanager
    def only_run(self, host: str) -> Iterator[None]:
        """Hold an exclusive lock for measuring on this host: two runs at once would measure each other.

        Raises:
            UserError: another run holds it.
        """
        with self._writing():
            lock = self._lock(f"run-{host}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise UserError(
                    f"Another nightly run measures on {host} with the history {self.folder}.",
                    todo=WAIT,
                ) from None
        try:
            yield
        finally:
            lock.release()

    def _settings(self, digest: str) -> Path:
        return self.folder / "settings" / f"{digest}.json"

    def _lock(self, name: str) -> Any:
        return FileLock(self.folder / name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        todo = "Choose another folder: nightly.history=/some/folder"
        with disk_faults(f"nightly.history='{self.folder}' cannot be written", todo):
            self.folder.mkdir(parents=True, exist_ok=True)
            yield


# Compare the last good night with the first bad one.


def changes(history: History, before: Record, after: Record) -> list[str]:
    """List all recorded differences: commit, libraries, machine, settings."""
    changed = []
    if before.commit != after.commit:
        changed.append(f"commit {before.commit[:12]} -> {after.commit[:12]}")
    changed += _differences(before.versions, after.versions)
    changed += [f"machine: {text}" for text in _differences(before.machine, after.machine)]
    if before.settings_digest != after.settings_digest:
        old, new = history.settings(before.settings_digest), history.settings(after.settings_digest)
        if old is None or new is None:
            changed.append(f"settings {before.settings_digest} -> {after.settings_digest}")
        else:
            changed += _differences(old, new)
    return changed


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    absent = "(not there)"
    return [
        f"{key} {before.get(key, absent)} -> {after.get(key, absent)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


@dataclass(frozen=True, slots=True)
class Cause:
    """Regressions that began in the same night after the same changes.

    Attributes:
        since: first bad and last good commit, and what changed in between.
    """

    since: str
    regressions: tuple[Regression, ...]

    @property
    def text(self) -> str:
        """Describe the cause; a single regression is described in full."""
        if len(self.regressions) == 1:
            return f"{finding_text(self.regressions[0])}. {self.since}"
        cells = dict.fromkeys(regression.cell for regression in self.regressions)
        where = next(iter(cells)) if len(cells) == 1 else f"{len(cells)} cells"
        return f"{where}: {len(self.regressions)} metrics got worse together. {self.since}"

    @property
    def items(self) -> tuple[str, ...]:
        """Describe each of several regressions."""
        return tuple(map(finding_text, self.regressions)) if len(self.regressions) > 1 else ()


def headline(verdict: NightVerdict) -> str:
    """Summarize the verdict in one sentence."""
    count = {status: sum(r.status == status for r in verdict.records) for status in ("done", "failed", "not possible")}
    parts = [f"{count['done']} cell{'' if count['done'] == 1 else 's'} measured"]
    parts += [f"{count[status]} {status}" for status in ("failed", "not possible") if count[status]]
    learning = sum(line.judged[-1].state == "learning" for line in verdict.series)
    if learning:
        parts.append(f"{learning} of {len(verdict.series)} series still too short to estimate their noise")
    if verdict.unmeasured:
        why = "no questions, or a baseline that does not beat guessing"
        parts.append(f"accuracy NOT MEASURED in {', '.join(verdict.unmeasured)}: {why}")
    worse = len(verdict.regressions)
    parts.append(f"{worse} regression{'' if worse == 1 else 's'}" if worse else "nothing got worse")
    return f"{'; '.join(parts)}."


def causes(history: History, regressions: Sequence[Regression]) -> list[Cause]:
    """Join regressions with the same first bad night, the same last good one and the same changes in between."""
    joined: dict[str, list[Regression]] = {}
    for regression in regressions:
        joined.setdefault(_since(history, regression), []).append(regression)
    return [Cause(since, tuple(each)) for since, each in joined.items()]


def finding_text(regression: Regression) -> str:
    """Describe a regression: cell, metric, before, now, limit, and why it counts."""
    return (
        f"{regression.cell}: {named(regression.metric)}: {shown(regression.metric, regression.before)} before, "
        f"{shown(regression.metric, regression.now)} now ({regression.change_percent:+.1f} %), "
        f"limit {shown(regression.metric, regression.limit)} ({regression.reason})"
    )


def _since(history: History, regression: Regression) -> str:
    """Describe the first bad commit, the last good one, and what changed between them."""
    text = f"Since {regression.first.commit[:12]} of {regression.first.at[:10]}"
    if regression.last_good is None:
        return f"{text}."
    text += f"; last good {regression.last_good.commit[:12]} of {regression.last_good.at[:10]}."
    different = changes(history, regression.last_good, regression.first)
    return f"{text} Changed in between: {'; '.join(different) or 'nothing recorded'}."


def by_reason(cells: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join cells that share a reason: ("cell, cell", reason)."""
    joined: dict[str, list[str]] = {}
    for cell, reason in cells:
        joined.setdefault(reason, []).append(cell)
    return [(", ".join(names), reason) for reason, names in joined.items()]
