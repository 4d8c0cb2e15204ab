"""`make torture`: plant failures, and print one table of what was survived.

    python -m tests.torture [--seed 1] [--minutes 30] [CAMPAIGN...]

Exits with 1 if anything fell short of what docs/reliability.md promises. The same seed plants the same failures.
"""

import argparse
import importlib
import sys
import textwrap
import time

from tests.torture.row import Row

NAME_WIDTH = 52
"""Characters of a name on one line, so that the table fits 80 columns."""
CAMPAIGNS = (
    "rot",
    "disks",
    "kills",
    "killed_quantizing",
    "attacks",
    "leaving_streams",
    "configurations",
    "hostile_folders",
    "fuzz_corpus",
)
"""Modules beside this one, each with `run(seed, seconds) -> list[Row]`."""


def main(words: list[str]) -> int:
    """Run the campaigns in turn, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="make torture", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="which failures are planted (default: 1)")
    parser.add_argument("--minutes", type=float, default=30, help="time for all campaigns together (default: 30)")
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"of {', '.join(CAMPAIGNS)}; default: all")
    asked = parser.parse_args(words)
    chosen = asked.campaigns or list(CAMPAIGNS)
    if unknown := sorted(set(chosen) - set(CAMPAIGNS)):
        parser.error(f"there is no campaign {', '.join(unknown)}; allowed: {', '.join(CAMPAIGNS)}")
    rows: list[Row] = []
    for name in chosen:
        start = time.monotonic()
        sys.stderr.write(f"{name}: ...\n")
        found = importlib.import_module(f"tests.torture.{name}").run(
            seed=asked.seed, seconds=asked.minutes * 60 / len(chosen)
        )
        sys.stderr.write(f"{name}: {time.monotonic() - start:.0f} s\n")
        if not found:
            raise RuntimeError(f"the campaign {name} tried nothing")
        rows += found
    sys.stdout.write(table(rows, asked.seed))
    return int(any(row.survived < row.tried or row.tried == 0 for row in rows))


def table(rows: list[Row], seed: int) -> str:
    """Return the table as text: what was planted, how often, how often it was survived, and the worst time."""
    width = min(NAME_WIDTH, max(len(row.what) for row in rows))
    lines = [f"seed {seed}", f"{'planted':{width}} {'tried':>7} {'survived':>8} {'worst s':>8}"]
    for row in rows:
        worst = f"{row.worst_s:8.2f}" if row.worst_s else f"{'–':>8}"
        short = "" if row.survived == row.tried else "  FELL SHORT"
        *before, name = textwrap.wrap(row.what, width)
        lines += [*before, f"{name:{width}} {row.tried:7,} {row.survived:8,} {worst}{short}"]
        if row.note:
            lines.append(f"  {row.note}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
