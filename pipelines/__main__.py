"""`python -m pipelines COMMAND key=value ...`: compose, validate, plan, run, exit code.

Exit codes: 0 done; 1 a crash (traceback kept in the log); 2 a fault of the input; 3 `nightly` found a regression;
130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from pydantic_core import PydanticSerializationError

from pipelines.cli import commands
from pipelines.cli.make_args import overrides_from
from pipelines.domain.errors import UserError, did_you_mean
from pipelines.host.screen import outlive_readers

USAGE = """Usage: python -m pipelines COMMAND [key=value ...]      (or: make COMMAND [key=value ...])

{commands}

Any key of the configuration can be overridden: quant=int4_awq build.max_batch_size=64
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    words = list(arguments)
    if "--from-make" in words:
        words.remove("--from-make")
        words += overrides_from(os.environ)
    if not words or words[0] in ("help", "-h", "--help"):
        lines = [f"  {name:<11}{command.summary}" for name, command in commands.COMMANDS.items()]
        sys.stdout.write(USAGE.format(commands="\n".join(lines)))
        return 0
    name, overrides = words[0], words[1:]
    signal.signal(signal.SIGTERM, _terminate)
    # OpenMP threads that spin while they wait make a shared machine several times slower; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        if name not in commands.COMMANDS:
            raise UserError(
                f"'{name}' is not a command.",
                allowed=f"Commands: {', '.join(commands.COMMANDS)}.",
                todo=did_you_mean(name, commands.COMMANDS),
            )
        return commands.COMMANDS[name].run(overrides)
    except UserError as error:
        show_faults(error)
        return 2
    except KeyboardInterrupt:
        return _interrupted()
    except PydanticSerializationError as error:
        # what pydantic makes of a Ctrl-C that comes while it writes settings out
        if isinstance(error.__cause__, KeyboardInterrupt):
            return _interrupted()
        raise


def _interrupted() -> int:
    sys.stderr.write("\nInterrupted. Finished stages are kept; the same command goes on from there.\n")
    return 130


def show_faults(error: UserError) -> None:
    """Print each fault as its own paragraph, wrapped for the terminal."""
    import shutil
    import textwrap

    width = max(40, min(100, shutil.get_terminal_size((80, 24)).columns))
    for fault in error.faults:
        text = textwrap.wrap(str(fault), width - 7, break_long_words=False, break_on_hyphens=False)
        sys.stderr.write("error: " + "\n       ".join(text) + "\n")


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """Let SIGTERM unwind like Ctrl-C, so that drafts are removed and locks freed."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main(sys.argv[1:]))
