"""Write generated files into a folder, all or none, and never over files changed by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from pipelines.domain.errors import UserError
from pipelines.host.files import replacing

INDEX = ".generated.json"
"""SHA-256 of every file as written; reveals files changed since."""


def write_folder(folder: Path, files: Mapping[str, str], *, command: str, setting: str) -> bool:
    """Make the folder hold exactly these files.

    Returns:
        whether anything changed.

    Raises:
        UserError: the folder has files that were not generated or were changed by hand, or it cannot be written.
    """
    digests = {name: _digest(text.encode()) for name, text in files.items()}
    present = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    index = present.pop(INDEX, None)
    present_digests = {name: _digest(path.read_bytes()) for name, path in present.items()}
    if present_digests == digests and index is not None:
        return False
    written = json.loads(index.read_text(encoding="utf-8")) if index else {}
    if foreign := sorted(name for name, digest in present_digests.items() if written.get(name) != digest):
        raise UserError(
            f"'{folder}' holds files that `{command}` did not write or that were changed since: {', '.join(foreign)}.",
            todo="Keep changes in another folder; to write this one again, remove these files, or give another folder: "
            f"{setting}=/some/folder",
        )
    try:
        with replacing(folder) as fresh:
            for name, text in files.items():
                (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                (fresh / name).write_text(text, encoding="utf-8")
            (fresh / INDEX).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{setting}='{folder.parent}' cannot be written: {error.strerror}.",
            todo=f"Give another folder: {setting}=/some/folder",
        ) from None
    return True


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
