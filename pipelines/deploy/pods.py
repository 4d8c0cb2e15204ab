"""Pod templates: the server, and the workers that lend it their GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.deploy.deployment import FRONT, IMAGE, ClusterDeployment, Object
from pipelines.deploy.sizes import PROBE_S
from pipelines.deploy.storage import fetch_container, repository_volume

REPOSITORY = "/repository"
LIVE, READY = "/v2/health/live", "/v2/health/ready"
"""Triton's endpoints, passed on by the service in front: the process responds; every model is loaded and responds."""


def server_pod(deployed: ClusterDeployment) -> Object:
    """Make the pod of a server that fits one node: `serve` on the repository, drained at the end."""
    container = server_container(deployed) | {"args": serve_arguments(deployed)}
    return pod(deployed, "server", container)


def serve_arguments(deployed: ClusterDeployment) -> list[str]:
    """Return the arguments of the image's entry point; everything else has the defaults of `make serve`."""
    serving = deployed.serving
    words = {
        "repository": REPOSITORY,
        "host": "0.0.0.0",
        **deployed.ports,
        "startup_timeout_s": deployed.sizes.startup_limit_s,
        "drain_timeout_s": deployed.sizes.drain_s,
        "log_verbose": serving.log_verbose,
        "show_log": "true",
        **({"multi_gpu": serving.multi_gpu} if deployed.served.gpu else {}),
        "openai": "true",
        **({"cors_origins": f"[{','.join(serving.cors_origins)}]"} if serving.cors_origins else {}),
        **({"expose_triton": "true"} if serving.expose_triton else {}),
        "max_body_bytes": serving.max_body_bytes,
        "max_prompts": serving.max_prompts,
        "request_timeout_s": serving.request_timeout_s,
    }
    return ["serve", *(f"serving.{name}={value}" for name, value in words.items())]


def server_container(deployed: ClusterDeployment) -> Object:
    """Make the container that answers requests, without its command."""
    port = deployed.ports[FRONT]
    return {
        **container(deployed, "server"),
        "ports": container_ports(deployed),
        "startupProbe": _probe(READY, port, PROBE_S, failures=deployed.sizes.startup_limit_s // PROBE_S),
        "readinessProbe": _probe(READY, port, 5, failures=3),
        "livenessProbe": _probe(LIVE, port, PROBE_S, failures=6),
        "lifecycle": stop_later(deployed),
    }


def container_ports(deployed: ClusterDeployment) -> list[Object]:
    """Name the ports that others may reach."""
    return [{"name": key.removesuffix("_port"), "containerPort": port} for key, port in deployed.exposed.items()]


def stop_later(deployed: ClusterDeployment) -> Object:
    """Wait until proxies have stopped sending while the server still accepts requests; only then SIGTERM drains it."""
    return {"preStop": {"exec": {"command": ["sleep", str(deployed.settings.pre_stop_s)]}}}


def container(deployed: ClusterDeployment, name: str) -> Object:
    """Make what server and worker have in common: image, devices, memory, folders, no privileges."""
    settings, sizes = deployed.settings, deployed.sizes
    memory = f"{sizes.memory_mib}Mi"
    devices = {name: str(count) for name, count in sorted(settings.extra_resources.items())}
    if gpus := deployed.served.gpus_per_node:
        devices = {"nvidia.com/gpu": str(gpus), **devices}
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", **settings.env}
    return {
        "name": name,
        "image": IMAGE,
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": {
            "requests": {"cpu": str(sizes.cpus), "memory": memory, **devices},
            "limits": {"memory": memory, **devices},
        },
        "securityContext": _no_rights(),
        "volumeMounts": [
            {"name": "repository", "mountPath": REPOSITORY, "readOnly": True, **_sub_path(deployed)},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "workspace", "mountPath": "/workspace"},
        ],
    }


def pod(
    deployed: ClusterDeployment,
    component: str,
    main: Object,
    before: Sequence[Object] = (),
    beside: Sequence[Object] = (),
) -> Object:
    """Make a pod template around one container.

    Args:
        deployed: what is deployed.
        component: server or worker.
        main: the container.
        before: its init containers, after the one that fetches.
        beside: further containers.
    """
    settings, served, user = deployed.settings, deployed.served, deployed.image
    fetching = fetch_container(deployed, _no_rights())
    init = [*([fetching] if fetching else []), *before]
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **({"runtimeClassName": settings.runtime_class} if settings.runtime_class else {}),
        **({"imagePullSecrets": [{"name": settings.image_pull_secret}]} if settings.image_pull_secret else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user.uid,
            "runAsGroup": user.gid,
            "fsGroup": user.gid,
            "fsGroupChangePolicy": "OnRootMismatch",  # the repository is large, so set its owner only once
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **_placement(deployed),
        "terminationGracePeriodSeconds": deployed.sizes.grace_s,
        **({"initContainers": init} if init else {}),
        "containers": [main, *beside],
        "volumes": [
            repository_volume(deployed),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{deployed.sizes.shm_mib}Mi"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "workspace", "emptyDir": {}},
        ],
    }
    about = {"model": served.label, "variant": served.variant, "engine-version": served.engine_version}
    annotations = {"repository": served.folder, **about}  # a new repository is a new pod
    return {"metadata": {"labels": deployed.labels(component), "annotations": annotations}, "spec": spec}


def _placement(deployed: ClusterDeployment) -> Object:
    """Select nodes with the GPU the engine was built for, by the labels of GPU feature discovery."""
    labels: dict[str, str] = {}
    if (capability := deployed.compute_capability) is not None:
        major, minor = divmod(round(capability * 10), 10)
        labels = {"nvidia.com/gpu.compute.major": str(major), "nvidia.com/gpu.compute.minor": str(minor)}
    labels |= deployed.settings.node_selector
    placed: Object = {"nodeSelector": labels} if labels else {}
    if deployed.served.gpu:
        placed["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return placed


def _probe(path: str, port: int, period: int, *, failures: int) -> Object:
    get = {"path": path, "port": port}
    return {"httpGet": get, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}


def _no_rights() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _sub_path(deployed: ClusterDeployment) -> dict[str, str]:
    return {"subPath": deployed.settings.sub_path} if deployed.settings.sub_path else {}
