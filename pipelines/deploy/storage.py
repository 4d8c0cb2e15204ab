"""Storage of the repository: a claim, a folder on the node, or an empty folder that is filled first."""

from __future__ import annotations

from pipelines.deploy.deployment import IMAGE, ClusterDeployment, Object


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
    if (words := settings.fetch.words) is None:
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
        "command": [*words],
        "env": env,
        **({"envFrom": [{"secretRef": {"name": settings.fetch.secret}}]} if settings.fetch.secret else {}),
        "securityContext": rights,
        "volumeMounts": [
            {"name": "repository", "mountPath": "/repository"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "workspace", "mountPath": "/workspace"},
        ],
    }
