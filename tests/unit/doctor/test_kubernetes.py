"""A cluster's prerequisites, as kubectl tells them."""

import json
from pathlib import Path

import pytest

from pipelines.deploy.config import ManifestSettings
from pipelines.doctor.kubernetes import probe_cluster
from pipelines.doctor.versions import ProbeResult
from pipelines.domain.errors import UserError
from pipelines.settings.compose import load
from tests.support.deployments import repository
from tests.support.engine_folders import write_engine

KUBERNETES = {"minor": "33", "gitVersion": "v1.33.4"}
GROUPS = {
    "groups": [
        {"name": "monitoring.coreos.com", "versions": [{"groupVersion": "monitoring.coreos.com/v1"}]},
        {"name": "custom.metrics.k8s.io", "versions": [{"groupVersion": "custom.metrics.k8s.io/v1beta1"}]},
    ]
}
READY = [{"type": "Ready", "status": "True"}]


def node(gpus: int, compute: str = "9.0", **spec: bool) -> dict:
    major, minor = compute.split(".")
    labels = {"nvidia.com/gpu.compute.major": major, "nvidia.com/gpu.compute.minor": minor}
    status = {"conditions": READY, "allocatable": {"nvidia.com/gpu": str(gpus)} if gpus else {}}
    return {"metadata": {"labels": labels}, "spec": spec, "status": status}


def storage_class(name: str, default: str) -> dict:
    return {"metadata": {"name": name, "annotations": {"storageclass.kubernetes.io/is-default-class": default}}}


@pytest.fixture
def cluster(programs, tmp_path):
    """A function that examines a cluster which serves the given paths; others are forbidden, and objects missing."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.touch()

    def examine(
        *overrides: str, there: tuple[str, ...] = (), nodes: tuple[dict, ...] = (), **paths: dict
    ) -> dict[str, ProbeResult]:
        answers = {
            "/version": KUBERNETES,
            "/apis": GROUPS,
            "/api/v1/nodes": {"items": list(nodes)},
            "/apis/storage.k8s.io/v1/storageclasses": {"items": [storage_class("standard", "true")]},
            **{f"/{path.replace('_', '/')}": answer for path, answer in paths.items()},
        }
        cases = "".join(f"*'--raw {path}') echo '{json.dumps(answer)}';;" for path, answer in answers.items() if answer)
        cases += "".join(f"*' {name} '*) echo {name};;" for name in there)
        cases += "*--raw*) echo 'Error from server (Forbidden): not yours' >&2; exit 1;;"
        programs("kubectl", f'case "$*" in {cases} *) echo "Error from server (NotFound): none" >&2; exit 1;; esac')
        found = probe_cluster(load([f"doctor.kubeconfig={kubeconfig}", *overrides]))
        return {result.name: result for result in found}

    return examine


def test_no_cluster_is_asked_without_a_kubeconfig() -> None:
    assert probe_cluster(load([])) == []


def test_a_cluster_that_has_everything(cluster) -> None:
    found = cluster(nodes=(node(0),))
    assert [result.status for result in found.values()] == ["ok", "ok", "ok", "ok", "note"]
    assert found["nodes"].value == "1 node ready"
    assert "whether it can be ReadWriteMany is unknown" in found["storage class"].value


@pytest.mark.parametrize(
    ("overrides", "api"),
    [
        (["manifests.route={name: r, gateway: g}"], "gateway.networking.k8s.io/v1"),
        (["engine=tensorrt_llm", "build.tp_size=2", "triton.num_nodes=2"], "leaderworkerset.x-k8s.io/v1"),
        (["engine=tensorrt_llm_llmapi", "manifests.operator=dynamo"], "nvidia.com/v1beta1"),
    ],
)
def test_a_missing_type_is_named_with_what_brings_it(overrides, api, cluster) -> None:
    result = cluster(*overrides, nodes=(node(8), node(8)))[api]
    assert (result.value, result.status) == ("missing", "bad")
    assert "Install " in result.todo


@pytest.mark.parametrize(
    ("nodes", "status", "words"),
    [
        ((node(8),), "ok", "1 node ready; 1 with the 4 GPUs of compute capability 9 that one pod needs"),
        ((node(2), node(8, "8.9")), "bad", "2 nodes ready; 0 with the 4 GPUs"),
        ((node(8, unschedulable=True),), "bad", "0 nodes ready; 0 with"),
    ],
)
def test_one_node_must_have_all_gpus_of_a_pod(nodes, status, words, cluster) -> None:
    result = cluster("engine=tensorrt_llm", "hardware=h100_sxm", "build.tp_size=4", nodes=nodes)["nodes"]
    assert result.status == status
    assert words in result.value


def test_secrets_and_claims_must_be_in_the_namespace(cluster) -> None:
    found = cluster(
        "serving.api_key=true", "manifests.image_pull_secret=pull", "manifests.claim=models", there=("pull",)
    )
    assert found["manifests.image_pull_secret"].status == "ok"
    assert found["serving.api_key"].value == "secret tiny-gemma-fp8-api-key is missing"
    assert (found["manifests.claim"].status, found["manifests.claim"].value) == ("bad", "pvc models is missing")


def test_a_secret_is_looked_for_under_the_name_that_the_manifests_give_it(cluster, tmp_path) -> None:
    """The plan's format, with the KV cache that is tuned; that of an engine or a repository built elsewhere."""
    served = repository(tmp_path / "given", "gpu")
    described = json.loads((served / "repository.json").read_text())
    for words, named in (
        (("engine=tensorrt_llm", "hardware=h100_sxm", "model=llama_3_8b", "quant=fp8"), "llama-3-8b-fp8-kv-fp8"),
        ((f"engine.path={write_engine(tmp_path / 'engine')}", "quant=none"), "tiny-gemma-fp8"),
        ((f"serving.repository={served}",), ManifestSettings().object_name(described["label"], described["variant"])),
    ):
        found = cluster("serving.api_key=true", *words)
        assert found["serving.api_key"].value == f"secret {named}-api-key is missing"
    (served / "repository.json").unlink()
    found = cluster("serving.api_key=true", f"serving.repository={served}")
    assert "has no complete repository.json" in found["secrets"].value


@pytest.mark.parametrize(
    ("overrides", "classes", "words"),
    [
        ([], [storage_class("slow", "false")], "Give manifests.storage_class: slow"),
        (["manifests.storage_class=fast"], [storage_class("slow", "true")], "Here: slow"),
    ],
)
def test_a_claim_needs_a_storage_class(overrides, classes, words, cluster) -> None:
    result = cluster(*overrides, **{"apis_storage.k8s.io_v1_storageclasses": {"items": classes}})["storage class"]
    assert result.status == "bad"
    assert words in result.todo


def test_what_one_may_not_see_is_unknown(cluster) -> None:
    found = cluster(api_v1_nodes={}, apis={})
    assert found["nodes"].value == "unknown: (Forbidden): not yours"
    assert {found["nodes"].status, found["types"].status} == {"note"}


def test_a_cluster_that_does_not_answer_is_broken(cluster) -> None:
    (result,) = cluster(version={}).values()
    assert (result.name, result.status) == ("API server", "bad")
    assert "doctor.kubeconfig=" in result.todo


def test_an_untested_kubernetes_is_said(cluster) -> None:
    assert "tested with 1.30 to 1.37" in cluster(version={"minor": "20+", "gitVersion": "v1.20.5"})["Kubernetes"].todo


def test_a_kubeconfig_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"doctor\.kubeconfig='.*nowhere' is not a file"):
        probe_cluster(load([f"doctor.kubeconfig={tmp_path}/nowhere"]))
