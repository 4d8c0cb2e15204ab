"""Find docker or podman, show the command, and run it."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipelines import __version__
from pipelines.deploy.config import ImageSettings
from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.engines.registry import with_setting
from pipelines.host.machine import Machine, git
from pipelines.host.screen import say
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.settings.root import Settings

# The command lines of `make image` and `make shell`, as pure functions of settings and machine facts.

INSIDE = "/opt/trtllm-pipelines"
HF_CACHE = "/cache/huggingface"
PASSED_ON = ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE")
"""Variables passed to the shell by name, so that no value appears in a command line or an image."""

ImageFlavour = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Checkout:
    """The checkout that an image is built from.

    Attributes:
        root: its folder, the build context.
        revision: commit, with "-dirty" if files differ from it; "unknown" outside git.
        commit_time: of that commit in seconds since 1970, or None; becomes the time stamp of every file in the image.
    """

    root: Path
    revision: str = "unknown"
    commit_time: int | None = None


@dataclass(frozen=True, slots=True)
class SharedFolders:
    """Folders that `make shell` shares with the host, as absolute paths.

    Attributes:
        hf_home: the Hub's cache.
        user: "uid:gid" of the caller, so that files written in the shell belong to them.
    """

    store: Path
    runs: Path
    hf_home: Path
    user: str


def flavour_of(engine: str, *, gpus: bool) -> ImageFlavour:
    """Return which image an engine runs in; `auto` depends on whether this machine has a GPU."""
    if engine == "auto":
        return "gpu" if gpus else "cpu"
    described = with_setting(engine)
    return "gpu" if described is None or described.needs_gpu else "cpu"


def reference(settings: ImageSettings, flavour: ImageFlavour) -> str:
    """Return name and tag of the image: trtllm-pipelines:0.1.0-gpu."""
    return f"{settings.name}:{settings.tag or f'{__version__}-{flavour}'}"


def build_command(tool: str, settings: ImageSettings, flavour: ImageFlavour, source: Checkout) -> tuple[str, ...]:
    """Return the command that builds the image."""
    arguments = {
        "BASE_TAG": settings.base_gpu if flavour == "gpu" else settings.base_cpu,
        **({"BASE_DIGEST": settings.digest} if settings.digest else {}),
        **({"TORCH_INDEX": settings.torch_index} if flavour == "cpu" and settings.torch_index else {}),
        **({"DEV": "1"} if settings.dev else {}),
        "UID": str(settings.uid),
        "GID": str(settings.gid),
        "VERSION": __version__,
        "REVISION": source.revision,
        **({"SOURCE_DATE_EPOCH": str(source.commit_time)} if source.commit_time is not None else {}),
    }
    command = [tool, "build", f"--file={source.root / 'docker' / f'Dockerfile.{flavour}'}"]
    command += [f"--tag={reference(settings, flavour)}"]
    command += ["--format=docker"] if tool == "podman" else []  # the OCI format has no health check
    command += ["--no-cache"] if settings.no_cache else []
    command += [f"--build-arg={name}={value}" for name, value in arguments.items()]
    command += [f"--secret=id=pip,src={settings.pip_config}"] if settings.pip_config else []
    return (*command, str(source.root))


def shell_command(
    tool: str,
    settings: ImageSettings,
    flavour: ImageFlavour,
    source: Checkout,
    places: SharedFolders,
    *,
    terminal: bool = True,
) -> tuple[str, ...]:
    """Return the command that opens a shell in the image, with this checkout, the store and the caches mounted.

    Raises:
        UserError: a path has a comma, which both tools take as a separator.
    """
    command = [tool, "run", "--rm", "--interactive", *(["--tty"] if terminal else [])]
    if flavour == "gpu":
        command += ["--device=nvidia.com/gpu=all"] if tool == "podman" else ["--gpus=all"]
        # Unlimited pinned host memory, and the stack size that CUDA libraries expect (NVIDIA's advice for containers).
        command += ["--ulimit=memlock=-1", "--ulimit=stack=67108864"]
    command.append(f"--shm-size={settings.shm_size}")
    command += [f"--network={settings.network}", f"--user={places.user}"]
    if tool == "podman":  # rootless: keep the user id, and leave the SELinux labels of the mounts alone
        command += ["--userns=keep-id", "--security-opt=label=disable"]
    command += [f"--mount=type=bind,source={host},target={inside}" for host, inside in _mounts(source, places).items()]
    command += [f"--env={name}" for name in PASSED_ON]
    command += [f"--workdir={INSIDE}", "--entrypoint=/bin/bash", reference(settings, flavour)]
    return tuple(command)


def _mounts(source: Checkout, places: SharedFolders) -> Mapping[Path, str]:
    """Map host folders to paths inside. Store and runs inside the checkout come with it; others keep their path."""
    mounts = {source.root: INSIDE}
    for folder in (places.store, places.runs):
        if not folder.is_relative_to(source.root):
            mounts[folder] = str(folder)
    mounts[places.hf_home] = HF_CACHE
    wrong = [str(path) for path in mounts if "," in str(path)]
    refuse(Fault(f"'{path}' has a comma, which docker and podman take as a separator.") for path in wrong)
    return mounts


TOOLS = ("docker", "podman")
ANSWER_S = 20
Which = Callable[[str], str | None]


def build_image(settings: Settings, machine: Machine) -> int:
    """Build the image and return the builder's exit code.

    Raises:
        UserError: there is no container engine; the message has the command that would have run.
    """
    flavour = _chosen(settings, machine)
    source = checkout(PROJECT_ROOT)
    tool = find_tool(settings.image.tool, build_command("docker", settings.image, flavour, source))
    code = _run(build_command(tool, settings.image, flavour, source))
    if code == 0:
        say(f"image: {reference(settings.image, flavour)}")
    return code


def open_shell(settings: Settings, machine: Machine) -> int:
    """Open an interactive shell in the image and return its exit code.

    Raises:
        UserError: there is no container engine; the message has the command that would have run.
    """
    flavour = _chosen(settings, machine)
    source = checkout(PROJECT_ROOT)
    places = SharedFolders(
        store=settings.paths.store.absolute(),
        runs=settings.paths.runs.absolute(),
        hf_home=Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser().absolute(),
        user=f"{os.getuid()}:{os.getgid()}",
    )
    terminal = sys.stdin.isatty()

    def command(tool: str) -> tuple[str, ...]:
        return shell_command(tool, settings.image, flavour, source, places, terminal=terminal)

    tool = find_tool(settings.image.tool, command("docker"))
    for folder in (places.store, places.runs, places.hf_home):
        folder.mkdir(parents=True, exist_ok=True)  # a folder that docker creates belongs to root
    return _run(command(tool))


def find_tool(setting: str, would_run: Sequence[str], *, which: Which = shutil.which) -> str:
    """Find docker or podman, whichever is installed and responds.

    Raises:
        UserError: none is installed, or the installed one does not respond.
    """
    candidates = TOOLS if setting == "auto" else (setting,)
    silent = []
    for tool in candidates:
        if which(tool):
            if (reason := _why_silent(tool)) is None:
                return tool
            silent.append(f"{tool} is installed but does not respond: {reason}")
    what = "; ".join(silent) or f"{' and '.join(candidates)} {'are' if len(candidates) > 1 else 'is'} not installed"
    raise UserError(
        f"No container engine can be used here: {what}.",
        todo="Start or install one, or run this on a machine that has it:",
        command=would_run,
    )


def _why_silent(tool: str) -> str | None:
    """Return the tool's error if its engine cannot be reached, or None."""
    try:
        answer = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no response within {ANSWER_S} s"
    except OSError as error:
        return str(error)
    if answer.returncode == 0:
        return None
    lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    return lines[-1].rstrip(".?") if lines else f"`{tool} info` ended with {answer.returncode}"


def checkout(root: Path) -> Checkout:
    """Return the checkout that images are made from, with commit and time if git knows them.

    Raises:
        UserError: this is an installed package, which has no Dockerfiles.
    """
    if not (root / "docker").is_dir():
        raise UserError(
            f"Images are built from a checkout of the project, but this program runs from {root},"
            " which has no folder docker/.",
            todo="Clone the project, then: make image, or make shell.",
        )
    time = git(root, "log", "-1", "--format=%ct")
    revision = git(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return Checkout(root, revision or "unknown", int(time) if time else None)


def _chosen(settings: Settings, machine: Machine) -> ImageFlavour:
    described = with_setting(settings.engine.name)
    if described is not None and described.on_device:
        raise UserError(
            f"engine={settings.engine.name} has no image: its files are made with make build, on any machine.",
            todo="Run: make setup-edge, then make build with the same settings.",
        )
    flavour = flavour_of(settings.engine.name, gpus=bool(machine.gpus))
    reason = f"engine={settings.engine.name}"
    if settings.engine.name == "auto":
        reason += f": {machine.gpus[0].name} is here" if machine.gpus else f": no NVIDIA GPU, {machine.no_gpu_reason}"
    say(f"image flavour: {flavour} ({reason})")
    return flavour


def _run(command: Sequence[str]) -> int:
    """Show the command, then run it in the foreground."""
    say(f"+ {shlex.join(command)}")
    return subprocess.run(command, check=False).returncode
