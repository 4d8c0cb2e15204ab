"""The commands that prepare other machines: images, manifests, cluster scripts."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.host.machine import gather
from pipelines.settings.compose import load


def image(overrides: Sequence[str]) -> int:
    """Build the container image."""
    from pipelines.deploy.containers import build_image

    return build_image(load(overrides), gather())


def shell(overrides: Sequence[str]) -> int:
    """Open a shell in the container image."""
    from pipelines.deploy.containers import open_shell

    return open_shell(load(overrides), gather())


def manifests(overrides: Sequence[str]) -> int:
    """Write Kubernetes manifests for a finished repository."""
    from pipelines.deploy.manifests import write_manifests

    write_manifests(load(overrides), gather(), overrides)
    return 0


def scripts(overrides: Sequence[str]) -> int:
    """Write scripts that build and serve on a cluster."""
    from pipelines.deploy.cluster import write_scripts

    write_scripts(load(overrides), gather(), overrides)
    return 0
