"""A deployment on Kubernetes: everything the manifests need, decided once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines import __version__
from pipelines.deploy.facts import RepositoryFacts
from pipelines.deploy.sizes import Sizes, sizes
from pipelines.settings.image import ImageSettings
from pipelines.settings.manifests import ManifestSettings
from pipelines.settings.serving import ServingSettings

Object = dict[str, Any]
"""A Kubernetes object, as it will be written to YAML."""

APP = "trtllm-pipelines"
FRONT = "openai_port"
IMAGE = "trtllm-pipelines"
"""Name of the image inside the objects; the overlay's kustomization.yaml replaces it."""


@dataclass(frozen=True, slots=True)
class ClusterDeployment:
    """What is deployed, where, and how large.

    Attributes:
        name: of all objects.
        served: the repository.
        settings: choices of the cluster.
        serving: how the server is started.
        image: user and image of the pods.
        sizes: of one pod.
        image_reference: image with tag or digest.
        compute_capability: of the GPU the engine was built for, such as 9.0, where known.
    """

    name: str
    served: RepositoryFacts
    settings: ManifestSettings
    serving: ServingSettings
    image: ImageSettings
    sizes: Sizes
    image_reference: str
    compute_capability: float | None

    @property
    def autoscaled(self) -> bool:
        """Whether an HPA decides the number of replicas."""
        return self.settings.max_replicas > self.settings.replicas

    @property
    def ports(self) -> dict[str, int]:
        """Setting's name -> port inside the pod."""
        return self.serving.ports

    @property
    def exposed(self) -> dict[str, int]:
        """The ports that others can reach: that of the service in front of tritonserver, and only if asked for more."""
        return {name: port for name, port in self.ports.items() if name == FRONT or self.serving.expose_triton}

    @property
    def opened(self) -> ServingSettings:
        """How the server is started inside a pod, where others reach it from outside."""
        return self.serving.model_copy(update={"host": "0.0.0.0", "openai": True})

    @property
    def ssh_secret(self) -> str:
        """Secret with the ssh keys that connect the nodes of a group."""
        return self.settings.ssh_secret or f"{self.name}-mpi-ssh"

    def labels(self, component: str | None = None) -> dict[str, str]:
        """Return the labels that select all pods, or those of one component (server, worker)."""
        chosen = {"app.kubernetes.io/name": APP, "app.kubernetes.io/instance": self.name}
        return chosen | ({"app.kubernetes.io/component": component} if component else {})

    def object(self, kind: str, api: str, spec: Mapping[str, Any], name: str | None = None) -> Object:
        """Make an object with our labels."""
        labels = {**self.labels(), "app.kubernetes.io/managed-by": "kustomize"}
        return {
            "apiVersion": api,
            "kind": kind,
            "metadata": {"name": name or self.name, "labels": labels},
            "spec": dict(spec),
        }


def deployment(
    served: RepositoryFacts,
    settings: ManifestSettings,
    serving: ServingSettings,
    image: ImageSettings,
    compute_capability: float | None = None,
) -> ClusterDeployment:
    """Decide name, image and sizes."""
    flavour = "gpu" if served.gpu else "cpu"
    return ClusterDeployment(
        name=settings.name or slug(f"{served.label}-{served.variant}"),
        served=served,
        settings=settings,
        serving=serving,
        image=image,
        sizes=sizes(served, settings, serving),
        image_reference=settings.image or f"{image.name}:{image.tag or f'{__version__}-{flavour}'}",
        compute_capability=compute_capability if served.gpu else None,
    )


def slug(text: str) -> str:
    """Make a Kubernetes name: lower case, digits and single dashes, a letter first, at most 40 characters."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (words if words[:1].isalpha() else f"m-{words}")[:40].strip("-")
