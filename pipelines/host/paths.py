"""Paths as messages show them."""

from __future__ import annotations

from pathlib import Path


def relative_to_cwd(path: Path) -> str:
    """Return the path relative to the current folder where it lies inside it, and unchanged elsewhere."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
