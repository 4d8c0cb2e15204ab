"""The groups of conf/ and their choices, read from the names of its files alone, before any library is loaded."""

from __future__ import annotations

from pathlib import Path

CONF = Path(__file__).resolve().parents[1] / "conf"
"""In a checkout a link to the folder conf/ at its root, in an installed package the folder itself."""


def groups() -> list[str]:
    """All groups of conf/ that make a deployment."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def choices(group: str) -> list[str]:
    """The choices of a group, e.g. quant -> fp8, int4_awq, ..."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "base")
