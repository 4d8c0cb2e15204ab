"""The table of trtllm-build's options, `options.json`, and how an installed program differs from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pipelines.domain.errors import Fault

TABLE = Path(__file__).with_name("options.json")
FLAG, LIST = "flag", "list[str]"
Value = str | int | bool | list[str] | None


@dataclass(frozen=True, slots=True)
class BuildOption:
    """One option of trtllm-build.

    Attributes:
        name: with its dashes, e.g. "--max_batch_size".
        type: "int", "str", "list[str]", "KVCacheType", or "flag", which takes no value.
        default: value if it is not given.
        choices: allowed values; None means any.
        later_choices: those of them that versions after 1.2 added.
        aliases: other spellings, with dashes.
        deprecated: whether it is still accepted, with a warning.
    """

    name: str
    type: Literal["int", "str", "flag", "list[str]", "KVCacheType"]
    default: Value
    choices: tuple[str, ...] | None
    later_choices: tuple[str, ...]
    aliases: tuple[str, ...]
    deprecated: bool

    @property
    def key(self) -> str:
        """The setting under `build`: the name without dashes."""
        return self.name.removeprefix("--")


@cache
def options() -> tuple[BuildOption, ...]:
    """Return all options in the order of the program's own help."""
    return tuple(_option(raw) for raw in json.loads(TABLE.read_text(encoding="utf-8"))["options"])


def _option(raw: dict[str, Any]) -> BuildOption:
    choices = raw["choices"]
    return BuildOption(
        name=raw["name"],
        type=raw["type"],
        default=raw.get("effective_default", raw["default"]),
        choices=tuple(choices) if choices else None,
        later_choices=tuple(raw.get("later_choices", ())),
        aliases=tuple(raw.get("aliases", ())),
        deprecated=raw.get("deprecated", False),
    )


INVOCATION = re.compile(r"^ {2}(-{1,2}\w.*?)(?: {2,}\S.*)?$")
CHOICES = re.compile(r"\{([^}]*)\}")
DEFAULT = re.compile(r"\(default: ([^)]*)\)")
STANDARD = ("-h", "--help")
REPORT = "Report it with the program's --help and version, see docs/gpu.md."


@dataclass(frozen=True, slots=True)
class OptionInHelp:
    """An option as described by a program's help: choices and default, empty if it lists none."""

    choices: tuple[str, ...]
    default: str


def help_differences(help_text: str) -> list[Fault]:
    """Compare `trtllm-build --help` with the table: options, spellings, missing choices, defaults.

    Args:
        help_text: what the program printed.

    Returns:
        a fault for every difference; an empty list if the program matches the table.
    """
    found = described(help_text)
    if not found:
        return [
            Fault(
                "This is not the help of trtllm-build: it contains no options.",
                todo="Pass the output of: trtllm-build --help",
            )
        ]
    known = {name: option for option in options() for name in (option.name, *option.aliases)}
    gone = [Fault(f"This trtllm-build lacks {name}.", "1.2 has it.", REPORT) for name in known if name not in found]
    new = [Fault(f"This trtllm-build has {name}, which 1.2 lacks.", todo=REPORT) for name in found if name not in known]
    return [*gone, *new, *(fault for name in known if name in found for fault in _differs(known[name], found[name]))]


def extra_choices(help_text: str) -> list[str]:
    """Describe the choices in a program's help that the table lacks; every setting works without them."""
    found = described(help_text)
    known = {option.name: option.choices for option in options() if option.choices and option.name in found}
    extra = {name: sorted(set(found[name].choices) - set(choices)) for name, choices in known.items()}
    return [f"{name} also accepts {', '.join(new)}" for name, new in extra.items() if new]


def _differs(option: BuildOption, here: OptionInHelp) -> Iterator[Fault]:
    wanted_here = [choice for choice in option.choices or () if choice not in option.later_choices]
    if here.choices and not set(wanted_here) <= set(here.choices):
        given, wanted = ", ".join(here.choices), ", ".join(wanted_here)
        yield Fault(f"This trtllm-build accepts {option.name} {{{given}}}.", f"In 1.2 it accepts {{{wanted}}}.", REPORT)
    if here.default and here.default != str(option.default):
        yield Fault(
            f"The default of {option.name} in this trtllm-build is {here.default}.",
            f"In 1.2 it is {option.default}, and values equal to the default are not passed on the command line.",
            REPORT,
        )


def described(help_text: str) -> dict[str, OptionInHelp]:
    """Return the options in an argparse help, by every spelling; empty for any other text."""
    blocks: list[tuple[str, list[str]]] = []
    for line in help_text.splitlines():
        if match := INVOCATION.match(line):
            blocks.append((match.group(1), [line]))
        elif blocks:
            blocks[-1][1].append(line.strip())
    found: dict[str, OptionInHelp] = {}
    for invocation, lines in blocks:
        listed, default = CHOICES.search(invocation), DEFAULT.search(" ".join(lines))
        choices = tuple(word.strip() for word in listed.group(1).split(",")) if listed else ()
        for name in re.findall(r"(?:^|, )(--?[\w-]+)", CHOICES.sub("", invocation)):
            if name not in STANDARD:
                found[name] = OptionInHelp(choices, default.group(1) if default else "")
    return found
