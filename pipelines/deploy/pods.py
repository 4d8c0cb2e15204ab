"""Pod templates: the server, and the workers that lend it their GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipelines.deploy.config import ClusterSettings, ImageSettings, ManifestSettings
from pipelines.deploy.containers import reference
from pipelines.deploy.facts import PRE_STOP_S, PROBE_S, RepositoryFacts, Sizes, sizes
from pipelines.domain.benchmark import NO_SLO, Slo
from pipelines.serving.config import API_KEY, ServingSettings
from triton_repo.llmapi import CHECKPOINT_DIR, OPTIONS

# A deployment on Kubernetes: everything the manifests need, decided once.

Object = dict[str, Any]
"""A Kubernetes object, as it will be written to YAML."""

DYNAMO_IMAGE = "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:1.5.0"
"""Dynamo with TensorRT-LLM 1.3.0rc25, as NVIDIA's page of release artifacts names it (23 September 2026)."""
APP = "trtllm-pipelines"
FRONT = "openai_port"
IMAGE = "trtllm-pipelines"
"""Name of the image inside the objects; the overlay's kustomization.yaml replaces it."""


@dataclass(frozen=True)
class ClusterDeployment:
    """The workload to deploy: image, place and sizes.

    Attributes:
        sm: compute capability of the GPU that an engine was built for, such as 9.0, where known.
        slo: limits that the service's metrics show exactly how many answers meet.
        cluster: workers for prompts and for answers, of Dynamo.
    """

    served: RepositoryFacts
    settings: ManifestSettings
    serving: ServingSettings
    image: ImageSettings
    sm: float | None = None
    slo: Slo = NO_SLO
    cluster: ClusterSettings = field(default_factory=ClusterSettings)

    @cached_property
    def name(self) -> str:
        """Name of all objects."""
        return self.settings.object_name(self.served.label, self.served.variant)

    @cached_property
    def sizes(self) -> Sizes:
        """Resources of one pod."""
        return sizes(self.served, self.settings, self.serving)

    @property
    def image_reference(self) -> str:
        """Image with tag or digest."""
        if self.settings.image:
            return self.settings.image
        if self.served.llm_api is not None:
            return DYNAMO_IMAGE if self.settings.operator == "dynamo" else self.image.base_llm_api
        return reference(self.image, "gpu" if self.served.gpu else "cpu")

    @property
    def autoscaled(self) -> bool:
        """Whether an HPA decides the number of replicas, by metrics of this project's own service."""
        return self.settings.most > self.settings.replicas and self.served.llm_api is None

    @property
    def has_alerts(self) -> bool:
        """Whether there are alerts on the limits of `benchmark.slo`, by metrics of this project's own service."""
        return bool(self.settings.pod_monitor and self.slo.limits) and self.served.llm_api is None

    @property
    def exposed(self) -> dict[str, int]:
        """The ports that others can reach: that of the service in front of tritonserver, and only if asked for more."""
        more = self.serving.expose_triton and self.served.llm_api is None
        return {name: port for name, port in self.serving.ports.items() if name == FRONT or more}

    @property
    def opened(self) -> ServingSettings:
        """How the server is started inside a pod, where others reach it from outside."""
        return self.serving.model_copy(update={"host": "0.0.0.0", "openai": True})

    @property
    def secrets(self) -> dict[str, tuple[str, str]]:
        """See `ManifestSettings.secrets`."""
        over_nodes = self.served.kind == "multinode"
        return self.settings.secrets(self.name, api_key=self.serving.api_key, over_nodes=over_nodes)

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


# Storage of the repository: a claim, a folder on the node, or an empty folder that is filled first.


def claim_name(deployed: ClusterDeployment) -> str:
    """Return the name of the claim that the pods mount."""
    return deployed.settings.claim or f"{deployed.name}-repository"


def claim(deployed: ClusterDeployment) -> Object | None:
    """Make the PersistentVolumeClaim, or None if one exists or none is needed."""
    settings = deployed.settings
    if settings.storage != "claim" or settings.claim is not None:
        return None
    spec = {
        "accessModes": [settings.access_mode],
        **({"storageClassName": settings.storage_class} if settings.storage_class else {}),
        "resources": {"requests": {"storage": f"{deployed.sizes.claim_gib}Gi"}},
    }
    return deployed.object("PersistentVolumeClaim", "v1", spec, claim_name(deployed))


def repository_volume(deployed: ClusterDeployment) -> Object:
    """Make the volume `repository`."""
    settings = deployed.settings
    if settings.storage == "claim":
        return {"name": "repository", "persistentVolumeClaim": {"claimName": claim_name(deployed), "readOnly": True}}
    if settings.storage == "host_path":
        return {"name": "repository", "hostPath": {"path": settings.host_path, "type": "Directory"}}
    return {"name": "repository", "emptyDir": {"sizeLimit": f"{deployed.sizes.claim_gib}Gi"}}


def fetch_container(deployed: ClusterDeployment, rights: Object) -> Object | None:
    """Make the init container that fills the empty folder; it alone gets the token, by reference."""
    settings = deployed.settings
    if (command := settings.fetch.words) is None:
        return None
    token = {"secretKeyRef": {"name": settings.hf_token_secret, "key": "token"}}
    env: list[Object] = [
        {"name": "HOME", "value": "/workspace"},
        {"name": "HF_HOME", "value": "/workspace/huggingface"},
    ]
    env += [{"name": "HF_TOKEN", "valueFrom": token}] if settings.hf_token_secret else []
    return {
        "name": "fetch",
        "image": settings.fetch.image or IMAGE,
        "command": [*command],
        "env": env,
        **({"envFrom": [{"secretRef": {"name": settings.fetch.secret}}]} if settings.fetch.secret else {}),
        "securityContext": rights,
        "volumeMounts": [
            {"name": "repository", "mountPath": "/repository"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "workspace", "mountPath": "/workspace"},
        ],
    }


AMX_LABEL = {"feature.node.kubernetes.io/cpu-cpuid.AMXBF16": "true"}
"""Source: kubernetes-sigs.github.io/node-feature-discovery, usage/features.html."""
REPOSITORY = "/repository"
OPTIONS_FOLDER, HEALTH = "/etc/pipelines/llm_api", "/health"
"""Of trtllm-serve: where its options are, and its only probe, which answers once the model is loaded."""
LIVE, READY = "/v2/health/live", "/v2/health/ready"
"""Triton's endpoints, passed on by the service in front: the process responds; every model is loaded and responds."""


def server_pod(deployed: ClusterDeployment) -> Object:
    """Make the pod of a server that fits one node: `serve` on the repository, drained at the end."""
    if deployed.served.llm_api is not None:
        return _trtllm_serve_pod(deployed)
    container = server_container(deployed) | {"args": serve_arguments(deployed)}
    return pod(deployed, "server", container)


def _trtllm_serve_pod(deployed: ClusterDeployment) -> Object:
    """Make the pod of trtllm-serve in NVIDIA's container; the checkpoint's paths start in the repository."""
    main = server_container(deployed)
    command = ["trtllm-serve", CHECKPOINT_DIR, "--host", "0.0.0.0", "--port", str(deployed.serving.ports[FRONT])]
    main |= {
        "command": [*command, "--extra_llm_api_options", f"{OPTIONS_FOLDER}/{OPTIONS}"],
        "workingDir": REPOSITORY,
        "env": [
            *main["env"],
            {"name": "TRTLLM_NO_USAGE_STATS", "value": "1"},
            {"name": "HOME", "value": "/workspace"},  # of the kernels that are compiled at the start
        ],
        "volumeMounts": [*main["volumeMounts"], {"name": "llm-api", "mountPath": OPTIONS_FOLDER, "readOnly": True}],
    }
    template = pod(deployed, "server", main)
    template["spec"]["volumes"].append({"name": "llm-api", "configMap": {"name": options_name(deployed)}})
    return template


def options_name(deployed: ClusterDeployment) -> str:
    """Return the name of the ConfigMap with the options of trtllm-serve."""
    return f"{deployed.name}-llm-api"


def serve_arguments(deployed: ClusterDeployment) -> list[str]:
    """Return the arguments of the image's entry point; everything else has the defaults of `make serve`."""
    serving = deployed.serving
    values = {
        "repository": REPOSITORY,
        "host": "0.0.0.0",
        **deployed.serving.ports,
        "startup_timeout_s": deployed.sizes.startup_limit_s,
        "drain_timeout_s": deployed.sizes.drain_s,
        **({"restarts": serving.restarts} if serving.restarts != ServingSettings().restarts else {}),
        "log_verbose": serving.log_verbose,
        "show_log": "true",
        **({"multi_gpu": serving.multi_gpu} if deployed.served.gpu else {}),
        "openai": "true",
        **({"image_hosts": f"[{','.join(serving.image_hosts)}]"} if serving.image_hosts else {}),
        **({"cors_origins": f"[{','.join(serving.cors_origins)}]"} if serving.cors_origins else {}),
        **({"api_key": "true"} if serving.api_key else {}),
        **({"expose_triton": "true"} if serving.expose_triton else {}),
        "max_body_bytes": serving.max_body_bytes,
        "max_prompts": serving.max_prompts,
        "request_timeout_s": serving.request_timeout_s,
    }
    slo = (f"benchmark.slo.{name}_ms={limit}" for name, limit in deployed.slo.limits.items())
    return ["serve", *(f"serving.{name}={value}" for name, value in values.items()), *slo]


def server_container(deployed: ClusterDeployment) -> Object:
    """Make the container that answers requests, without its command."""
    port = deployed.serving.ports[FRONT]
    live, ready = (LIVE, READY) if deployed.served.llm_api is None else (HEALTH, HEALTH)
    main = container(deployed, "server")
    return {
        **main,
        "env": [*main["env"], *key_variable(deployed)],
        "ports": container_ports(deployed),
        "startupProbe": _probe(ready, port, PROBE_S, failures=deployed.sizes.startup_limit_s // PROBE_S),
        "readinessProbe": _probe(ready, port, 5, failures=3),
        "livenessProbe": _probe(live, port, PROBE_S, failures=6),
        "lifecycle": stop_later(),
    }


def key_variable(deployed: ClusterDeployment) -> list[Object]:
    """Return the variable of the service in front with the key that clients must send, by reference."""
    if not deployed.serving.api_key:
        return []
    key = {"secretKeyRef": {"name": deployed.secrets["serving.api_key"][0], "key": "api_key"}}
    return [{"name": API_KEY, "valueFrom": key}]


def container_ports(deployed: ClusterDeployment) -> list[Object]:
    """Name the ports that others may reach."""
    return [{"name": key.removesuffix("_port"), "containerPort": port} for key, port in deployed.exposed.items()]


def stop_later() -> Object:
    """Wait until proxies have stopped sending while the server still accepts requests; only then SIGTERM drains it."""
    return {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}}


def container(deployed: ClusterDeployment, name: str) -> Object:
    """Make what server and worker have in common: image, devices, memory, folders, no privileges."""
    settings, sizes = deployed.settings, deployed.sizes
    memory = f"{sizes.memory_mib}Mi"
    devices = {name: str(count) for name, count in sorted(settings.extra_resources.items())}
    if gpus := deployed.served.gpus_per_node:
        devices = {"nvidia.com/gpu": str(gpus), **devices}
    sub_path = {"subPath": settings.sub_path} if settings.sub_path else {}
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
            {"name": "repository", "mountPath": REPOSITORY, "readOnly": True, **sub_path},
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
    """Make a pod template around one container."""
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
    """Select nodes that the engine was built for, by labels of GPU and of node feature discovery."""
    labels = dict(AMX_LABEL) if deployed.served.needs_amx else {}
    if deployed.served.gpu and deployed.sm is not None:
        labels = deployed.settings.gpu_labels(deployed.sm)
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
