"""The texts of --help."""

from __future__ import annotations

from pipelines.cli.commands import COMMANDS, EXITS, PROGRAM, SECTIONS, Command
from pipelines.host.text import width, wrapped
from pipelines.settings.groups import choices, groups


def overview() -> str:
    """Render the list of all commands."""
    lines = [f"Usage: {PROGRAM} COMMAND [key=value ...]", "   or: make COMMAND [key=value ...]"]
    for title, names in SECTIONS.items():
        lines += ["", title]
        lines += [line for name in names for line in _row(name, COMMANDS[name].summary)]
    lines += [""]
    lines += _wrap("Any key of the configuration can be overridden: quant=int4_awq build.max_batch_size=64")
    lines += _row(f"{PROGRAM} COMMAND --help", "what a command does, its settings, examples, exit codes", 36)
    lines += _row(f"{PROGRAM} config GROUP", "the keys of a group of settings", 36)
    lines += _row(f"{PROGRAM} --completion bash", "completion for the shell (bash, zsh)", 36)
    lines += _row(f"{PROGRAM} --version", "the version", 36)
    return "\n".join(lines) + "\n"


def command_help(name: str) -> str:
    """Render the help of one command: what it does, its groups of settings, examples, exit codes."""
    command = COMMANDS[name]
    usage = " ".join(filter(None, [PROGRAM, name, command.argument, "[key=value ...]"]))
    lines = [f"Usage: {usage}", "", *_wrap(command.about), ""]
    lines += _groups(command)
    lines += ["Examples"]
    for example in command.examples:
        lines += _wrap(f"  {PROGRAM} {example}", "      ")
    lines += ["", "Exit codes"]
    for code, meaning in sorted((EXITS | command.exits).items()):
        lines += _row(str(code), meaning, 6)
    lines += _wrap(_THROUGH_MAKE)
    return "\n".join(lines) + "\n"


_THROUGH_MAKE = (
    "make ends with the same code where GNU make 4 and a C compiler are installed; elsewhere it ends with 2 for any "
    "failure and names the code in its last line."
)


def _groups(command: Command) -> list[str]:
    """Render groups of settings with their choices, or by name alone if there is no real choice."""
    if not command.groups:
        return []
    known = groups()
    lines, keys_only = ["Settings (config GROUP explains the keys of one)"], []
    for group in command.groups:
        if group in known and len(found := choices(group)) > 1:
            lines += _row(group, ", ".join(found), 14)
        else:
            keys_only.append(group)
    if keys_only:
        lines += _wrap(f"  keys of: {', '.join(keys_only)}", "    ")
    return [*lines, ""]


def _row(left: str, text: str, column: int = 14) -> list[str]:
    """Render a word and its explanation, below each other on a narrow screen."""
    start = f"  {left}".ljust(column)
    if start[-1:] != " " or width() - column < 30:
        return [f"  {left}", *_wrap(f"      {text}", "      ")]
    return _wrap(f"{start}{text}", " " * column)


def _wrap(text: str, indent: str = "") -> list[str]:
    return wrapped(text, len(indent)).splitlines()
