"""The commands that prepare other machines: images, manifests, cluster scripts."""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipelines.deploy import cluster, containers, dynamo, nodes, pods
from pipelines.deploy.config import ClusterSettings, ManifestSettings
from pipelines.deploy.facts import (
    Kind,
    RepositoryFacts,
    can_preview,
    key_faults,
    leader_faults,
    not_of_trtllm_serve,
    planned,
    read_served,
    sizes,
    warn_unread,
)
from pipelines.deploy.pods import FRONT, IMAGE, ClusterDeployment, Object, claim_name
from pipelines.deploy.slo_rules import HISTOGRAMS, slo_rules
from pipelines.document.show import count
from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.domain.units import GIB, MIB, show_bytes, show_seconds
from pipelines.engines.registry import with_setting
from pipelines.engines.tensorrt_llm.llm_api import merged
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.files import write_folder
from pipelines.host.machine import Machine, gather
from pipelines.host.screen import say, tell, warn
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.store.store import Store
from triton_repo.llmapi import OPTIONS

# Objects around the pods: Service, PodDisruptionBudget, PodMonitor, HPA, and the rules for its metrics.

QUEUE_METRIC = "triton_queue_ms_per_request"
WAITING_METRIC = "trtllm_waiting_requests"
TTFT_METRIC = "trtllm_mean_ttft_ms"
SCRAPE_INTERVAL, RATE_WINDOW = "15s", "2m"
"""Of the metrics; the window of the rates has eight scrapes, so that a missed one does no harm."""


def workload_object(deployed: ClusterDeployment, template: Object) -> Object:
    """Make the Deployment of a server that fits one node."""
    spec = {
        **({} if deployed.autoscaled else {"replicas": deployed.settings.replicas}),
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": deployed.sizes.startup_limit_s + 300,
        # Start the new server before an old one ends: a cold start takes minutes.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": deployed.labels("server")},
        "template": template,
    }
    return deployed.object("Deployment", "apps/v1", spec)


def service(deployed: ClusterDeployment) -> Object:
    """Make one address for the pods that answer, inside the cluster only, because there is no authentication."""
    ports = []
    for key, port in deployed.exposed.items():
        name = key.removesuffix("_port")
        ports.append({"name": name, "port": port, "targetPort": name, "protocol": "TCP"})
    spec = {"type": "ClusterIP", "selector": deployed.labels("server"), "ports": ports}
    return deployed.object("Service", "v1", spec)


AFTER_THE_SERVICE_S = 20
"""How much later than the service, and nginx 10 s after it, a gateway gives up: clients get the service's own error."""


def route(deployed: ClusterDeployment) -> Object:
    """Make the HTTPRoute (Gateway API v1) that sends requests to this deployment, and the rest to the one beside it."""
    route_settings = deployed.settings.route
    port = deployed.serving.ports[FRONT]
    limit_s = deployed.serving.request_timeout_s + AFTER_THE_SERVICE_S
    limit = f"{limit_s}s" if limit_s < 10**5 else f"{math.ceil(limit_s / 60)}m"  # GEP-2257: five digits at most
    backends = [{"name": deployed.name, "port": port, "weight": route_settings.weight}]
    if route_settings.beside is not None:
        backends.append({"name": route_settings.beside, "port": port, "weight": 100 - route_settings.weight})
    spec = {
        "parentRefs": [{"name": route_settings.gateway}],
        **({"hostnames": [route_settings.hostname]} if route_settings.hostname else {}),
        "rules": [{"backendRefs": backends, "timeouts": {"request": limit}}],
    }
    made = deployed.object("HTTPRoute", "gateway.networking.k8s.io/v1", spec, route_settings.name)
    if deployed.settings.namespace:  # no overlay gives it one
        made["metadata"]["namespace"] = deployed.settings.namespace
    return made


def network_policy(deployed: ClusterDeployment) -> Object:
    """Let in only what clients need; the pods of a group reach each other."""
    ingress: list[Object] = [{"ports": [{"port": port, "protocol": "TCP"} for port in deployed.exposed.values()]}]
    if deployed.served.kind == "multinode":
        ingress.append({"from": [{"podSelector": {"matchLabels": deployed.labels()}}]})
    spec = {"podSelector": {"matchLabels": deployed.labels()}, "policyTypes": ["Ingress"], "ingress": ingress}
    return deployed.object("NetworkPolicy", "networking.k8s.io/v1", spec)


def disruption_budget(deployed: ClusterDeployment) -> Object:
    """Let nodes be drained one server at a time."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": deployed.labels()}}
    return deployed.object("PodDisruptionBudget", "policy/v1", spec)


def pod_monitor(deployed: ClusterDeployment) -> Object:
    """Tell Prometheus where to find the metrics of every server."""
    endpoint = {
        "port": FRONT.removesuffix("_port"),
        "path": "/metrics" if deployed.served.llm_api is None else "/prometheus/metrics",
        "interval": SCRAPE_INTERVAL,
    }
    spec = {
        "selector": {"matchLabels": deployed.labels("server")},
        "podTargetLabels": ["app.kubernetes.io/instance"],
        "podMetricsEndpoints": [endpoint],
    }
    return deployed.object("PodMonitor", "monitoring.coreos.com/v1", spec)


def autoscaler(deployed: ClusterDeployment) -> Object:
    """Make the HPA: one server more when requests wait, one less after a long quiet time.

    Two metrics, or three with TTFT, of which the worst decides: Triton's queue time ends when its model accepts a
    request, and both engines accept requests at once into a queue of their own.
    """
    settings, sizes = deployed.settings, deployed.sizes
    many = deployed.served.kind == "multinode"
    group, kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") if many else ("apps/v1", "Deployment")
    one_in_a_while = {"type": "Pods", "value": 1}
    spec = {
        "scaleTargetRef": {"apiVersion": group, "kind": kind, "name": deployed.name},
        "minReplicas": settings.replicas,
        "maxReplicas": settings.most,
        "metrics": [
            _metric(QUEUE_METRIC, settings.queue_time_ms),
            _metric(WAITING_METRIC, settings.waiting_requests),
            *([_metric(TTFT_METRIC, settings.ttft_ms)] if settings.ttft_ms is not None else []),
        ],
        "behavior": {
            "scaleUp": {
                "stabilizationWindowSeconds": 60,
                "policies": [one_in_a_while | {"periodSeconds": sizes.scale_up_s}],
            },
            "scaleDown": {
                "stabilizationWindowSeconds": sizes.scale_down_s,
                "policies": [one_in_a_while | {"periodSeconds": 300}],
            },
        },
    }
    return deployed.object("HorizontalPodAutoscaler", "autoscaling/v2", spec)


def _metric(name: str, value: int) -> Object:
    target = {"type": "AverageValue", "averageValue": str(value)}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}


def adapter_rules(settings: ManifestSettings) -> Object:
    """Make the values of prometheus-adapter's Helm chart: the metrics of the HPA, per pod.

    Queue counters cover all models, since a request may wait in front of each; they are divided by the requests that
    the engine finished, since every request passes it once.
    """
    by, ttft = "sum by (<<.GroupBy>>)", HISTOGRAMS["ttft"]

    def rate(series: str, more: str = "") -> str:
        return f"{by} (rate({series}{{<<.LabelMatchers>>{more}}}[{RATE_WINDOW}]))"

    def rule(name: str, series: str, query: str, more: str = "") -> Object:
        return {
            "seriesQuery": f'{series}{{namespace!="",pod!=""{more}}}',
            "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
            "name": {"matches": f"^{series}$", "as": name},
            "metricsQuery": query,
        }

    queue, done = "nv_inference_queue_duration_us", rate("nv_inference_request_success", ',model="tensorrt_llm"')
    requests, waiting = "nv_trt_llm_request_metrics", ',request_type="waiting"'
    mean = f"{by} (avg_over_time({requests}{{<<.LabelMatchers>>{waiting}}}[{RATE_WINDOW}]))"
    rules = [
        rule(QUEUE_METRIC, queue, f"{rate(queue)} / 1000 / clamp_min({done}, 0.001)"),
        rule(WAITING_METRIC, requests, mean, waiting),
    ]
    if settings.ttft_ms is not None:
        query = f"{rate(f'{ttft}_sum')} * 1000 / clamp_min({rate(f'{ttft}_count')}, 0.001)"
        rules.append(rule(TTFT_METRIC, f"{ttft}_sum", query))
    return {"rules": {"custom": rules}}


# Render a deployment as Kustomize files: a base, and an overlay for the hardware the engine was built for.

HEADER = "# Written by `make manifests`; change conf/manifests or put an overlay of your own on top.\n"
PREVIEW = "# PREVIEW: written without the repository; memory and times follow from the plan's sizes.\n"
ROUTE = (
    "# Not part of the overlay: all versions share it. Apply it to switch or to go back: kubectl apply -f route.yaml\n"
)
FITS = {
    "cpu": "# The CPU engine.\n",
    "gpu": "# One server, {gpus} GPU{s} of one node.\n",
    "multinode": "# One server over {nodes} nodes with {gpus} GPU{s} each.\n",
}


def files(deployed: ClusterDeployment) -> dict[str, str]:
    """Return all files by relative name, sorted."""
    kind = deployed.served.kind
    if deployed.settings.operator == "dynamo":
        return _dynamo_files(deployed)
    base = {
        "service": service(deployed),
        "network-policy": network_policy(deployed),
        "disruption-budget": disruption_budget(deployed),
        **({"claim": claim} if (claim := pods.claim(deployed)) else {}),
        **({"pod-monitor": pod_monitor(deployed)} if deployed.settings.pod_monitor else {}),
        **({"slo-rules": slo_rules(deployed)} if deployed.has_alerts else {}),
        **({"autoscaler": autoscaler(deployed)} if deployed.autoscaled else {}),
    }
    overlay, further = _workload(deployed, kind)
    texts = {f"base/{name}.yaml": _text(thing) for name, thing in base.items()}
    texts["base/kustomization.yaml"] = _text(_kustomization(f"{name}.yaml" for name in sorted(base)))
    place = f"overlays/{kind}"
    texts |= {f"{place}/{name}.yaml": _text(thing) for name, thing in overlay.items()}
    texts |= {f"{place}/{name}": text for name, text in further.items()}
    gpus, nodes = deployed.served.gpus_per_node, deployed.served.num_nodes
    comment = FITS[kind].format(gpus=gpus, s="" if gpus == 1 else "s", nodes=nodes)
    texts[f"{place}/kustomization.yaml"] = _text(_overlay(deployed, overlay, further), comment)
    if deployed.autoscaled:
        texts["prometheus-adapter.yaml"] = _text(adapter_rules(deployed.settings))
    if deployed.settings.route.name is not None:
        texts["route.yaml"] = _text(route(deployed), ROUTE)
    return dict(sorted(texts.items()))


def _dynamo_files(deployed: ClusterDeployment) -> dict[str, str]:
    """Return the files for Dynamo's operator, which makes Services and everything else of the graph."""
    further, claim = dynamo.option_files(deployed), pods.claim(deployed)
    things = {**({"claim": claim} if claim else {}), "graph": dynamo.graph(deployed)}
    about = _kustomization((f"{name}.yaml" for name in things), deployed.settings.namespace)
    about["configMapGenerator"] = [{"name": pods.options_name(deployed), "files": sorted(further)}]
    about["generatorOptions"] = {"disableNameSuffixHash": True}
    texts = {f"{name}.yaml": _text(thing) for name, thing in things.items()} | further
    texts["kustomization.yaml"] = _text(about, "# For the operator of NVIDIA Dynamo.\n")
    return {f"overlays/{deployed.served.kind}/{name}": text for name, text in texts.items()}


def _workload(deployed: ClusterDeployment, kind: Kind) -> tuple[dict[str, Object], dict[str, str]]:
    """Return the workload's objects by file name, and the files that become a ConfigMap."""
    if kind != "multinode":
        further: dict[str, str] = {}
        if deployed.served.llm_api is not None:  # trtllm-serve collects metrics if they are scraped
            metrics = {"return_perf_metrics": True} if deployed.settings.pod_monitor else {}
            further[OPTIONS] = yaml.safe_dump(merged(metrics, deployed.served.llm_api), sort_keys=False)
        return {"deployment": workload_object(deployed, pods.server_pod(deployed))}, further
    further = {path.name: path.read_text(encoding="utf-8") for path in sorted(nodes.FILES.iterdir()) if path.is_file()}
    workload = nodes.leader_worker_set(deployed)
    # Kustomize does not track names in this type, so the ConfigMap keeps its name and this digest reflects changes.
    digest = hashlib.sha256("".join(further.values()).encode()).hexdigest()[:12]
    for role in ("leaderTemplate", "workerTemplate"):
        workload["spec"]["leaderWorkerTemplate"][role]["metadata"]["annotations"]["mpi-files"] = digest
    return {"leaderworkerset": workload}, further


def _overlay(deployed: ClusterDeployment, overlay: dict[str, Object], further: dict[str, str]) -> Object:
    resources = ["../../base", *(f"{name}.yaml" for name in sorted(overlay))]
    made = _kustomization(resources, deployed.settings.namespace)
    made["images"] = [_image(deployed.image_reference)]
    if deployed.served.llm_api is not None:  # the digest in the name starts new pods when the options change
        made["configMapGenerator"] = [{"name": pods.options_name(deployed), "files": sorted(further)}]
    elif further:
        made["configMapGenerator"] = [{"name": f"{deployed.name}-mpi", "files": sorted(further)}]
        made["generatorOptions"] = {"disableNameSuffixHash": True}
    return made


def _kustomization(resources: Iterable[str], namespace: str | None = None) -> Object:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(resources),
        **({"namespace": namespace} if namespace else {}),
    }


def _image(reference: str) -> dict[str, str]:
    """Convert `registry:5000/name:tag` or `name@sha256:...` to Kustomize's fields."""
    name, _, digest = reference.partition("@")
    head, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # no tag; the colon, if any, belongs to a registry's port
        head, tag = name, ""
    made = {"name": IMAGE, "newName": head}
    if digest:
        return made | {"digest": digest}
    return made | ({"newTag": tag} if tag else {})


class _Plain(yaml.SafeDumper):
    """Writes repeated parts in full, because anchors are hard to read and to patch."""

    def ignore_aliases(self, data: Any) -> bool:
        """See the class."""
        return True


def _text(thing: Object, comment: str = "") -> str:
    return HEADER + comment + yaml.dump(thing, Dumper=_Plain, sort_keys=False, width=4096, allow_unicode=True)


# `make manifests`: find the repository, write the files, and say what else the cluster needs.


def write_manifests(settings: Settings, machine: Machine, overrides: Sequence[str]) -> Path:
    """Write Kustomize files for the repository of a configuration.

    Returns:
        the overlay, for `kubectl apply -k`.

    Raises:
        UserError: there is no repository yet, or it cannot be deployed like this.
    """
    check_folders({"manifests.folder": settings.manifests.folder})
    preview = settings.manifests.preview
    if preview:
        if (repository := settings.serving.repository) is not None:
            what = f"manifests.preview=true goes without a repository, and serving.repository='{repository}' is given."
            raise UserError(what, todo="Leave out one of them.")
        plan = make_plan(settings, "repository", Store(settings.paths.store), machine)
        warn(*plan.warnings)
        served = planned(plan)
    else:
        served = read_served(_repository(settings, machine, overrides))
    refuse(_faults(settings, served))
    deployed = ClusterDeployment(
        served,
        settings.manifests,
        settings.serving,
        settings.image,
        settings.hardware.sm,
        settings.benchmark.slo.to_slo(),
        settings.cluster,
    )
    _check_beside(deployed)
    refuse(dynamo.dynamo_faults(deployed) if settings.manifests.operator == "dynamo" else ())
    # beside the real ones, so that neither is taken for an edited version of the other
    folder = settings.manifests.folder.absolute() / (f"{deployed.name}-preview" if preview else deployed.name)
    texts = files(deployed)
    if preview:  # the files of a group of nodes begin with #!
        texts = {name: PREVIEW + text if name.endswith(".yaml") else text for name, text in texts.items()}
    changed = write_folder(folder, texts, command="make manifests", setting="manifests.folder")
    overlay = folder / "overlays" / served.kind
    _say(deployed, overlay, changed=changed)
    return overlay


def _check_beside(deployed: ClusterDeployment) -> None:
    """Refuse a route that the version beside cannot share, as far as its manifests are here."""
    settings = deployed.settings
    if (beside := settings.route.beside) is None:
        return
    if beside == deployed.name:
        what = f"manifests.route.beside={deployed.name} is the name of this deployment."
        raise UserError(what, todo="Give the new version a name of its own: manifests.name=...")
    port, file = deployed.serving.ports[FRONT], settings.folder / beside / "base" / "service.yaml"
    stated = re.search(r"name: openai\n *port: (\d+)", file.read_text()) if file.is_file() else None
    if stated and int(stated[1]) != port:
        raise UserError(
            f"serving.openai_port={port}, but manifests.route.beside={beside} listens on port {stated[1]} ({file}), and"
            " the route sends requests to one port of both.",
            todo=f"Give the new version the same: serving.openai_port={stated[1]}",
        )
    file = settings.folder / beside / "route.yaml"
    if not file.is_file():
        return
    try:
        theirs, ours = _shared(yaml.safe_load(file.read_text(encoding="utf-8"))), _shared(route(deployed))
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError):
        what = f"{file} is not a route as `make manifests` writes one."
        raise UserError(what, todo="Write the manifests of that version again, or move the file away.") from None
    for setting, value in ours.items():
        if value != theirs[setting]:
            raise UserError(
                f"{setting}={value}, but manifests.route.beside={beside} has {theirs[setting]} ({file}),"
                " and both versions share one route.",
                todo=f"Give the new version the same: {setting}={theirs[setting]}",
            )


def _shared(made: Object) -> dict[str, str]:
    """Return what all versions of a route have in common, by setting."""
    about = made["metadata"]
    return {
        "manifests.route.name": about["name"],
        "manifests.namespace": about.get("namespace", "null"),
        "manifests.route.gateway": made["spec"]["parentRefs"][0]["name"],
        "manifests.route.hostname": made["spec"].get("hostnames", ["null"])[0],
    }


OF_MANIFESTS, DECIDES = ("manifests", "cluster", "image"), "image.base_llm_api"
"""Overrides that a repository does not depend on, and the one among them that it does."""


def _repository(settings: Settings, machine: Machine, overrides: Sequence[str]) -> Path:
    """Return the repository given, or the finished one that the plan finds."""
    if settings.serving.repository is not None:
        return settings.serving.repository.absolute()
    plan = make_plan(settings, "repository", Store(settings.paths.store), machine)
    step = plan.steps[-1]
    if step.artifact is None:
        plain = [(word, word.lstrip("+~")) for word in overrides]
        made_by = [word for word, key in plain if key.startswith(DECIDES) or not key.startswith(OF_MANIFESTS)]
        raise UserError(
            f"There is no repository of {step.node.label} yet ({step.why}).",
            allowed="A preview needs none: manifests.preview=true." if can_preview(plan) else "",
            todo="Name an existing one (serving.repository=/its/folder), or make it:",
            command=["make", "repository", *made_by],
        )
    warn(*plan.warnings)
    return step.artifact.path


def _faults(settings: Settings, served: RepositoryFacts) -> Iterator[Fault]:
    """Find settings that work on one machine but not in a pod."""
    serving = settings.serving
    if settings.cluster.disaggregated and settings.manifests.operator != "dynamo":
        what = f"cluster.prefill={settings.cluster.prefill} has no effect on manifests.operator=none."
        yield Fault(what, todo="Add manifests.operator=dynamo, or write scripts: make scripts")
    if serving.chat_template is not None:
        yield Fault(
            f"serving.chat_template='{serving.chat_template}' is a file of this machine, which no pod has.",
            todo="Put the template into the tokenizer (chat_template) and write the repository again.",
        )
    if served.llm_api is not None:
        yield from key_faults(serving)
        if served.num_nodes > 1:
            what = f"triton.num_nodes={served.num_nodes}: manifests of the LLM API are for a server on one node."
            yield Fault(what, todo="Write scripts for several: make scripts cluster=slurm")
    yield from _one_node_faults(settings, served)
    yield from leader_faults(serving, served.num_nodes)
    route = settings.manifests.route
    if route.name is not None and settings.manifests.operator == "dynamo":
        yield Fault(f"manifests.route.name={route.name} has no effect on manifests.operator=dynamo.")
    engine = with_setting(settings.engine.name)
    if engine is not None and not engine.needs_gpu and served.gpu:
        yield Fault(f"engine={engine.setting} is set, but the repository runs on TensorRT-LLM.")


def _one_node_faults(settings: Settings, served: RepositoryFacts) -> Iterator[Fault]:
    """Refuse a claim for one node that several pods mount; a group's pods and Dynamo's frontend mount it too."""
    own, cluster = settings.manifests, settings.cluster
    if own.storage != "claim" or own.claim is not None or own.access_mode != "ReadWriteOnce":
        return
    dynamo = own.operator == "dynamo"
    servers = own.most if served.llm_api is None else own.replicas
    pods = 1 + (cluster.prefill + cluster.decode or own.replicas) if dynamo else servers * served.num_nodes
    if pods > 1:
        todo = "Set manifests.access_mode=ReadWriteMany"
        if not dynamo and served.num_nodes == 1:
            one = "manifests.replicas=1" + " manifests.max_replicas=1" * (served.llm_api is None)
            todo += f", or one server: {one}"
        what = f"manifests.access_mode=ReadWriteOnce binds the claim to one node, and up to {pods} pods mount it."
        yield Fault(what, todo=todo)


def _warn_unread(deployed: ClusterDeployment) -> None:
    settings, served, triton = deployed.settings, deployed.served, deployed.served.llm_api is None
    groups = {"manifests": settings, "serving": deployed.serving, "cluster": deployed.cluster, "image": deployed.image}
    routed = settings.route.name is not None  # a route follows the time limit of requests
    warn_unread(
        "make manifests",
        groups,
        ("manifests", ["queue_time_ms", "waiting_requests"], not deployed.autoscaled),
        ("manifests", ["max_replicas", "ttft_ms"], not triton),
        ("manifests", ["slo_percent"], not deployed.has_alerts),
        ("manifests", ["storage_class", "access_mode"], pods.claim(deployed) is None),
        ("manifests", ["claim"], settings.storage != "claim"),
        ("manifests", ["ssh_secret"], served.kind != "multinode"),
        ("serving", ["tritonserver"], True),
        ("serving", ["host"], deployed.serving.host != "0.0.0.0"),
        ("serving", ["server"], triton),
        ("serving", ["restarts", "show_log"], served.kind == "multinode" or not triton),
        ("serving", ["multi_gpu"], not served.gpu),
        ("serving", not_of_trtllm_serve(time_limit=routed), not triton),
        ("cluster", [key for key in ClusterSettings.model_fields if key not in ("prefill", "decode")], True),
        ("image", ["name", "tag"], settings.image is not None or not triton),
    )


def _say(deployed: ClusterDeployment, overlay: Path, *, changed: bool) -> None:
    served, needed, settings = deployed.served, deployed.sizes, deployed.settings
    what = "preview" if settings.preview else f"repository: {served.folder}"
    tell(f"{what} ({served.label}, {served.variant}, {'about ' * settings.preview}{show_bytes(served.size_bytes)})")
    gpus = f"{count(served.gpus_per_node, 'GPU')}, " if served.gpu else ""
    pods = f"{served.num_nodes} nodes, each " if served.num_nodes > 1 else ""
    shm = f"{needed.shm_mib} MiB of it /dev/shm"
    tell(f"one server: {pods}{gpus}{needed.cpus} CPUs, {show_bytes(needed.memory_mib * 2**20)} of memory, {shm}")
    start = f"about {show_seconds(needed.startup_s)} to start"
    if settings.operator != "dynamo":  # which has a probe of its own
        start += f", {show_seconds(needed.startup_limit_s)} at most"
    tell(f"            {start}; up to {show_seconds(needed.drain_s)} to drain")
    _say_memory(deployed)
    _warn_unread(deployed)
    if served.gpu and deployed.sm is None:
        tell("note: add hardware=... to select nodes with the GPU that the engine was built for")
    if served.needs_amx:
        tell(
            "note: nodes must have AMX, as the engine was built for it (labels of Node Feature Discovery);"
            " engine.openvino.experts=separate builds one for all"
        )
    if "/" not in deployed.image_reference:
        tell(
            f"note: {deployed.image_reference} names no registry, so nodes must have it already; or push it to one and"
            " give manifests.image=REGISTRY/NAME:TAG"
        )
    if settings.operator == "dynamo":
        tell(f"note: Dynamo's workers of {deployed.image_reference}, not run here; its operator must be in the cluster")
        tell("note: HPA, alerts and NetworkPolicy are not written")
        tell(
            f"note: clients reach the Service {deployed.name}-frontend, port {dynamo.PORT}, which asks for no password"
        )
    elif served.llm_api is not None:
        tell(f"note: trtllm-serve of {deployed.image_reference}, not run here; without HPA and alerts")
        tell("note: everyone who reaches its port may also POST /update_weights and /release_memory")
    if deployed.slo.limits and not settings.pod_monitor:
        tell("note: no alerts for benchmark.slo, because manifests.pod_monitor=false")
    say(f"\n{'written' if changed else 'unchanged'}: {relative_to_cwd(overlay.parent.parent)}")
    if settings.preview:
        tell("Before you apply them, make the repository where the GPU is, and write them from it:")
        say("      make repository ... && make manifests ...   (without manifests.preview)")
    else:
        _say_next(deployed, overlay)


def _say_memory(deployed: ClusterDeployment) -> None:
    """Warn of a limit below what the server is computed to need."""
    if (given := deployed.settings.memory_gib) is None:
        return
    unset = deployed.settings.model_copy(update={"memory_gib": None})
    computed = sizes(deployed.served, unset, deployed.serving).memory_mib * MIB
    if given * GIB < computed:
        tell(
            f"note: manifests.memory_gib={given:g} is less than the computed need of {show_bytes(computed)};"
            " Kubernetes kills a server that uses more than its limit"
        )


def _say_next(deployed: ClusterDeployment, overlay: Path) -> None:
    """Print what must be there before the first start, and how to start."""
    settings = deployed.settings
    tell("Before the first start:")
    if settings.storage == "claim":
        folder = f"folder {settings.sub_path} of the " if settings.sub_path else ""
        tell(f"  - copy the repository into the {folder}claim {claim_name(deployed)}")
    for secret, keys in deployed.secrets.values():
        tell(f"  - Secret {secret}: {keys}")
    if deployed.autoscaled:
        tell(f"  - give {relative_to_cwd(overlay.parent.parent / 'prometheus-adapter.yaml')} to prometheus-adapter")
    say(f"Then: kubectl apply -k {relative_to_cwd(overlay)}")
    if settings.route.name is not None:
        rest = ""
        if settings.route.beside and settings.route.weight < 100:
            rest = f", the rest to {settings.route.beside}, to port {deployed.serving.ports[FRONT]} of both"
        say(f"When it is ready: kubectl apply -f {relative_to_cwd(overlay.parent.parent / 'route.yaml')}")
        tell(f"      sends {settings.route.weight} % of the requests here{rest}")
        if settings.route.beside and not (settings.folder / settings.route.beside).is_dir():
            tell(
                f"      {relative_to_cwd(settings.folder)} has no {settings.route.beside}: see that its Service exists"
            )


def image(overrides: Sequence[str]) -> int:
    """Build the container image."""
    return containers.build_image(load(overrides), gather())


def shell(overrides: Sequence[str]) -> int:
    """Open a shell in the container image."""
    return containers.open_shell(load(overrides), gather())


def manifests(overrides: Sequence[str]) -> int:
    """Write Kubernetes manifests for a finished repository."""
    write_manifests(load(overrides), gather(), overrides)
    return 0


def scripts(overrides: Sequence[str]) -> int:
    """Write scripts that build and serve on a cluster."""
    cluster.write_scripts(load(overrides), gather(), overrides)
    return 0
