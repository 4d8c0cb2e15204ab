"""Find docker or podman, show the command, and run it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.deploy.image import (
    Checkout,
    ImageFlavour,
    SharedFolders,
    build_command,
    flavour_of,
    reference,
    shell_command,
)
from pipelines.domain.errors import UserError
from pipelines.host.git import git
from pipelines.host.machine import Machine
from pipelines.host.screen import say
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.settings.root import Settings

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


def find_tool(wanted: str, would_run: Sequence[str], *, which: Which = shutil.which) -> str:
    """Find docker or podman, whichever is installed and responds.

    Args:
        wanted: `image.tool`.
        would_run: the command, for the error message.
        which: finds a program.

    Raises:
        UserError: none is installed, or the installed one does not respond.
    """
    candidates = TOOLS if wanted == "auto" else (wanted,)
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
    words = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    return words[-1].rstrip(".?") if words else f"`{tool} info` ended with {answer.returncode}"


def checkout(root: Path) -> Checkout:
    """Return the checkout that images are made from, with commit and time if git knows them.

    Raises:
        UserError: this is an installed package, which has no Dockerfiles.
    """
    if not (root / "docker").is_dir():
        raise UserError(
            f"Images are built from a checkout of the project, but this program runs from {root},"
            " which has no folder docker/.",
            todo="Clone the project and run `make image` or `make shell` there.",
        )
    time = git(root, "log", "-1", "--format=%ct")
    revision = git(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return Checkout(root, revision or "unknown", int(time) if time else None)


def _chosen(settings: Settings, machine: Machine) -> ImageFlavour:
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
