"""Prove that a change did not alter anything the tool makes: record the output of two commits and compare it.

    python scripts/same_bytes.py main HEAD                         about 15 minutes each
    python scripts/same_bytes.py main HEAD --only numbers          only one group

For uncommitted changes of tracked files: main $(git stash create)

What is recorded:
  checkpoints   every tensor (type, shape, bytes) and config.json, for tiny_gemma and tiny_llama in every format
  engines       the CPU engine's constants, operations and wiring without the names of nodes, and config.json
  repositories  config.pbtxt and the other text files of Triton repositories, manifests and cluster scripts
  numbers       of plan, simulate, size and calibrate, and the exact commands that a plan shows for a GPU

Only the command line and the files that it writes are used, in a checkout of the commit in a temporary folder, so
modules may move between the commits. Comments, messages and prose may be reworded. The recording of a commit is a
folder of text files, which `git diff` compares; each case is saved when it is done, so after Ctrl-C the same command
continues. Exit codes: 0 equal; 1 different, or a case failed; 2 invalid input; 130 interrupted.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.records.cases import GROUPS, REPOSITORY, Case, chosen  # noqa: E402
from scripts.records.checkout import RecordingError, checked_out, full_commit  # noqa: E402
from scripts.records.outputs import Found  # noqa: E402

ENVIRONMENT, WORDS = "environment.json", "words.json"
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Record what is not recorded yet, compare, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="REV1")
    parser.add_argument("after", metavar="REV2")
    parser.add_argument("--only", action="append", choices=GROUPS, help="a group; several times for several")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "same_bytes", help="of recordings (%(default)s)")
    python = Path(sys.executable)
    parser.add_argument("--python", type=Path, default=python, help="interpreter with the dependencies (%(default)s)")
    options = parser.parse_args(arguments)
    groups = options.only or GROUPS
    try:
        commits = [full_commit(revision) for revision in (options.before, options.after)]
        before, after = (options.folder / commit for commit in commits)
        failed = sum(record(commit, options.folder / commit, options.python, groups) for commit in commits)
        same = compare(before, after, groups)
    except RecordingError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted. The cases recorded so far are kept; run the same command to continue.\n")
        return INTERRUPTED
    return 0 if same and not failed else 1


def record(commit: str, out: Path, python: Path, groups: Sequence[str]) -> int:
    """Run the cases that are not in `out` yet and save each as soon as it is done.

    Returns:
        the number of cases that failed.

    Raises:
        RecordingError: `out` was recorded with other versions, or the commit cannot be run.
    """
    todo = [case for case in chosen(groups) if not is_recorded(case, out)]
    if not todo:
        return 0
    with checked_out(commit, python) as checkout:
        environment, file = checkout.environment(), out / ENVIRONMENT
        if file.is_file() and (earlier := json.loads(file.read_text())) != environment:
            other = ", ".join(f"{k} {earlier.get(k)} and {v}" for k, v in environment.items() if earlier.get(k) != v)
            raise RecordingError(f"{out} was recorded with other versions: {other}. Remove it.")
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(environment, indent=1) + "\n")
        failed = 0
        for number, case in enumerate(todo, 1):
            _say(f"[{number:>2}/{len(todo)}] {commit[:12]}, {' and '.join(case.groups)}: {case.name} ... ")
            started = time.monotonic()
            try:
                save(case, checkout.run(case), out)
            except RecordingError as error:
                failed += 1
                _say(f"failed\n{error}\n")
            else:
                _say(f"{time.monotonic() - started:.0f} s\n")
    return failed


def is_recorded(case: Case, out: Path) -> bool:
    """Return whether all groups of a case were recorded with its current words."""
    files = [out / group / case.name / WORDS for group in case.groups]
    return all(file.is_file() and json.loads(file.read_text()) == _words(case) for file in files)


def save(case: Case, records: Found, out: Path) -> None:
    """Write a line per row, in a file per document; a folder that is there is complete."""
    for group, documents in records.items():
        folder, aside = out / group / case.name, out / ".aside"
        for each in (folder, aside):
            shutil.rmtree(each, ignore_errors=True)
        for name, rows in documents.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            lines = [f"{row}: {text}" for row, value in sorted(rows.items()) for text in _shown(value)]
            (aside / name).write_text("\n".join(lines) + "\n")
        (aside / WORDS).write_text(json.dumps(_words(case), indent=1) + "\n")
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside.rename(folder)


def compare(before: Path, after: Path, groups: Sequence[str]) -> bool:
    """Print what differs between two recordings, as git does; return whether they are equal.

    Raises:
        RecordingError: neither has a case of a group.
    """
    if (before / ENVIRONMENT).read_text() != (after / ENVIRONMENT).read_text():
        _say("note: recorded with different versions, which may explain a difference\n")
        _differs(before / ENVIRONMENT, after / ENVIRONMENT)
    equal = True
    for group in groups:
        folders = [each / group for each in (before, after)]
        if not any(map(Path.is_dir, folders)):
            raise RecordingError(f"{before} and {after} contain no cases of {group}.")
        for folder in folders:
            folder.mkdir(exist_ok=True)
        cases = len({path.name for folder in folders for path in folder.iterdir()})
        different = _differs(*folders)
        _say(f"{group:<13} {cases:>3} cases  {'different' if different else 'equal'}\n")
        equal = equal and not different
    return equal


def _differs(before: Path, after: Path) -> bool:
    done = subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", "--unified=0", "--word-diff", before, after], check=False
    )
    if done.returncode > 1:
        raise RecordingError(f"git could not compare {before} and {after}.")
    return done.returncode == 1


def _shown(value: object) -> list[str]:
    """Return the lines of a text, and any other value as JSON: equal for equal numbers, such as 1 and 1.0."""
    if isinstance(value, str):
        return value.splitlines() or [""]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [json.dumps(float(value) if is_number else value)]  # type: ignore[arg-type]


def _words(case: Case) -> list[str]:
    return [word.replace(str(REPOSITORY), "<repository>") for word in case.words]


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the running command ends
    sys.exit(main())
