"""Run one command: check its words, run it, and turn its outcome into an exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pipelines import __version__
from pipelines.cli.commands import COMMANDS, PROGRAM
from pipelines.cli.make_args import overrides_from
from pipelines.cli.words import check_command, overrides_of
from pipelines.domain.errors import Fault, UserError
from pipelines.host.disk import disk_error
from pipelines.host.follow import end_with
from pipelines.host.screen import complain, lost_output, outlive_readers

HELP = ("help", "-h", "--help")
CORE = ("hydra", "omegaconf", "pydantic", "filelock", "rich", "yaml")
"""Packages that every command needs; help needs none."""
OWN = ("pipelines", "eval", "triton_repo")
MAKE_TARGETS = "MAKE_TARGETS"
"""Environment variable with targets of the Makefile that are not commands, for suggestions."""
MAKE_PID = "MAKE_PID"
"""Environment variable with make's own process id: whatever ends make ends the command too."""


def program() -> None:
    """Run the command line of this process: the console script and `python -m pipelines`."""
    outlive_readers()
    if make := os.environ.pop(MAKE_PID, None):
        end_with(int(make))
    code = main(sys.argv[1:])
    if reason := lost_output():
        complain(f"the output could not be written: {reason}.")
        code = code or 2
    gc.freeze()  # nobody needs what a last search for garbage would find
    sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    words = list(arguments)
    targets: list[str] = []
    if "--from-make" in words:
        words.remove("--from-make")
        words += overrides_from(os.environ)
        targets = os.environ.get(MAKE_TARGETS, "").split()
    signal.signal(signal.SIGTERM, _terminate)
    # OpenMP threads that spin while waiting make a shared machine several times slower; torch reads this when it loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # pydantic looks for plugins in every installed package, which takes as long as making half of the settings
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        if (text := _answer(words, targets)) is not None:
            sys.stdout.write(text)
            return 0
        name = words[0]
        check_command(name, targets)
        _check_folder()
        return COMMANDS[name].run(overrides_of(name, words[1:]))
    except UserError as error:
        for fault in error.faults:
            complain(fault.text, command=fault.command)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OWN:
            raise
        fault = _missing(package)
        complain(fault.text, command=fault.command)
        return 2
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if (code := _code(error, words[0])) is None:
            raise
        return code


def _code(error: Exception, name: str) -> int | None:
    """Return the exit code for an error that no command expects; None for a crash."""
    # pydantic wraps a Ctrl-C that arrives while it serializes settings
    if isinstance(error.__cause__, KeyboardInterrupt):
        return _interrupted()
    if (said := disk_error(error, f"`{name}`", Path.cwd())) is None:
        return None
    complain(said.faults[0].text)
    return 2


def _check_folder() -> None:
    """Refuse to run in a folder that was removed: every relative path would have no meaning.

    Raises:
        UserError: the current folder is gone.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        place = os.environ.get("PWD", ".")
        raise UserError(f"The current folder '{place}' was removed.", todo="Go to one that exists.") from None


def _missing(package: str) -> Fault:
    """Say how to get a Python package that this environment lacks."""
    if package in CORE:
        return Fault(
            f"{sys.executable} lacks the Python package '{package}', so it is not this project's environment.",
            todo="In a checkout use make (make help), which has its own; on a GPU machine: make image, then "
            "make shell.",
        )
    return Fault(
        f"This needs the Python package '{package}', which {sys.executable} lacks.",
        todo="Planning and sizing need only [size]; to install it with all that commands need:",
        command=("pip", "install", "trtllm-pipelines[cpu,serve,report,size,sweep]"),
    )


def _answer(words: Sequence[str], targets: Sequence[str]) -> str | None:
    """Return help, the version or completions; None for a command."""
    from pipelines.cli import help as texts

    first = words[0] if words else HELP[0]
    if first in ("--completion", "--candidates"):
        from pipelines.cli.completion import candidates, script

        return script(words[1:]) if first == "--completion" else candidates(words[1:])
    others = [word for word in words if word not in HELP]
    if not others:
        return texts.overview()
    if others[0] == "--version":
        if len(others) > 1:
            raise UserError(f"--version takes nothing more, and here '{others[1]}' follows it.")
        return f"{PROGRAM} {__version__}\n"
    if len(others) < len(words):
        check_command(others[0], targets)
        return texts.command_help(others[0])
    return None


def _interrupted() -> int:
    sys.stderr.write("\nInterrupted. Finished stages are kept; the same command goes on from there.\n")
    return 130


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """Let SIGTERM unwind like Ctrl-C, so that drafts are removed and locks freed."""
    raise KeyboardInterrupt
