"""The command lines of `make image` and `make shell`, as pure functions of settings and machine facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipelines import __version__
from pipelines.domain.errors import Fault, UserError
from pipelines.engines.registry import with_setting
from pipelines.settings.image import ImageSettings

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
        store: finished artifacts.
        runs: logs and results of runs.
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
    """Return the command that builds the image.

    Args:
        tool: docker or podman.
        settings: conf/image.
        flavour: which of the two images.
        source: the checkout.
    """
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

    Args:
        tool: docker or podman.
        settings: conf/image.
        flavour: which of the two images.
        source: the checkout.
        places: folders to share besides the checkout.
        terminal: whether there is a terminal.

    Raises:
        UserError: a path has a comma, which both tools take as a separator.
    """
    command = [tool, "run", "--rm", "--interactive", *(["--tty"] if terminal else [])]
    if flavour == "gpu":
        command += ["--device=nvidia.com/gpu=all"] if tool == "podman" else ["--gpus=all"]
        # Unlimited pinned host memory, and the stack size that CUDA libraries expect (NVIDIA's advice for containers).
        command += ["--ulimit=memlock=-1", "--ulimit=stack=67108864"]
    command += ["--ipc=host"] if settings.ipc_host else [f"--shm-size={settings.shm_size}"]
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
    if wrong := [str(path) for path in mounts if "," in str(path)]:
        raise UserError.of(
            [Fault(f"'{path}' has a comma, which docker and podman take as a separator.") for path in wrong]
        )
    return mounts
