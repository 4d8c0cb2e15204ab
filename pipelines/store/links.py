"""Symbolic links in folders that come from elsewhere, such as models and adapters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pipelines.domain.errors import UserError

CACHED = ("models--", "datasets--")
"""How the Hub's client names a repository's folder in its cache; `blobs` and `snapshots` lie in it."""
SHOWN = 3


def check_links(folder: Path, key: str) -> None:
    """Refuse links that lead out of a folder: a model from elsewhere could name any file of this machine.

    Links within the folder are followed, and links into a Hub cache, whose snapshots consist of them. Dangling
    links fail when they are read. Hidden folders are skipped, because nothing reads them.

    Raises:
        UserError: some links lead elsewhere; the message names them.
    """
    root = Path(os.path.realpath(folder))
    outside = []
    for link in _links(folder):
        target = Path(os.path.realpath(link))
        if target.exists() and not target.is_relative_to(root) and not _is_cached(target):
            outside.append(f"{link.relative_to(folder)} -> '{target}'")
    if outside:
        more = f" and {len(outside) - SHOWN} more" if len(outside) > SHOWN else ""
        raise UserError(
            f"{key}='{folder}' has links that lead out of it: {', '.join(outside[:SHOWN])}{more}.",
            allowed="Links are followed only inside the folder and into a Hub cache, because a model could name any "
            "file of this machine.",
            todo="If you trust them, put the files themselves in their places.",
        )


def _links(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in (*folders, *sorted(files)):
            path = Path(parent) / name
            if path.is_symlink():
                yield path


def _is_cached(target: Path) -> bool:
    """Return whether a file belongs to a repository in a Hub cache, `models--org--name/blobs/...` for example."""
    return any(
        repository.name.startswith(CACHED)
        and (repository / "snapshots").is_dir()
        and target.relative_to(repository).parts[0] in ("blobs", "snapshots")
        for repository in target.parents
    )
