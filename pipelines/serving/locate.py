"""Find tritonserver: a given path, NVIDIA's container, PATH, or the one inside the nvidia-pytriton wheel.

Fast enough for planning: the wheel is not imported, and nothing is written.
"""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from pipelines.domain.errors import Fault, UserError
from pipelines.serving.config import API_KEY, ServingSettings

CONTAINER_BINARY = Path("/opt/tritonserver/bin/tritonserver")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PLAIN = re.compile(r"[A-Za-z0-9_/.+@%:,=-]+")
"""A path that a shell reads as it is."""
INSTALL = "Install the one that needs no GPU: make setup"


def why_no_key(settings: ServingSettings) -> Fault | None:
    """Return why a server cannot ask for a key, if it is to."""
    if not settings.api_key:
        return None
    if not settings.front:
        text = "serving.api_key=true has no effect: only the OpenAI-compatible service asks for a key."
        return Fault(text, todo="Add serving.openai=true.")
    key = os.environ.get(API_KEY, "")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        text = f"serving.api_key=true needs the key in the variable {API_KEY}, which "
        text += "has characters that HTTP headers do not allow." if key else "is not set."
        return Fault(text, todo=f"Set it, e.g.: export {API_KEY}=$(openssl rand -hex 24)")
    return None


@dataclass(frozen=True, slots=True)
class Wheel:
    """The server inside the nvidia-pytriton wheel."""

    root: Path
    libs: Path
    version: str

    @property
    def binary(self) -> Path:
        """The server binary."""
        return self.root / "bin" / "tritonserver"

    @property
    def stub(self) -> Path:
        """The Python backend's stub process for this Python."""
        return self.root / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class Located:
    """A server that can be started.

    Attributes:
        wheel: where it comes from, if it is not a system installation.
        env: variables to set; the Python backend finds our packages through PATH and ignores PYTHONPATH.
    """

    binary: Path
    wheel: Wheel | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def locate(settings: ServingSettings) -> Located:
    """Find the server; a given path is never replaced by another one.

    Raises:
        UserError: there is none, or it cannot work in this environment; the message says what to install.
    """
    if settings.tritonserver is not None:
        binary = settings.tritonserver.absolute()
        if not (binary.is_file() and os.access(binary, os.X_OK)):
            raise UserError(
                f"serving.tritonserver='{settings.tritonserver}' is not an executable program.",
                todo="Give the path of tritonserver, or leave it out to use the installed one.",
            )
        return Located(binary, env=_env())
    for place in (CONTAINER_BINARY, shutil.which("tritonserver")):
        if place and Path(place).is_file():
            return Located(Path(place), env=_env())
    wheel = find_wheel()
    if wheel is None:
        raise UserError(
            f"tritonserver is not installed: not at {CONTAINER_BINARY}, not on PATH, "
            "and the Python package 'nvidia-pytriton' is missing.",
            todo=f"{INSTALL}, or run inside NVIDIA's Triton container, or set serving.tritonserver=PATH.",
        )
    if not wheel.stub.is_file():
        versions = sorted(path.name for path in (wheel.root / "python_backend_stubs").iterdir())
        raise UserError(
            f"The tritonserver of nvidia-pytriton {wheel.version} has no Python backend for Python {PYTHON}.",
            allowed=f"It supports Python {', '.join(versions)}.",
        )
    numpy = metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        raise UserError(
            f"numpy {numpy} is installed, but the Python backend of nvidia-pytriton {wheel.version} crashes with "
            "numpy 2.",
            allowed="It works with numpy 1.26.",
            todo="Install it again with this project's constraints: make setup",
        )
    return Located(wheel.binary, wheel, _env(wheel.libs))


def why_no_server(settings: ServingSettings) -> Fault | None:
    """Return why no server can be started here, or None if one can; for planning."""
    try:
        locate(settings)
    except UserError as error:
        return error.faults[0]
    return None


def find_wheel() -> Wheel | None:
    """Find the server inside nvidia-pytriton, without importing the package."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.origin:
        return None
    package = Path(spec.origin).parent
    try:
        version = metadata.version("nvidia-pytriton")
    except metadata.PackageNotFoundError:
        return None
    wheel = Wheel(package / "tritonserver", package.parent / "nvidia_pytriton.libs", version)
    return wheel if wheel.binary.is_file() else None


def _env(libs: Path | None = None) -> dict[str, str]:
    """Return variables that put this Python first on PATH, and libpython and the wheel's libraries on theirs."""
    variables = {"PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])}
    if libs is not None:
        folders = [str(libs), str(sysconfig.get_config_var("LIBDIR") or ""), os.environ.get("LD_LIBRARY_PATH", "")]
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(folder for folder in folders if folder)
    return variables


# Make a backend directory for the wheel's server: its Python backend together with the stub for this Python.
#
# The wheel keeps the two apart, and we must not write into site-packages. The copy (3 MB) is kept in the user's cache
# folder under the wheel's version and the Python version, or in a temporary folder if the cache is not writable, or if
# its path means something to a shell: the server starts the stub by a line for one, with the path as it is.


def backend_directory(wheel: Wheel) -> Path:
    """Return the folder for --backend-directory; created on first use, even by several processes at once."""
    source = wheel.root / "backends" / "python"
    stamp = (wheel.stub.stat().st_size, (source / "libtriton_python.so").stat().st_size)
    name = f"triton-backends-{wheel.version}-py{PYTHON}-{stamp[0]}-{stamp[1]}"
    cache = os.environ.get("XDG_CACHE_HOME", "")  # XDG Base Directory specification
    home = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    temporary = [Path(place) / f"trtllm-pipelines-{os.getuid()}" for place in (tempfile.gettempdir(), "/tmp")]
    failure = OSError(f"no place for {name} that a shell reads as it is")
    for parent in (home / "trtllm-pipelines", *temporary):
        if PLAIN.fullmatch(str(parent)):
            try:
                return _prepared(parent / name, source, wheel.stub)
            except OSError as error:
                failure = error
    raise failure


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
