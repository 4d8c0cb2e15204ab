"""The recording of a commit: one JSON file, saved after every case."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.records.cases import REPOSITORY, Case, chosen
from scripts.records.checkout import Checkout, RecordingError, checked_out, full_commit
from scripts.records.outputs import Found

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Recording:
    """The recorded output of a commit.

    Attributes:
        commit: its full hash.
        environment: versions and machine facts when it was recorded.
        cases: by "group/case": words, seconds, and documents by name as JSON.
    """

    commit: str
    environment: dict[str, Any]
    cases: dict[str, dict[str, Any]]

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file that `save` wrote.

        Raises:
            RecordingError: the file is missing, or is not a recording.
        """
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise RecordingError(
                f"The recording {path} does not exist."
                f" Make it: python scripts/same_bytes.py record --commit REV --out {path}"
            ) from None
        except ValueError:
            values = None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise RecordingError(f"{path} is not a recording of format {FORMAT}. Remove it, or choose another file.")
        return cls(values["commit"], values["environment"], values["cases"])

    def save(self, path: Path) -> None:
        """Write the file atomically, so that a reader never sees a partial one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        values = {"format": FORMAT, "commit": self.commit, "environment": self.environment, "cases": self.cases}
        aside.write_text(json.dumps(values, indent=1) + "\n")
        aside.replace(path)

    def has(self, case: Case) -> bool:
        """Return whether all groups of a case were recorded with its current words."""
        found = [self.cases.get(f"{group}/{case.name}") for group in case.groups]
        return all(one is not None and one["words"] == _words(case) for one in found)

    def add(self, case: Case, seconds: float, found: Found) -> None:
        """Add the documents of a case by group."""
        for group, documents in found.items():
            self.cases[f"{group}/{case.name}"] = {
                "words": _words(case),
                "seconds": round(seconds, 1),
                "documents": {name: document.to_json() for name, document in sorted(documents.items())},
            }


def differing(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Describe the versions and machine facts that differ; empty if none do."""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return ", ".join(f"{name} {first.get(name)} and {second.get(name)}" for name in names)


def record(revision: str, out: Path, python: Path, groups: Sequence[str]) -> int:
    """Run the cases that are not in `out` yet and save each as soon as it is done.

    Args:
        revision: commit, branch or tag of this repository.
        out: the file of the recording.
        python: interpreter that has the project's dependencies.
        groups: groups to record.

    Returns:
        the number of cases that failed.

    Raises:
        RecordingError: `out` was recorded at another commit or with other versions, or the commit cannot be run.
    """
    commit, cases = full_commit(revision), chosen(groups)
    before = _recorded(commit, out)
    with checked_out(commit, python) as checkout:
        environment = checkout.environment()
        recording = before or Recording(commit, environment, {})
        if other := differing(recording.environment, environment):
            raise RecordingError(f"{out} was recorded with other versions: {other}. Remove it, or choose another file.")
        todo = [case for case in cases if not recording.has(case)]
        _say(f"{commit[:12]}: {len(todo)} cases to run, {len(cases) - len(todo)} already recorded\n")
        failed, started = 0, time.monotonic()
        for number, case in enumerate(todo, 1):
            _say(f"[{number:>2}/{len(todo)}] {' and '.join(case.groups)}: {case.name} ... ")
            try:
                seconds = _record_case(checkout, recording, case)
            except RecordingError as error:
                failed += 1
                _say(f"failed\n{error}\n")
                continue
            recording.save(out)
            left = (time.monotonic() - started) / number * (len(todo) - number)
            _say(f"{seconds:.0f} s{f', about {left / 60:.0f} min left' if left > 60 else ''}\n")
    _say(f"written: {out}{f'; cases that failed and are not in it: {failed}' if failed else ''}\n")
    return failed


def _record_case(checkout: Checkout, recording: Recording, case: Case) -> float:
    """Run one case, add its output to the recording, and return the seconds it took."""
    started = time.monotonic()
    found = checkout.run(case)
    seconds = time.monotonic() - started
    recording.add(case, seconds, found)
    return seconds


def _recorded(commit: str, out: Path) -> Recording | None:
    """Read the existing recording; None if there is none yet.

    Raises:
        RecordingError: it was recorded at another commit.
    """
    if not out.exists():
        return None
    recording = Recording.load(out)
    if recording.commit != commit:
        raise RecordingError(f"{out} is of commit {recording.commit[:12]}, not of {commit[:12]}. Choose another file.")
    return recording


def _words(case: Case) -> list[str]:
    return [word.replace(str(REPOSITORY), "<repository>") for word in case.words]


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
