"""Probe with kubectl whether a Kubernetes cluster can run the output of `make manifests`."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.doctor.versions import ProbeResult
from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.engines.registry import ServerBackend, with_setting
from pipelines.host.files import json_object
from pipelines.host.machine import gather
from pipelines.plan.plan import make_plan
from pipelines.serving.repository import DESCRIPTION
from pipelines.settings.root import Settings
from pipelines.store.store import Store

TIMEOUT_S = 10
TESTED = (30, 37)
"""Minor versions of Kubernetes whose schemas the manifests are tested with."""
NOT_FOUND = "(NotFound)"
Answer = dict[str, Any] | str
"""JSON of the API server, or why there is none."""


class KubeClient:
    """Read-only questions to the cluster of a kubeconfig; its current context decides."""

    def __init__(self, kubeconfig: Path, namespace: str | None) -> None:
        self._kubectl = ["kubectl", "--kubeconfig", str(kubeconfig), f"--request-timeout={TIMEOUT_S}s"]
        self._namespace = ["--namespace", namespace] if namespace else []

    def raw(self, path: str) -> Answer:
        """Return the JSON at a path of the API."""
        answer = self._run("get", "--raw", path)
        return json.loads(answer.stdout) if answer.returncode == 0 else _reason(answer.stderr)

    def why_no(self, kind: str, name: str) -> str:
        """Return why an object of the namespace cannot be used; empty if it exists. Its content is not shown."""
        answer = self._run("get", kind, name, *self._namespace, "--output=name")
        return "" if answer.returncode == 0 else _reason(answer.stderr)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self._kubectl, *arguments]
        try:  # a plugin that asks for a password must not wait for one
            return subprocess.run(
                command, capture_output=True, text=True, timeout=2 * TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"no answer in {2 * TIMEOUT_S} s")


def _reason(stderr: str) -> str:
    """Return the last line of kubectl's message, without its prefix."""
    lines = stderr.strip().splitlines() or ["kubectl failed and said nothing"]
    return lines[-1].removeprefix("error: ").removeprefix("Error from server ")


def probe_cluster(settings: Settings) -> list[ProbeResult]:
    """Compare a cluster with what the manifests of a configuration need; nothing without `doctor.kubeconfig`.

    Raises:
        UserError: there is no such file.
    """
    kubeconfig = settings.doctor.kubeconfig
    if kubeconfig is None:
        return []
    if not kubeconfig.is_file():
        what = f"doctor.kubeconfig='{kubeconfig}' is not a file."
        raise UserError(what, todo="Give the cluster's kubeconfig, usually $HOME/.kube/config.")
    if shutil.which("kubectl") is None:
        return [ProbeResult("kubectl", "not on PATH", "bad", "Install it: kubernetes.io/docs/tasks/tools")]
    client = KubeClient(kubeconfig, settings.manifests.namespace)
    version = client.raw("/version")
    if isinstance(version, str):
        return [ProbeResult("API server", version, "bad", f"Check doctor.kubeconfig={kubeconfig}.")]
    return [
        _version(version),
        *_types(settings, client.raw("/apis")),
        _nodes(settings, client.raw("/api/v1/nodes")),
        *_storage(settings, client),
        *_secrets(settings, client),
    ]


def _version(version: dict[str, Any]) -> ProbeResult:
    text, minor = str(version.get("gitVersion")), "".join(c for c in str(version.get("minor")) if c.isdigit())
    if minor and TESTED[0] <= int(minor) <= TESTED[1]:
        return ProbeResult("Kubernetes", text)
    return ProbeResult("Kubernetes", text, "note", f"The manifests are tested with 1.{TESTED[0]} to 1.{TESTED[1]}.")


def _needed_types(settings: Settings) -> dict[str, tuple[str, str]]:
    """Return the types beyond Kubernetes' own: API group and version -> (what brings it, what does without it)."""
    manifests, engine = settings.manifests, with_setting(settings.engine.name)
    llm_api = engine is not None and engine.server is ServerBackend.LLM_API
    needed = {}
    if manifests.operator == "dynamo":
        return {"nvidia.com/v1beta1": ("the operator of NVIDIA Dynamo", "manifests.operator=none")}
    if manifests.pod_monitor:
        needed["monitoring.coreos.com/v1"] = ("the Prometheus operator", "manifests.pod_monitor=false")
    if manifests.most > manifests.replicas and not llm_api:
        needed["custom.metrics.k8s.io"] = ("prometheus-adapter", f"manifests.max_replicas={manifests.replicas}")
    if manifests.route.name is not None:
        needed["gateway.networking.k8s.io/v1"] = ("the Gateway API", "no manifests.route")
    if settings.triton.num_nodes > 1:
        needed["leaderworkerset.x-k8s.io/v1"] = ("LeaderWorkerSet", "triton.num_nodes=1")
    return needed


def _types(settings: Settings, groups: Answer) -> list[ProbeResult]:
    if isinstance(groups, str):
        return [ProbeResult("types", f"unknown: {groups}", "note")]
    served = {version["groupVersion"] for group in groups["groups"] for version in group["versions"]}
    served |= {group["name"] for group in groups["groups"]}
    return [
        ProbeResult(api, f"there ({brings})")
        if api in served
        else ProbeResult(api, "missing", "bad", f"Install {brings}, or do without: {without}")
        for api, (brings, without) in _needed_types(settings).items()
    ]


def _nodes(settings: Settings, nodes: Answer) -> ProbeResult:
    """Look for a node that can take one pod of the server."""
    if isinstance(nodes, str):
        return ProbeResult("nodes", f"unknown: {nodes}", "note")
    ready = [node for node in nodes["items"] if _is_ready(node)]
    engine, ranks = with_setting(settings.engine.name), settings.build.tp_size * settings.build.pp_size
    text = f"{count(len(ready), 'node')} ready"
    if engine is None or not engine.needs_gpu:
        return ProbeResult("nodes", text, "ok" if ready else "bad", "" if ready else "Add a node.")
    each = -(-ranks // settings.triton.num_nodes)
    sm = settings.hardware.sm
    labels = {} if sm is None else settings.manifests.gpu_labels(sm)
    fits = [node for node in ready if _gpus(node, labels) >= each]
    most = max((_gpus(node, {}) for node in ready), default=0)
    kind = f" of compute capability {sm:g}" if sm is not None else ""
    text += f"; {len(fits)} with the {count(each, 'GPU')}{kind} that one pod needs"
    if len(fits) >= settings.triton.num_nodes:
        return ProbeResult("nodes", text)
    todo = f"The largest has {count(most, 'GPU')}, of any kind. GPUs are counted by NVIDIA's GPU operator."
    return ProbeResult("nodes", text, "bad", todo)


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node["status"].get("conditions", ())
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and not node["spec"].get("unschedulable")


def _gpus(node: dict[str, Any], labels: dict[str, str]) -> int:
    """Return the GPUs of a node; 0 if it lacks one of these labels."""
    if not labels.items() <= node["metadata"].get("labels", {}).items():
        return 0
    return int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0))


def _storage(settings: Settings, client: KubeClient) -> Sequence[ProbeResult]:
    manifests = settings.manifests
    if manifests.storage != "claim":
        return []
    if manifests.claim is not None:
        return [_object(client, "pvc", manifests.claim, "manifests.claim")]
    classes = client.raw("/apis/storage.k8s.io/v1/storageclasses")
    if isinstance(classes, str):
        return [ProbeResult("storage class", f"unknown: {classes}", "note")]
    named = [item["metadata"]["name"] for item in classes["items"]]
    usual = [item["metadata"]["name"] for item in classes["items"] if _is_default(item)]
    if (storage_class := manifests.storage_class) is not None and storage_class not in named:
        todo = f"Here: {', '.join(named) or 'none'}."
        return [ProbeResult("storage class", f"manifests.storage_class={storage_class} is missing", "bad", todo)]
    if storage_class is None and not usual:
        todo = f"Give manifests.storage_class: {', '.join(named) or 'none is here'}."
        return [ProbeResult("storage class", "the cluster has no default", "bad", todo)]
    text = f"{storage_class or usual[0]}; whether it can be {manifests.access_mode} is unknown"
    return [ProbeResult("storage class", text, "note")]


def _is_default(item: dict[str, Any]) -> bool:
    notes = item["metadata"].get("annotations") or {}
    return bool(notes.get("storageclass.kubernetes.io/is-default-class") == "true")


def _secrets(settings: Settings, client: KubeClient) -> list[ProbeResult]:
    """Look for the Secrets that are known before there is a repository."""
    manifests, over_nodes = settings.manifests, settings.triton.num_nodes > 1
    try:
        name = manifests.object_name(*_served(settings))
    except UserError as error:
        return [ProbeResult("secrets", f"names unknown: {error.faults[0].message}", "note")]
    needed = manifests.secrets(name, api_key=settings.serving.api_key, over_nodes=over_nodes)
    return [_object(client, "secret", secret, setting) for setting, (secret, _) in needed.items()]


def _served(settings: Settings) -> tuple[str, str]:
    """Return the model and the format in the names of the manifests: those of the repository given, else of the plan.

    Raises:
        UserError: the repository does not say it, or there is no plan.
    """
    if (repository := settings.serving.repository) is not None:
        file = repository / DESCRIPTION
        described = json_object(file) if file.is_file() else {}
        if not {"label", "variant"} <= described.keys():
            raise UserError(f"serving.repository='{repository}' has no complete {DESCRIPTION}.")
        return described["label"], described["variant"]
    planned = make_plan(settings, "repository", Store(settings.paths.store), gather()).deployment
    return planned.settings.model.label, planned.variant.label


def _object(client: KubeClient, kind: str, name: str, setting: str) -> ProbeResult:
    why = client.why_no(kind, name)
    if not why:
        return ProbeResult(setting, f"{kind} {name} is there")
    if NOT_FOUND in why:
        return ProbeResult(setting, f"{kind} {name} is missing", "bad", "Create it in the namespace of the manifests.")
    return ProbeResult(setting, f"{kind} {name}: unknown: {why}", "note")
