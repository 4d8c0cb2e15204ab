"""`make manifests manifests.operator=dynamo`: Dynamo's types take the graph, and its worker's options the arguments."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from pipelines.deploy.config import ClusterSettings, ManifestSettings
from pipelines.deploy.dynamo import dynamo_faults
from pipelines.domain.errors import UserError
from pipelines.engines.tensorrt_llm.llm_api import complaints
from tests.support.deployments import build, by_kind, deployed, write
from tests.unit.deploy.test_manifests import FULL, built, check, container
from tests.unit.deploy.test_manifests_written import manifests

OPTIONS = json.loads((Path(__file__).parents[2] / "support" / "dynamo_trtllm_options.json").read_text())
APART = ClusterSettings(prefill=2, decode=3)
CASES = {"one kind of worker": None, "prompts and answers apart": APART}
RESOLVED = {"image": "registry.example.com/dynamo:1.5.1"}


def graph(tmp_path, cluster=None, **choices):
    things = built(tmp_path, "llm_api", operator="dynamo", cluster=cluster, **choices)
    return things, {each["name"]: each for each in by_kind(things, "DynamoGraphDeployment")["spec"]["components"]}


def arguments(words: list[str], version: str) -> dict[str, str]:
    """Read a worker's arguments as `dynamo.trtllm` does: its options are NVIDIA's, and so are the choices."""
    rest, values = list(words), {}
    while rest:
        name = rest.pop(0)
        kind = OPTIONS[version][name]
        values[name] = "" if kind == "flag" else rest.pop(0)
        assert not isinstance(kind, list) or values[name] in kind
    return values


@pytest.mark.parametrize("choices", [{}, FULL | RESOLVED, {"kv_routing": True}], ids=["default", "full", "routed"])
@pytest.mark.parametrize("case", CASES)
def test_the_graph_is_one_for_dynamos_operator_and_for_kubernetes(case, choices, tmp_path):
    things, components = graph(tmp_path, CASES[case], **choices)
    for thing in things:
        check(thing)
    workers = {"worker"} if CASES[case] is None else {"prefill", "decode"}
    assert set(components) == {"Frontend", *workers}
    kinds = {thing["kind"] for thing in things}
    assert kinds - {"PersistentVolumeClaim"} == {"DynamoGraphDeployment", "ConfigMap"}
    for name, component in components.items():
        main = container(component["podTemplate"])
        assert main["name"] == "main"
        assert "trtllm-pipelines" not in json.dumps(component["podTemplate"]["spec"].get("initContainers", []))
        assert ("nvidia.com/gpu" in json.dumps(main["resources"])) == (name != "Frontend")
        mounts = {mount["name"] for mount in main["volumeMounts"]}
        assert mounts <= {volume["name"] for volume in component["podTemplate"]["spec"]["volumes"]}
        assert "/dev/shm" not in json.dumps(main)  # the operator mounts it


@pytest.mark.parametrize("version", ["1.5.0", "1.6.1"])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_workers_get_arguments_and_options_that_their_programs_know(case, routed, version, tmp_path):
    things, components = graph(tmp_path, CASES[case], kv_routing=routed)
    files = by_kind(things, "ConfigMap")["data"]
    modes, events = {}, set()
    for name in components.keys() - {"Frontend"}:
        main = container(components[name]["podTemplate"])
        given = arguments(main["args"], version)
        assert (given["--model"], given["--served-model-name"]) == (
            "/repository/tensorrt_llm/1/checkpoint",
            "llama_3_8b",
        )
        folder, _, file = given["--extra-engine-args"].rpartition("/")
        assert folder in {mount["mountPath"] for mount in main["volumeMounts"]}
        content = yaml.safe_load(files[file])
        assert not complaints(content, "1.3.0rc25", "")
        assert ("cache_transceiver_config" in content) == (CASES[case] is not None)
        modes[name] = given.get("--disaggregation-mode", "agg")
        events |= {name} if "--publish-kv-events" in given else set()
    assert modes == ({"worker": "agg"} if CASES[case] is None else {"prefill": "prefill", "decode": "decode"})
    assert events == (({"worker"} if CASES[case] is None else {"prefill"}) if routed else set())
    frontend = container(components["Frontend"]["podTemplate"])
    assert ({"name": "DYN_ROUTER_MODE", "value": "kv"} in frontend["env"]) == routed


def test_replicas_are_those_of_the_settings(tmp_path):
    _, whole = graph(tmp_path / "whole", replicas=3, max_replicas=3)
    _, apart = graph(tmp_path / "apart", APART)
    assert whole["worker"]["replicas"] == 3
    assert {name: each["replicas"] for name, each in apart.items()} == {"Frontend": 1, "prefill": 2, "decode": 3}


def test_new_options_are_new_pods(tmp_path):
    def digest(component):
        return component["podTemplate"]["metadata"]["annotations"]["llm-api-options"]

    (_, one), (_, two) = graph(tmp_path / "one"), graph(tmp_path / "two", APART)
    assert len({digest(one["worker"]), digest(two["prefill"])}) == 2


def test_the_schema_refuses_what_the_operator_would(tmp_path):
    things, _ = graph(tmp_path)
    thing = by_kind(things, "DynamoGraphDeployment")
    thing["spec"]["components"][0]["type"] = "front"
    with pytest.raises(jsonschema.ValidationError, match="front"):
        check(thing)


def test_what_does_not_go_together_is_refused(tmp_path):
    (fault,) = dynamo_faults(deployed(tmp_path / "gpu", "gpu", operator="dynamo"))
    assert "is for the LLM API" in fault.message
    apart = deployed(tmp_path / "llm", "llm_api", cluster=APART, operator="dynamo")
    beams = replace(apart, served=replace(apart.served, llm_api={"max_beam_width": 4}))
    assert [fault.message for fault in dynamo_faults(beams) if fault.message.startswith("max_beam_width=4 with")]
    with pytest.raises(ValueError, match="of Dynamo's router alone"):
        ManifestSettings(kv_routing=True)
    with pytest.raises(UserError, match=r"cluster\.prefill=1 has no effect on manifests\.operator=none"):
        manifests(tmp_path, "llm_api", "cluster.prefill=1", "cluster.decode=1")
    workers = ("cluster.prefill=1", "cluster.decode=1", "manifests.replicas=3")
    with pytest.raises(UserError, match=r"manifests\.replicas=3 has no effect beside cluster\.prefill and decode"):
        manifests(tmp_path, "llm_api", "manifests.operator=dynamo", *workers)
    for word in ("serving.openai_port=9100", "serving.startup_timeout_s=900"):
        with pytest.raises(UserError, match=rf"{word} has no effect on manifests\.operator=dynamo"):
            manifests(tmp_path, "llm_api", "manifests.operator=dynamo", word)


def test_it_says_what_the_cluster_needs(tmp_path, capsys):
    overlay = manifests(tmp_path, "llm_api", "manifests.operator=dynamo", "hardware=h100_sxm")
    assert (overlay / "graph.yaml").is_file()
    said = " ".join(capsys.readouterr().out.split())
    assert "tensorrtllm-runtime:1.5.0, not run here; its operator must be in the cluster" in said
    assert "Service llama-3-8b-fp8-frontend, port 8000" in said
    assert "HPA, alerts and NetworkPolicy are not written" in said
    assert "about 2 min 10 s to start; up to" in " ".join(said.split()), "its operator has the startup probe"


@pytest.mark.parametrize(
    "choices", [{}, FULL | RESOLVED, {"storage": "host_path", "host_path": "/m"}], ids=["claim", "full", "host path"]
)
def test_kustomize_itself_makes_the_same_of_the_files(choices, tmp_path):
    tool = next((name for name in ("kustomize", "kubectl") if shutil.which(name)), None)
    if tool is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    overlay = write(deployed(tmp_path, "llm_api", operator="dynamo", cluster=APART, **choices), tmp_path / "out")
    command = [tool, "build" if tool == "kustomize" else "kustomize", str(overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    theirs = {thing["kind"]: thing for thing in yaml.safe_load_all(done.stdout)}
    assert theirs == {thing["kind"]: thing for thing in build(overlay)}
