"""Names of all tasks that lm-eval brings, read from its task files without importing it (a second instead of 20)."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PASSKEY = "passkey"
JSON_VALIDITY = "json_validity"
BUNDLED = ("mini_mmlu", "mini_answers", PASSKEY, JSON_VALIDITY)
"""Tasks whose questions ship with the project, or are made by it."""
WRITTEN = ("mini_answers", PASSKEY, JSON_VALIDITY)
"""Those of them whose answers are written, not chosen."""
MMLU = "mmlu"
LOCAL = "local"
OWN_READER = (*BUNDLED, MMLU, LOCAL)
"""Tasks whose questions are read by our own reader, which checks every row."""

_NAME = re.compile(r"""^(?:task|group|tag): *["']?([\w.-]+)["']? *(?:#.*)?$""", re.MULTILINE)
_TAGS = re.compile(r"^tag: *\n((?: *- .*\n)+)", re.MULTILINE)
_ITEM = re.compile(r"""^ *- *["']?([\w.-]+)""", re.MULTILINE)


def folder() -> Path | None:
    """Return the folder of lm-eval's task files; None if it is not installed."""
    spec = find_spec("lm_eval")
    return Path(spec.submodule_search_locations[0]) / "tasks" if spec and spec.submodule_search_locations else None


def find(name: str) -> Path | None:
    """Return the file that defines a task, a group or a tag; None if there is none, or lm-eval is not installed.

    Most tasks are in a folder that has the first words of their name, so that few files are read.
    """
    root, words = folder(), name.split("_")
    if root is None:
        return None
    for length in range(len(words), 0, -1):
        if found := _defined(root / "_".join(words[:length])).get(name):
            return found
    return _defined(root).get(name)


def all_names() -> tuple[str, ...]:
    """Return all names; empty where lm-eval is not installed."""
    root = folder()
    return tuple(_defined(root)) if root else ()


@cache
def _defined(root: Path) -> dict[str, Path]:
    """Return the first file below a folder for each name that one of them defines."""
    found: dict[str, Path] = {}
    for file in sorted(root.rglob("*.yaml")):
        text = file.read_text(encoding="utf-8", errors="replace")
        listed = [name for block in _TAGS.findall(text) for name in _ITEM.findall(block)]
        for name in (*_NAME.findall(text), *listed):
            found.setdefault(name, file)
    return found
