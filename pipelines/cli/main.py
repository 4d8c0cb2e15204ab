"""Run one command: check its words, run it, and turn its outcome into an exit code."""

import gc
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines import __version__
from pipelines.cli.commands import COMMANDS, EXITS, PROGRAM, SECTIONS
from pipelines.cli.words import check_command, groups_with_keys, overrides_of
from pipelines.domain.errors import Fault, UserError, is_interruption
from pipelines.host.disk import disk_error
from pipelines.host.lifetimes import end_with, interrupt_once, on_hangup
from pipelines.host.screen import complain, lost_output, name_commands, outlive_readers, width, wrapped_lines
from pipelines.settings.groups import choices, choose_project_file, groups, hidden_choices, project_file

# Overrides given to make: `make build quant=fp8` -> ["quant=fp8"].
#
# Make takes `key=value` words for variables of its own and passes them on in the environment variable MAKEFLAGS,
# after ` -- `, newest first, with blanks and backslashes escaped by a backslash and `$` doubled
# (GNU make manual, "Communicating Options to a Sub-make").

MAKE_ARGS_OWN = ("PYTHON", "VENV")
"""Variables of our Makefile; everything else goes to Hydra."""


def overrides_from(environ: Mapping[str, str]) -> list[str]:
    """Read the command-line variables out of MAKEFLAGS, in the order they were typed."""
    flags = environ.get("MAKEFLAGS", "")
    _, mark, variables = f" {flags}".partition(" -- ")
    words = split_words(variables) if mark else []
    return [word for word in reversed(words) if word.split("=")[0] not in MAKE_ARGS_OWN]


def split_words(text: str) -> list[str]:
    r"""Undo make's escaping: blanks separate unless escaped, `\\x` is x, `$$` is `$`."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.quotes, lexer.commenters = " \t\n", True, "", ""
    return [word.replace("$$", "$") for word in lexer]


# The texts of --help.


def overview() -> str:
    """Render the list of all commands."""
    lines = [f"Usage: {PROGRAM} COMMAND [key=value ...]", "   or: make COMMAND [key=value ...]"]
    for title, names in SECTIONS.items():
        lines += ["", title]
        lines += [line for name in names for line in _row(name, COMMANDS[name].summary)]
    lines += [""]
    lines += wrapped_lines("Any key of the configuration can be overridden: quant=int4_awq build.max_batch_size=64", 0)
    lines += wrapped_lines(
        "A pipelines.yaml here or in a folder above, or config=FILE, has your own defaults: init writes one.", 0
    )
    lines += _row(f"{PROGRAM} COMMAND --help", "what a command does, its settings, examples, exit codes", 36)
    lines += _row(f"{PROGRAM} config GROUP", "the keys of a group of settings", 36)
    lines += _row(f"{PROGRAM} --completion bash", "completion for the shell (bash, zsh)", 36)
    lines += _row(f"{PROGRAM} --version", "the version", 36)
    return "\n".join(lines) + "\n"


def command_help(name: str) -> str:
    """Render the help of one command: what it does, its groups of settings, examples, exit codes."""
    command = COMMANDS[name]
    usage = " ".join(filter(None, [PROGRAM, name, command.argument, "[key=value ...]"]))
    lines = [f"Usage: {usage}", "", *wrapped_lines(command.about, 0), ""]
    keys_only, presets = [], groups()
    if command.groups:
        lines += ["Settings (config GROUP explains the keys of one)"]
    for group in command.groups:
        if group in presets and len(names := choices(group)) > 1:
            lines += _row(group, ", ".join(names), 14)
        else:  # there is no real choice
            keys_only.append(group)
    if keys_only:
        lines += wrapped_lines(f"  keys of: {', '.join(keys_only)}", 4)
    lines += ["", "Examples"] if command.groups else ["Examples"]
    for example in command.examples:
        lines += wrapped_lines(f"  {PROGRAM} {example}", 6)
    lines += ["", "Exit codes"]
    for code, meaning in sorted((EXITS | command.exits).items()):
        lines += _row(str(code), meaning, 6)
    lines += wrapped_lines(_THROUGH_MAKE, 0)
    return "\n".join(lines) + "\n"


_THROUGH_MAKE = "make ends with 2 for any failure and names the code in its last line."


def _row(left: str, text: str, column: int = 14) -> list[str]:
    start = f"  {left}".ljust(column)
    if start[-1:] != " " or width() - column < 30:
        return [f"  {left}", *wrapped_lines(f"      {text}", 6)]
    return wrapped_lines(f"{start}{text}", column)


# Shell completion: a script for bash or zsh, which asks this program for candidates at each Tab.

BASH = """\
_trtllm_pipelines() {
    local line="${COMP_LINE:0:COMP_POINT}" word start
    word="${line##*[[:space:]]}"
    mapfile -t COMPREPLY < <("$1" --candidates "$line" 2> /dev/null)
    # bash completes what follows the last of its word breaks, = and : among them
    start="${word%"${word##*[=:]}"}"
    [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"$start"}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./,] ]] && compopt -o nospace
}
complete -o default -F _trtllm_pipelines trtllm-pipelines
"""

ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }
_trtllm_pipelines() {
    local -a found open
    found=("${(@f)$("${words[1]}" --candidates "${(j: :)words[1,CURRENT]}" 2> /dev/null)}")
    open=("${(@M)found:#*[=./,]}")
    found=("${(@)found:#*[=./,]}")
    compadd -Q -- $found
    compadd -Q -S '' -- $open
}
compdef _trtllm_pipelines trtllm-pipelines
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH}
LISTS = ("sweep", "compare")


def script(words: Sequence[str]) -> str:
    """Return the script that a shell evaluates: eval "$(trtllm-pipelines --completion bash)".

    Raises:
        UserError: the shell is not supported.
    """
    shell = words[0] if words else ""
    if shell not in SCRIPTS:
        raise UserError(
            f"--completion '{shell}' is not a shell that can be completed.",
            allowed=f"Choose one of {', '.join(SCRIPTS)}.",
            todo=f'Add to your shell\'s start file: eval "$({PROGRAM} --completion bash)"',
        )
    return SCRIPTS[shell]


def candidates(words: Sequence[str]) -> str:
    """Return one candidate per line."""
    line = words[0] if words else ""
    typed = [*line.split()[1:], *([""] if line[-1:].isspace() else [])]
    return "".join(f"{each}\n" for each in _candidates(typed or [""]))


def _candidates(typed: Sequence[str]) -> list[str]:
    word = typed[-1]
    if len(typed) == 1:
        return [each for each in (*COMMANDS, "--help", "--version", "--completion") if each.startswith(word)]
    if typed[0] == "--completion":
        return [shell for shell in SCRIPTS if shell.startswith(word)]
    if typed[0] not in COMMANDS:
        return []
    if word.startswith("-"):
        return ["--help"]
    from pipelines.settings.describe import complete

    overrides = complete(typed[1:])
    if len(typed) == 2 and COMMANDS[typed[0]].argument:
        overrides += [group for group in groups_with_keys() if group.startswith(word)]
    return [each for each in overrides if typed[0] in LISTS or not each.startswith("hydra")]


HELP = ("help", "-h", "--help")
CORE = ("hydra", "omegaconf", "pydantic", "filelock", "rich", "yaml")
"""Packages that every command needs; help needs none."""
OWN = ("pipelines", "eval", "triton_repo")
MAKE_TARGETS = "MAKE_TARGETS"
"""Environment variable with targets of the Makefile that are not commands, for suggestions."""
FROM_MAKE = "--from-make"
"""Word that the Makefile adds: the person types make's commands."""
INSTALLED = "trtllm-pipelines[cpu,serve,report,size,sweep]"
MAKE_PID = "MAKE_PID"
"""Environment variable with make's own process id: however make ends, the command is stopped too."""


def program() -> None:
    """Run the command line of this process: the console script and `python -m pipelines`."""
    outlive_readers()
    if make := os.environ.pop(MAKE_PID, None):
        end_with(int(make))
    if FROM_MAKE not in sys.argv:
        name_as_typed_here()
    code = main(sys.argv[1:])
    if reason := lost_output():
        complain(f"the output could not be written: {reason}.")
        code = code or 2
    gc.freeze()  # skips the last garbage collection
    sys.exit(code)


def name_as_typed_here() -> None:
    """Name commands in messages with `make` in the checkout's folder, else with the console script."""
    name_commands(_without_make(Path(__file__).parents[2]))


def _without_make(root: Path) -> dict[str, str]:
    """Return what to type for each "make NAME" if this was not started by make; nothing in `root`, the checkout."""
    here, ours = Path("Makefile"), root / "Makefile"
    installed = not ours.is_file()
    if not installed and here.is_file() and here.samefile(ours):
        return {}
    clone = "CLONE" if installed else shlex.quote(str(root))
    typed = {name: f"{PROGRAM} {name}" for name in ("help", *COMMANDS)}
    typed |= {name: f"make -C {clone} {name}" for name in ("setup", "setup-edge", "image", "shell")}
    return typed | ({"setup": f"pip install '{INSTALLED}'"} if installed else {})


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    words = list(arguments)
    targets: list[str] = []
    if FROM_MAKE in words:
        words.remove(FROM_MAKE)
        words += overrides_from(os.environ)
        targets = os.environ.get(MAKE_TARGETS, "").split()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: staging is removed, locks freed
    on_hangup(interrupt_once)
    prepare_libraries()
    try:
        if (text := _answer(words, targets)) is not None:
            sys.stdout.write(text)
            return 0
        name = words[0]
        check_command(name, targets)
        _check_folder()
        return COMMANDS[name].run(overrides_of(name, _without_project_file(name, words[1:])))
    except UserError as error:
        for fault in error.faults:
            complain(fault.text, command=fault.command)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OWN:
            raise
        fault = missing_package(package)
        complain(fault.text, command=fault.command)
        return 2
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if (code := _code(error, words[0])) is None:
            raise
        return code


def prepare_libraries() -> None:
    """Set what libraries read from the environment when they load."""
    # OpenMP threads that spin while waiting make a shared machine several times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # pydantic looks for plugins in every installed package, which takes as long as making half of the settings
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def _code(error: Exception, name: str) -> int | None:
    """Return the exit code for an error that no command expects; None for a crash."""
    if is_interruption(error):
        return _interrupted()
    if (fault := disk_error(error, f"`{name}`", Path.cwd())) is None:
        return None
    complain(fault.faults[0].text)
    return 2


def _check_folder() -> None:
    """Refuse to run in a folder that was removed: every relative path would have no meaning."""
    try:
        Path.cwd()
    except FileNotFoundError:
        place = os.environ.get("PWD", ".")
        raise UserError(f"The current folder '{place}' was removed.", todo="Go to one that exists.") from None


def _without_project_file(command: str, words: Sequence[str]) -> list[str]:
    """Take `config=FILE` out of the words of a command, and say which project file decides, if any."""
    name, others = split_project_file(words)
    if name is not None:
        choose_project_file(name)
    if command != "init" and (file := project_file()):
        sys.stderr.write(f"Settings of {file} apply.\n")
        if unused := sorted(path for group in groups() for path in hidden_choices(file.parent, group)):
            sys.stderr.write(f"Not used, because the program has choices of the same name: {', '.join(unused)}.\n")
    return others


def split_project_file(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the file of the last `config=FILE`, if there is one, and the other words."""
    files = [word.removeprefix("config=") for word in words if word.startswith("config=")]
    return files[-1] if files else None, [word for word in words if not word.startswith("config=")]


def missing_package(package: str) -> Fault:
    """Return what to install where a package is not importable."""
    if package in CORE:
        return Fault(
            f"{sys.executable} lacks the Python package '{package}', so it is not this project's environment.",
            todo="In a checkout use make, which has its own; on a GPU machine: make image, then make shell.",
        )
    return Fault(
        f"This needs the Python package '{package}', which {sys.executable} lacks.",
        todo="Planning needs only [size], sizing [size,report]; to install it with all that commands need:",
        command=("pip", "install", INSTALLED),
    )


def _answer(words: Sequence[str], targets: Sequence[str]) -> str | None:
    """Return help, the version or completions; None for a command."""
    first = words[0] if words else HELP[0]
    if first in ("--completion", "--candidates"):
        return script(words[1:]) if first == "--completion" else candidates(words[1:])
    others = [word for word in words if word not in HELP]
    if not others:
        return overview()
    if others[0] == "--version":
        if len(others) > 1:
            raise UserError(f"--version takes no arguments, but '{others[1]}' follows it.")
        return f"{PROGRAM} {__version__}\n"
    if len(others) < len(words):
        check_command(others[0], targets)
        return command_help(others[0])
    return None


def _interrupted() -> int:
    sys.stderr.write("\nInterrupted. Finished stages are kept; the same command goes on from there.\n")
    return 130
