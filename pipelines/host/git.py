"""Ask git about a checkout of this project."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(root: Path, *words: str) -> str | None:
    """Return what `git WORDS` prints in a folder, or None.

    None also where the folder is not the top of a checkout: an installed package may lie inside a repository of someone
    else, whose commit says nothing about this project.
    """
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
