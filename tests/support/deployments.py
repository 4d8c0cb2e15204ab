"""Repositories of every kind that can be deployed, and the output of Kustomize for their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipelines.deploy.commands import files
from pipelines.deploy.config import ClusterSettings, ImageSettings, ManifestSettings
from pipelines.deploy.facts import read_served
from pipelines.deploy.pods import ClusterDeployment
from pipelines.domain.benchmark import NO_SLO, Slo
from pipelines.serving.config import ServingSettings
from tests.support.engine_folders import write_engine, write_llm_folder, write_tokenizer
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec
from triton_repo.write import write_repository

KINDS = ("cpu", "gpu", "multinode")
SPECS = {
    "llm_api": (RepositorySpec("llmapi", "llama_3_8b", "fp8", tp_size=2), TritonSettings()),
    "cpu": (RepositorySpec("openvino", "tiny_llama", "fp8", options={"num_threads": 2}), TritonSettings()),
    "gpu": (RepositorySpec("tensorrt_llm", "llama_3_8b", "fp8", tp_size=2), TritonSettings()),
    "multinode": (
        RepositorySpec("tensorrt_llm", "llama_3_1_405b", "fp8", tp_size=4, pp_size=2),
        TritonSettings(num_nodes=2),
    ),
}


def repository(folder: Path, kind: str) -> Path:
    """Write a repository as `make repository` does, with empty weights."""
    spec, settings = SPECS[kind]
    tokenizer = write_tokenizer(folder / "model")
    if kind == "llm_api":
        engine = write_llm_folder(folder / "engine", tensor_parallel_size=spec.tp_size)
    else:
        engine = write_engine(folder / "engine", spec.flavour, tp_size=spec.tp_size, pp_size=spec.pp_size)
    repo = folder / "repo"
    write_repository(
        repo, engine_dir=engine, tokenizer_dir=tokenizer, settings=settings, spec=spec, made_from={"build": "0"}
    )
    return repo


def deployed(
    folder: Path,
    kind: str,
    serving: Mapping[str, Any] | None = None,
    slo: Slo = NO_SLO,
    cluster: ClusterSettings | None = None,
    **choices: Any,
) -> ClusterDeployment:
    """Return a deployment of the given kind; `choices` are settings of conf/manifests."""
    settings = ManifestSettings(**choices)
    return ClusterDeployment(
        read_served(repository(folder, kind)),
        settings,
        ServingSettings(**(serving or {})),
        ImageSettings(),
        9.0,
        slo,
        cluster or ClusterSettings(),
    )


def write(made: ClusterDeployment, folder: Path) -> Path:
    """Write the files and return the overlay."""
    for name, text in files(made).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "overlays" / made.served.kind


def build(overlay: Path) -> list[dict[str, Any]]:
    """Emulate `kustomize build` for our own files: only resources, images, namespace and ConfigMaps."""
    about = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "resources", "images", "namespace", "configMapGenerator", "generatorOptions"}
    assert set(about) <= known
    found: list[dict[str, Any]] = []
    for name in about["resources"]:
        place = overlay / name
        found += build(place) if place.is_dir() else [yaml.safe_load(place.read_text())]
    for made in about.get("configMapGenerator", []):
        assert about.get("generatorOptions") in (None, {"disableNameSuffixHash": True})  # a suffix is left out here
        data = {name: (overlay / name).read_text() for name in made["files"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})
    for thing in found:
        if "namespace" in about:
            thing["metadata"]["namespace"] = about["namespace"]
        for image in about.get("images", []):
            _replace_image(thing, image)
    return found


def _replace_image(node: Any, image: Mapping[str, str]) -> None:
    if isinstance(node, dict):
        if node.get("image") == image["name"]:
            end = f"@{image['digest']}" if "digest" in image else f":{image['newTag']}" if "newTag" in image else ""
            node["image"] = image["newName"] + end
        for child in node.values():
            _replace_image(child, image)
    elif isinstance(node, list):
        for child in node:
            _replace_image(child, image)


def templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pod templates by component: server and, if there is one, worker."""
    found = {}
    for thing in objects:
        spec = thing.get("spec", {})
        if thing["kind"] == "Deployment":
            found["server"] = spec["template"]
        if thing["kind"] == "LeaderWorkerSet":
            found["server"] = spec["leaderWorkerTemplate"]["leaderTemplate"]
            found["worker"] = spec["leaderWorkerTemplate"]["workerTemplate"]
        if thing["kind"] == "DynamoGraphDeployment":
            found |= {each["name"]: each["podTemplate"] for each in spec["components"]}
    return found


def by_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the only object of a kind."""
    (found,) = [thing for thing in objects if thing["kind"] == kind]
    return found
