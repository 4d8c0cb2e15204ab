"""Make a backend directory for the wheel's server: its Python backend together with the stub for this Python.

The wheel keeps the two apart, and we must not write into site-packages. The copy (3 MB) is kept in the user's cache
folder under the wheel's version and the Python version, or in a temporary folder if the cache is not writable.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from pipelines.serving.locate import PYTHON, Wheel


def backend_directory(wheel: Wheel) -> Path:
    """Return the folder for --backend-directory; created on first use, even by several processes at once."""
    source = wheel.root / "backends" / "python"
    stamp = (wheel.stub.stat().st_size, (source / "libtriton_python.so").stat().st_size)
    name = f"triton-backends-{wheel.version}-py{PYTHON}-{stamp[0]}-{stamp[1]}"
    for parent in (cache_home(), Path(tempfile.gettempdir()) / f"trtllm-pipelines-{os.getuid()}"):
        try:
            return _prepared(parent / name, source, wheel.stub)
        except OSError as error:
            failure = error
    raise failure


def cache_home() -> Path:
    """Return our folder in the user's cache (XDG Base Directory specification)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return base / "trtllm-pipelines"


def _prepared(folder: Path, source: Path, stub: Path) -> Path:
    """Copy aside and rename once, so that the folder is always complete."""
    if folder.is_dir():
        _refuse_foreign(folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_foreign(folder.parent)
    aside = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        shutil.copytree(source, aside / "python", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(stub, aside / "python")
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # fine if another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _refuse_foreign(folder: Path) -> None:
    """Refuse to run programs from a folder that another user created."""
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
