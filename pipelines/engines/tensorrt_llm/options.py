"""The options of trtllm-build as facts: `options.json`, and how a program that is here differs from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("options.json")
FLAG, LIST = "flag", "list[str]"
Value = str | int | bool | list[str] | None


@dataclass(frozen=True, slots=True)
class Option:
    """One option of trtllm-build.

    Attributes:
        name: with its dashes, e.g. "--max_batch_size".
        type: "int", "str", "list[str]", "KVCacheType", or "flag", which takes no value.
        default: what holds when it is not given.
        choices: allowed values; None is any.
        aliases: other spellings, with dashes.
        deprecated: still taken, with a warning.
    """

    name: str
    type: Literal["int", "str", "flag", "list[str]", "KVCacheType"]
    default: Value
    choices: tuple[str, ...] | None
    aliases: tuple[str, ...]
    deprecated: bool

    @property
    def key(self) -> str:
        """The setting under `build`: the name without dashes."""
        return self.name.removeprefix("--")


@cache
def options() -> tuple[Option, ...]:
    """All options in the order of the program's own help."""
    return tuple(_option(raw) for raw in json.loads(TABLE.read_text(encoding="utf-8"))["options"])


def _option(raw: dict[str, Any]) -> Option:
    choices = raw["choices"]
    return Option(
        name=raw["name"],
        type=raw["type"],
        default=raw.get("effective_default", raw["default"]),
        choices=tuple(choices) if choices else None,
        aliases=tuple(raw.get("aliases", ())),
        deprecated=raw.get("deprecated", False),
    )
