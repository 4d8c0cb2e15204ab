"""The groups of conf/ and their choices, from file names alone."""

from __future__ import annotations

from pathlib import Path

CONF = Path(__file__).resolve().parents[1] / "conf"
"""In a checkout a link to the folder conf/ at its root, in an installed package the folder itself."""


def groups() -> list[str]:
    """List all groups of conf/ that describe a deployment."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def choices(group: str) -> list[str]:
    """List the choices of a group, e.g. quant -> fp8, int4_awq, ..."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "base")
