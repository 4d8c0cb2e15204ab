"""Prove that a change did not alter anything the tool makes: record the output of two commits and compare it.

    python scripts/same_bytes.py between main HEAD                         both, and compare; about 15 minutes each
    python scripts/same_bytes.py between main HEAD --only numbers          only one group
    python scripts/same_bytes.py record --commit main --out main.json      one commit
    python scripts/same_bytes.py compare main.json head.json               exit code 1 when they differ

To record uncommitted changes of tracked files: --commit $(git stash create)

What is recorded:
  checkpoints   every tensor (type, shape, bytes) and config.json, for tiny_gemma and tiny_llama in every format
  engines       the CPU engine's constants, operations and wiring without the names of nodes, and config.json
  repositories  config.pbtxt and the other text files of Triton repositories, manifests and cluster scripts
  numbers       of plan, simulate, size and calibrate, and the exact commands that a plan shows for a GPU

Only the command line and the files that it writes are used, in a checkout of the commit in a temporary folder, so
modules may move between the commits. Comments and messages may be reworded; keys of numbers may be renamed if all
values stay the same, and such renames are shown. A recording is saved after each case: after Ctrl-C the same command
continues. Exit codes: 0 equal or recorded; 1 different, or a case failed; 2 invalid input; 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.records.cases import GROUPS  # noqa: E402
from scripts.records.checkout import RecordingError, full_commit  # noqa: E402
from scripts.records.comparison import compare  # noqa: E402
from scripts.records.recording import Recording, record  # noqa: E402
from scripts.records.shown import lines  # noqa: E402

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    options = _parser().parse_args(arguments)
    groups = options.only or GROUPS
    try:
        if options.command == "record":
            return 1 if record(options.commit, options.out, options.python, groups) else 0
        if options.command == "compare":
            return _compare(options.before, options.after, groups, options)
        files = [options.folder / f"{full_commit(revision)}.json" for revision in (options.before, options.after)]
        failed = 0
        for revision, file in zip((options.before, options.after), files, strict=True):
            failed += record(revision, file, options.python, groups)
        return max(_compare(files[0], files[1], groups, options), 1 if failed else 0)
    except RecordingError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted. The cases recorded so far are kept; run the same command to continue.\n")
        return INTERRUPTED


def _compare(before: Path, after: Path, groups: Sequence[str], options: argparse.Namespace) -> int:
    found = compare(
        Recording.load(before), Recording.load(after), groups, judge_whole=options.xml, rounding=options.rounding
    )
    if not found.cases:
        raise RecordingError(f"{before} and {after} contain no cases of {', '.join(groups)}.")
    for line in lines(found, options.show):
        sys.stdout.write(f"{line}\n")
    return 0 if found.equal else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="run the cases at a commit")
    one.add_argument("--commit", required=True, metavar="REV", help="commit, branch or tag")
    one.add_argument("--out", required=True, type=Path, metavar="FILE", help="file of the recording")
    two = commands.add_parser("compare", help="compare two recordings")
    two.add_argument("before", type=Path, metavar="FILE")
    two.add_argument("after", type=Path, metavar="FILE")
    both = commands.add_parser("between", help="record two commits and compare them")
    both.add_argument("before", metavar="REV1")
    both.add_argument("after", metavar="REV2")
    both.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "same_bytes", help="folder of the recordings (%(default)s)"
    )
    for command in (one, two, both):
        command.add_argument(
            "--only", action="append", choices=GROUPS, help="a group; may be given several times (default: all)"
        )
    for command in (one, both):
        command.add_argument(
            "--python",
            type=Path,
            default=Path(sys.executable),
            help="interpreter with the project's dependencies (%(default)s)",
        )
    for command in (two, both):
        command.add_argument(
            "--rounding", type=float, default=0.0, metavar="R", help="allowed relative change of a number (0)"
        )
        command.add_argument("--xml", action="store_true", help="also judge whole .xml, .bin and .safetensors files")
        command.add_argument(
            "--show", type=int, default=10, metavar="N", help="most differences shown for a case (%(default)s)"
        )
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the running command ends
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` does not end in an error
    sys.exit(main())
