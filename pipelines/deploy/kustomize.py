"""Render a deployment as Kustomize files: a base, and an overlay for the hardware the engine was built for."""

from __future__ import annotations

import hashlib
from typing import Any

import yaml

from pipelines.deploy import nodes, objects, pods, storage
from pipelines.deploy.deployment import IMAGE, ClusterDeployment, Object
from pipelines.deploy.facts import Kind

HEADER = "# Written by `make manifests`; change conf/manifests or put an overlay of your own on top.\n"
FITS = {
    "cpu": "# The CPU engine.\n",
    "gpu": "# One server, {gpus} GPU{s} of one node.\n",
    "multinode": "# One server over {nodes} nodes with {gpus} GPU{s} each.\n",
}


def files(deployed: ClusterDeployment) -> dict[str, str]:
    """Return all files by relative name, sorted."""
    kind = deployed.served.kind
    base = {
        "service": objects.service(deployed),
        "network-policy": objects.network_policy(deployed),
        "disruption-budget": objects.disruption_budget(deployed),
        **({"claim": claim} if (claim := storage.claim(deployed)) else {}),
        **({"pod-monitor": objects.pod_monitor(deployed)} if deployed.settings.pod_monitor else {}),
        **({"autoscaler": objects.autoscaler(deployed)} if deployed.autoscaled else {}),
    }
    overlay, further = _workload(deployed, kind)
    found = {f"base/{name}.yaml": _text(thing) for name, thing in base.items()}
    found["base/kustomization.yaml"] = _text(_kustomization(f"{name}.yaml" for name in sorted(base)))
    place = f"overlays/{kind}"
    found |= {f"{place}/{name}.yaml": _text(thing) for name, thing in overlay.items()}
    found |= {f"{place}/{name}": text for name, text in further.items()}
    found[f"{place}/kustomization.yaml"] = _text(_overlay(deployed, overlay, further), _comment(deployed, kind))
    if deployed.autoscaled:
        found["prometheus-adapter.yaml"] = _text(objects.adapter_rules())
    return dict(sorted(found.items()))


def _workload(deployed: ClusterDeployment, kind: Kind) -> tuple[dict[str, Object], dict[str, str]]:
    """Return the workload's objects by file name, and the files that become a ConfigMap."""
    if kind != "multinode":
        return {"deployment": objects.workload(deployed, pods.server_pod(deployed))}, {}
    further = {path.name: path.read_text(encoding="utf-8") for path in sorted(nodes.FILES.iterdir()) if path.is_file()}
    workload = nodes.leader_worker_set(deployed)
    # Kustomize does not track names in this type, so the ConfigMap keeps its name and this digest reflects changes.
    digest = hashlib.sha256("".join(further.values()).encode()).hexdigest()[:12]
    for role in ("leaderTemplate", "workerTemplate"):
        workload["spec"]["leaderWorkerTemplate"][role]["metadata"]["annotations"]["mpi-files"] = digest
    return {"leaderworkerset": workload}, further


def _overlay(deployed: ClusterDeployment, overlay: dict[str, Object], further: dict[str, str]) -> Object:
    resources = ["../../base", *(f"{name}.yaml" for name in sorted(overlay))]
    made: Object = _kustomization(resources)
    if deployed.settings.namespace:
        made["namespace"] = deployed.settings.namespace
    made["images"] = [_image(deployed.image_reference)]
    if further:
        made["configMapGenerator"] = [{"name": f"{deployed.name}-mpi", "files": sorted(further)}]
        made["generatorOptions"] = {"disableNameSuffixHash": True}
    return made


def _kustomization(resources: Any) -> Object:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(resources),
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


def _comment(deployed: ClusterDeployment, kind: Kind) -> str:
    gpus = deployed.served.gpus_per_node
    return FITS[kind].format(gpus=gpus, s="" if gpus == 1 else "s", nodes=deployed.served.num_nodes)


class _Plain(yaml.SafeDumper):
    """Writes repeated parts in full, because anchors are hard to read and to patch."""

    def ignore_aliases(self, data: Any) -> bool:
        """See the class."""
        return True


def _text(thing: Object, comment: str = "") -> str:
    return HEADER + comment + yaml.dump(thing, Dumper=_Plain, sort_keys=False, width=4096, allow_unicode=True)
