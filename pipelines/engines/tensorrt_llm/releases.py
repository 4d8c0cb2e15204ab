"""Versions that go together, by release of TensorRT-LLM; `compatibility.json` names its sources."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("compatibility.json")
ABSENT = "absent"


@cache
def compatibility() -> dict[str, Any]:
    """Return the whole table, the newest release first."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def newest_with_engines() -> dict[str, Any]:
    """Return the row of the newest release that has TensorRT engines, the one to install."""
    release: dict[str, Any] = next(row for row in compatibility()["releases"] if row["engines"])
    return release


def release_for(version: str) -> dict[str, Any] | None:
    """Return the row of a TensorRT-LLM version, or None; the one to install when it is absent."""
    if version == ABSENT:
        return newest_with_engines()
    return next((row for row in compatibility()["releases"] if begins(version, row["tensorrt_llm"])), None)


def numbers(version: str) -> tuple[int, ...]:
    """2.10.0a0+nv25.12 -> (2, 10, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def begins(version: str, prefix: str) -> bool:
    """Return whether a version matches the table's entry: 10.14.1.48 begins with 10.14.1."""
    return numbers(version)[: len(numbers(prefix))] == numbers(prefix)


def newer_than_installed(version: str) -> str:
    """Return the newest version with TensorRT engines if the one installed is older; empty otherwise."""
    newest: str = newest_with_engines()["tensorrt_llm"]
    return newest if version != ABSENT and numbers(version) < numbers(newest) else ""


def newer_than_container(base: str) -> str:
    """Return the tag of the newest Triton container with engines, "26.07", if an image's base is an older one."""
    newest: str = newest_with_engines()["containers"][-1]
    tag = re.match(r"\d\d\.\d\d(?=-trtllm)", base.rpartition(":")[2])
    return newest if tag and numbers(tag[0]) < numbers(newest) else ""
