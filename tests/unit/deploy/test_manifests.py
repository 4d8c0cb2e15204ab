"""The manifests: valid for Kubernetes, consistent among themselves, sized by the repository, without secrets."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pipelines.deploy.commands import _image, files
from pipelines.deploy.config import FetchSettings, ImageSettings, ManifestSettings
from pipelines.deploy.facts import RepositoryFacts, Sizes, read_served, sizes
from pipelines.deploy.pods import ClusterDeployment, serve_arguments
from pipelines.domain.units import GIB
from pipelines.engines.tensorrt_llm.llm_api import complaints
from pipelines.serving.config import ServingSettings
from pipelines.settings.compose import load
from tests.conftest import REFERENCE
from tests.support.deployments import KINDS, build, by_kind, deployed, repository, templates, write
from tests.support.hub_server import HubServer

SERVE_OPTIONS = Path(__file__).parents[2] / "support" / "trtllm_serve_options.json"
"""Options of trtllm-serve, from NVIDIA's sources."""
VERSIONS = ("1.30", "1.33", "1.37")
OWN_TYPES = {
    "PodMonitor": "podmonitor.json",
    "PrometheusRule": "prometheusrule.json",
    "LeaderWorkerSet": "leaderworkerset.json",
    "DynamoGraphDeployment": "dynamographdeployment.json",
    "HTTPRoute": "httproute.json",
}
FULL = {
    "namespace": "llm", "image": "registry.example.com:5000/llm:v1", "image_pull_secret": "registry",
    "storage": "empty_dir", "fetch": {"hub": "org/name", "secret": "store"}, "hf_token_secret": "hub",
    "env": {"NCCL_DEBUG": "INFO"}, "node_selector": {"pool": "a"}, "extra_resources": {"rdma/ib": 8},
    "runtime_class": "nvidia", "sub_path": "gemma",
}  # fmt: skip
"""Every choice at once."""


def built(tmp_path: Path, kind: str, serving=None, **choices):
    return build(write(deployed(tmp_path, kind, serving, **choices), tmp_path / "out"))


def container(template, name=None):
    found = [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]
    return template["spec"]["containers"][0] if name is None else next(one for one in found if one["name"] == name)


def check(thing) -> None:
    """Against Kubernetes' own schema of several versions; types of others against their definitions."""
    if thing["kind"] in OWN_TYPES:
        schema = json.loads((REFERENCE / "kubernetes" / OWN_TYPES[thing["kind"]]).read_text())
        jsonschema.Draft7Validator(schema).validate(thing)
        for template in templates([thing]).values():
            check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template})
        return
    for version in VERSIONS:
        kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize("choices", [{}, FULL, {"max_replicas": 1}], ids=["default", "full", "fixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_object_is_valid(kind, choices, tmp_path):
    things = built(tmp_path, kind, **choices)
    kinds = {"cpu": {"Deployment"}, "gpu": {"Deployment"}, "multinode": {"LeaderWorkerSet", "ConfigMap"}}[kind]
    assert {thing["kind"] for thing in things} - {"PersistentVolumeClaim", "HorizontalPodAutoscaler"} == {
        "Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", *kinds,
    }  # fmt: skip
    for thing in things:
        check(thing)


def test_the_schemas_refuse_what_is_wrong(tmp_path):
    """Otherwise the test above would say nothing."""
    things = built(tmp_path, "multinode")
    monitor, group, budget = (
        by_kind(things, kind) for kind in ("PodMonitor", "LeaderWorkerSet", "PodDisruptionBudget")
    )
    monitor["spec"]["podMetricsEndpoints"][0]["portname"] = "metrics"
    with pytest.raises(jsonschema.ValidationError, match="portname"):
        check(monitor)
    group["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="Always"):
        check(group)
    budget["spec"]["maxAvailable"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="maxAvailable"):
        check(budget)
    group["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "None"
    container(templates([group])["worker"])["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="resource"):
        check(group)


def test_the_time_limit_of_a_route_has_at_most_five_digits(tmp_path):
    made = yaml.safe_load(
        files(deployed(tmp_path, "gpu", {"request_timeout_s": 99990}, route={"name": "llm", "gateway": "public"}))[
            "route.yaml"
        ]
    )
    check(made)
    assert made["spec"]["rules"][0]["timeouts"]["request"] == "1667m"  # 100010 s, rounded up


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ({}, {"NEW": 100}),
        ({"beside": "old", "weight": 10}, {"NEW": 10, "old": 90}),
        ({"beside": "old", "weight": 0}, {"NEW": 0, "old": 100}),
    ],
    ids=["first", "canary", "back"],
)
def test_a_route_divides_the_requests_between_two_versions(more, weights, tmp_path):
    route = {"name": "llm", "gateway": "public", "hostname": "llm.example.com", **more}
    new = deployed(tmp_path, "gpu", namespace="serving", route=route)
    made = yaml.safe_load(files(new)["route.yaml"])
    check(made)
    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("llm", "serving")
    (rule,) = made["spec"]["rules"]
    named = {"NEW" if ref["name"] == new.name else ref["name"]: ref["weight"] for ref in rule["backendRefs"]}
    assert named == weights
    service = by_kind(build(write(new, tmp_path / "out")), "Service")
    assert {ref["port"] for ref in rule["backendRefs"]} <= {port["port"] for port in service["spec"]["ports"]}
    assert rule["timeouts"]["request"] == "620s"  # the service's own 504 comes first, and nginx's after it
    made["spec"]["rules"][0]["backendRefs"][0]["share"] = 3
    with pytest.raises(jsonschema.ValidationError, match="share"):
        check(made)


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ({"name": "llm"}, "gateway=None: a route needs both"),
        ({"beside": "old"}, "has no name"),
        ({"name": "llm", "gateway": "public", "weight": 20}, "weight=20 and no beside"),
        ({"name": "llm", "gateway": "public", "beside": "old", "weight": 120}, "120"),
    ],
)
def test_half_a_route_is_refused(route, message):
    with pytest.raises(ValueError, match=message):
        ManifestSettings(route=route)


def test_the_key_of_clients_comes_from_a_secret(tmp_path):
    for kind, name in (("cpu", "server"), ("gpu", "server"), ("multinode", "front")):
        keyed = deployed(tmp_path / kind, kind, {"api_key": True})
        things = build(write(keyed, tmp_path / kind / "out"))
        for thing in things:
            check(thing)
        template = next(iter(templates([t for t in things if t["kind"] in ("Deployment", "LeaderWorkerSet")]).values()))
        env = {each["name"]: each for each in container(template, name)["env"]}
        assert env["TRTLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": f"{keyed.name}-api-key", "key": "api_key"}
        every = [each for each in template["spec"]["containers"] if "TRTLLM_API_KEY" in str(each["env"])]
        assert [each["name"] for each in every] == [name]  # of the others nobody asks for it
        words = container(template, name).get("args") or container(template, name)["command"]
        assert ("serving.api_key=true" if name == "server" else "--api-key") in words
        assert not [word for word in words if "secret" in word.lower()]


@pytest.mark.parametrize("choices", [{}, FULL], ids=["default", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_kustomize_itself_makes_the_same_of_the_files(kind, choices, tmp_path):
    tool = next((name for name in ("kustomize", "kubectl") if shutil.which(name)), None)
    if tool is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    overlay = write(deployed(tmp_path, kind, **choices), tmp_path / "out")
    command = [tool, "build" if tool == "kustomize" else "kustomize", str(overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    theirs = {(thing["kind"], thing["metadata"]["name"]): thing for thing in yaml.safe_load_all(done.stdout)}
    assert theirs == {(thing["kind"], thing["metadata"]["name"]): thing for thing in build(overlay)}


@pytest.mark.parametrize("serving", [None, {"openai_port": 9100}, {"expose_triton": True}], ids=str)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_ports_and_labels_meet(kind, serving, tmp_path):
    """One port is open, that of the service in front, unless tritonserver's own were asked for."""
    things = built(tmp_path, kind, serving)
    template = templates(things)["server"]
    ports = {port["name"]: port["containerPort"] for port in container(template)["ports"]}
    exposed = {"http": 8000, "grpc": 8001, "metrics": 8002} if (serving or {}).get("expose_triton") else {}
    assert ports == exposed | {"openai": (serving or {}).get("openai_port", 9000)}
    policy = by_kind(things, "NetworkPolicy")["spec"]
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == set(ports.values())
    assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    probed = {container(template)[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe")}
    assert probed == {ports["openai"]}
    service = by_kind(things, "Service")["spec"]
    assert {port["targetPort"] for port in service["ports"]} == set(ports)
    assert by_kind(things, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] in ports
    for selector in (
        service["selector"],
        by_kind(things, "Deployment")["spec"]["selector"]["matchLabels"],
        by_kind(things, "PodMonitor")["spec"]["selector"]["matchLabels"],
        by_kind(things, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= template["metadata"]["labels"].items()
    assert f"serving.openai_port={ports['openai']}" in container(template)["args"]
    assert ("serving.expose_triton=true" in container(template)["args"]) == bool(exposed)


def test_a_group_is_reached_through_the_front_alone_and_its_pods_reach_each_other(tmp_path):
    """The leader's tritonserver listens inside its pod only; ssh and MPI of the group must pass."""
    things = built(tmp_path, "multinode")
    leader = templates(things)["server"]
    front = container(leader, "front")
    assert [port["containerPort"] for port in front["ports"]] == [9000]
    assert "ports" not in container(leader, "server")
    command = container(leader, "server")["command"]
    assert {word for word in command if "-address=" in word} == {
        "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1",
    }  # fmt: skip
    assert {"--grpc=127.0.0.1:8001", "--host=0.0.0.0", "--port=9000"} <= set(front["command"])
    own, group = by_kind(things, "NetworkPolicy")["spec"]["ingress"]
    assert own == {"ports": [{"port": 9000, "protocol": "TCP"}]}
    members = group["from"][0]["podSelector"]["matchLabels"].items()
    assert all(members <= found["metadata"]["labels"].items() for found in templates(things).values())


def test_only_leaders_answer_but_workers_count_as_the_group(tmp_path):
    things = built(tmp_path, "multinode")
    worker = templates(things)["worker"]["metadata"]["labels"].items()
    assert not by_kind(things, "Service")["spec"]["selector"].items() <= worker
    assert not by_kind(things, "PodMonitor")["spec"]["selector"]["matchLabels"].items() <= worker
    assert by_kind(things, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= worker


@pytest.mark.parametrize("kind", KINDS)
def test_every_mount_has_its_volume_and_nothing_else_is_written(kind, tmp_path):
    for template in templates(built(tmp_path, kind, **FULL)).values():
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for one in [*template["spec"]["initContainers"], *template["spec"]["containers"]]:
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["securityContext"]["runAsUser"] == 1000


@pytest.mark.parametrize(("kind", "gpus"), [("cpu", None), ("gpu", "2"), ("multinode", "4")])
def test_gpus_are_the_ranks_of_one_node(kind, gpus, tmp_path):
    """Two ranks on one node; tp 4 x pp 2 over two nodes."""
    for template in templates(built(tmp_path, kind)).values():
        resources = container(template)["resources"]
        assert resources["limits"].get("nvidia.com/gpu") == gpus
        assert resources["requests"].get("nvidia.com/gpu") == gpus
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert "cpu" not in resources["limits"]  # the engine's threads are not cut to a share of a core


def test_an_engine_runs_only_where_its_gpu_is(tmp_path):
    labels = {"nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0"}
    spec = templates(built(tmp_path, "gpu"))["server"]["spec"]
    assert spec["nodeSelector"] == labels
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "nodeSelector" not in templates(built(tmp_path / "cpu", "cpu"))["server"]["spec"]


def test_grouped_experts_run_only_where_there_is_amx(tmp_path):
    folder = repository(tmp_path / "made", "cpu")
    (config,) = folder.glob("tensorrt_llm/1/engine/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"engine": {"experts": "grouped"}}))
    made = ClusterDeployment(read_served(folder), ManifestSettings(), ServingSettings(), ImageSettings())
    spec = templates(build(write(made, tmp_path / "out")))["server"]["spec"]
    assert spec["nodeSelector"] == {"feature.node.kubernetes.io/cpu-cpuid.AMXBF16": "true"}


def served(gpu: bool, size: float, **changes) -> RepositoryFacts:
    """A repository of `size` GiB, all of it engine."""
    size_bytes = int(size * GIB)
    facts = {
        "folder": "x", "label": "x", "variant": "x", "gpu": gpu, "world_size": 1, "num_nodes": 1,
        "size_bytes": size_bytes, "engine_bytes": size_bytes, "engine_version": "1", "kv_bytes": 0,
    }  # fmt: skip
    return RepositoryFacts(**(facts | changes))


def test_sizes_follow_from_the_repository_on_gpus():
    """8 + 8.5 + 1 = 17.5 GiB = 17920 MiB; 120 s + 8.5 GiB at 200 MiB/s (44 s) -> 170 s; 5 + 30 + 10 + 5 s of grace."""
    assert sizes(served(True, 8.5), ManifestSettings(), ServingSettings()) == Sizes(
        cpus=6, memory_mib=17920, shm_mib=1024, startup_s=170, startup_limit_s=600, drain_s=30, grace_s=50, claim_gib=11
    )


def test_each_rank_of_a_node_has_its_share():
    """140 GiB over 8 ranks, 4 a node: 4 x (8 + 17.5 + 2 offloaded) + 4 = 114 GiB."""
    whole = served(True, 140, world_size=8, num_nodes=2, kv_bytes=2 * GIB)
    made = sizes(whole, ManifestSettings(), ServingSettings())
    assert (made.cpus, made.memory_mib, made.shm_mib) == (12, 114 * 1024, 4096)


def test_sizes_follow_from_the_repository_on_a_cpu():
    """2 + 2 x 0.5 + 3 + 0.25 = 6.25 GiB."""
    made = sizes(served(False, 0.5, kv_bytes=3 * GIB, threads=7), ManifestSettings(), ServingSettings())
    assert (made.cpus, made.memory_mib, made.shm_mib) == (7, 6400, 256)


def test_what_is_given_is_not_computed():
    given = ManifestSettings(cpus=3, memory_gib=1.5, shm_gib=0.5)
    made = sizes(served(True, 100), given, ServingSettings(drain_timeout_s=100))
    assert (made.cpus, made.memory_mib, made.shm_mib) == (3, 1536, 512)
    assert (made.startup_s, made.grace_s) == (640, 120)


def test_the_server_may_take_as_long_to_start_as_the_probe_waits(tmp_path):
    one = container(templates(built(tmp_path, "gpu", {"startup_timeout_s": 1234}))["server"])
    probe = one["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 1240
    assert probe["httpGet"] == {"path": "/v2/health/ready", "port": 9000}
    assert one["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert one["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert f"serving.startup_timeout_s={probe['failureThreshold'] * probe['periodSeconds']}" in one["args"]


@pytest.mark.parametrize("kind", KINDS)
def test_draining_fits_into_the_grace_period(kind, tmp_path):
    for name, template in templates(built(tmp_path, kind, {"drain_timeout_s": 90})).items():
        command = container(template)["lifecycle"]["preStop"]["exec"]["command"]
        if kind == "multinode" and name == "server":
            assert command == ["/bin/bash", "/etc/pipelines/mpi/drain.sh", "5", "90"]
        else:
            assert command == ["sleep", "5" if name == "server" else "95"]  # workers stay until the leader is done
        assert template["spec"]["terminationGracePeriodSeconds"] >= 5 + 90 + 10


def test_the_hpa_scales_what_was_written_on_metrics_that_the_adapter_makes(tmp_path):
    for kind, target in (("gpu", "Deployment"), ("multinode", "LeaderWorkerSet")):
        made = deployed(tmp_path / kind, kind, queue_time_ms=250, max_replicas=9, replicas=2)
        things = build(write(made, tmp_path / kind / "out"))
        spec, scaled = by_kind(things, "HorizontalPodAutoscaler")["spec"], by_kind(things, target)
        assert spec["scaleTargetRef"] == {
            "apiVersion": scaled["apiVersion"], "kind": target, "name": scaled["metadata"]["name"],
        }  # fmt: skip
        assert "replicas" not in scaled["spec"]  # kubectl apply must not undo what the HPA did
        assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 9)
        wanted = {one["pods"]["metric"]["name"]: one["pods"]["target"]["averageValue"] for one in spec["metrics"]}
        assert wanted == {"triton_queue_ms_per_request": "250", "trtllm_waiting_requests": "4"}
        rules = yaml.safe_load((tmp_path / kind / "out" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
        assert {rule["name"]["as"] for rule in rules} == set(wanted)
        for rule in rules:
            assert set(rule) == {"seriesQuery", "resources", "name", "metricsQuery"}
            assert rule["metricsQuery"].count("(") == rule["metricsQuery"].count(")")
            assert re.match(rule["name"]["matches"], rule["seriesQuery"].partition("{")[0])


def test_a_second_server_is_not_added_before_the_first_can_help(tmp_path):
    made = deployed(tmp_path, "gpu")
    behaviour = by_kind(build(write(made, tmp_path / "out")), "HorizontalPodAutoscaler")["spec"]["behavior"]
    cold_start = made.sizes.startup_s
    assert behaviour["scaleUp"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": cold_start}]
    assert behaviour["scaleDown"]["stabilizationWindowSeconds"] >= 2 * cold_start


def test_an_hour_of_cold_start_stays_within_what_kubernetes_allows():
    made = sizes(served(True, 2000), ManifestSettings(), ServingSettings())
    assert made.startup_limit_s == made.startup_s > 3600
    assert (made.scale_up_s, made.scale_down_s) == (1800, 3600)


def test_a_repository_of_the_hub_arrives_without_what_the_hub_adds(tmp_path):
    """Triton would take the client's folder for a model, and the server refuses files that its manifest lacks."""
    uploaded, arrived = tmp_path / "uploaded", tmp_path / "arrived"
    for name in (".gitattributes", "manifest.json", "ensemble/config.pbtxt"):
        (uploaded / name).parent.mkdir(parents=True, exist_ok=True)
        (uploaded / name).write_text(name)
    with HubServer() as hub:
        hub.add("org/name", uploaded, branches=("v1",))
        command = [word.replace("/repository", str(arrived)) for word in FetchSettings(hub="org/name@v1").words]
        path = f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"
        env = {"PATH": path, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        subprocess.run(command, env=env, check=True, capture_output=True)
    assert sorted(path.name for path in arrived.iterdir()) == ["ensemble", "manifest.json"]


def test_a_pod_restarts_its_server_as_often_as_the_settings_say(tmp_path):
    new = replace(deployed(tmp_path, "cpu"), serving=ServingSettings(restarts=0))
    assert "serving.restarts=0" in serve_arguments(new)
    assert load(serve_arguments(new)[1:]).serving.restarts == 0


def test_a_fixed_number_of_replicas_has_no_hpa(tmp_path):
    made = deployed(tmp_path, "gpu", replicas=3, max_replicas=3)
    assert not any("autoscaler" in name or "adapter" in name for name in files(made))
    assert by_kind(build(write(made, tmp_path / "out")), "Deployment")["spec"]["replicas"] == 3


def test_the_token_is_a_reference_and_reaches_the_fetch_container_alone(tmp_path):
    things = built(tmp_path, "gpu", **FULL)
    template = templates(things)["server"]
    fetch = container(template, "fetch")
    assert fetch["command"] == list(FetchSettings(hub="org/name").words)
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in fetch["env"]
    assert fetch["envFrom"] == [{"secretRef": {"name": "store"}}]
    server = json.dumps(container(template, "server"))
    assert "HF_TOKEN" not in server
    assert "secretRef" not in server
    assert not any(thing["kind"] == "Secret" for thing in things)


@pytest.mark.parametrize(
    ("choices", "volume"),
    [
        ({}, {"persistentVolumeClaim": {"claimName": "llama-3-8b-fp8-repository", "readOnly": True}}),
        ({"claim": "models"}, {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}),
        ({"storage": "host_path", "host_path": "/m"}, {"hostPath": {"path": "/m", "type": "Directory"}}),
        ({"storage": "empty_dir", "fetch": {"command": ("cp", "-r", "/a", "/b")}}, {"emptyDir": {"sizeLimit": "1Gi"}}),
    ],
)
def test_the_repository_lies_where_it_was_said(choices, volume, tmp_path):
    things = built(tmp_path, "gpu", **choices)
    assert templates(things)["server"]["spec"]["volumes"][0] == {"name": "repository", **volume}
    claims = [thing["metadata"]["name"] for thing in things if thing["kind"] == "PersistentVolumeClaim"]
    assert claims == ([] if choices else ["llama-3-8b-fp8-repository"])


def test_the_leader_starts_one_rank_per_gpu_of_the_group(tmp_path):
    """Two nodes with four GPUs: eight ranks, of which the first answers; nothing in it is decided by chance."""
    leader = container(templates(built(tmp_path, "multinode", env={"NCCL_DEBUG": "INFO"}))["server"])
    command = leader["command"]
    assert command[:3] == ["/opt/hpcx/ompi/bin/mpirun", "--host", "$(POD_NAME):4,$(POD_NAME)-1.llama-3-1-405b-fp8:4"]
    ranks = "\0".join(command).split("\0-n\0")[1:]
    assert len(ranks) == 8
    each = "1 --wdir /repository -x PATH -x LD_LIBRARY_PATH -x HF_HUB_OFFLINE -x PYTHONDONTWRITEBYTECODE -x NCCL_DEBUG"
    start = [*each.split(), "tritonserver", "--model-repository=/repository"]
    assert all(rank.split("\0")[: len(start)] == start for rank in ranks)
    assert ["--load-model=tensorrt_llm" in rank for rank in ranks] == [False] + [True] * 7
    closed = [word for word in command if "admin-key" in word]
    assert closed
    assert all(word.endswith("admin-key=$(POD_UID)") for word in closed)
    names = {variable["name"] for variable in leader["env"]}
    assert {"POD_NAME", "POD_UID"} <= names


def test_the_leader_waits_for_every_worker_and_both_have_the_keys(tmp_path):
    found = templates(built(tmp_path, "multinode"))
    wait = container(found["server"], "wait-for-workers")
    assert wait["command"][1:] == [
        "/etc/pipelines/mpi/wait.sh", "/etc/pipelines/mpi/ssh_config", "$(POD_NAME)-1.llama-3-1-405b-fp8",
    ]  # fmt: skip
    for template in found.values():
        secret = next(volume["secret"] for volume in template["spec"]["volumes"] if volume["name"] == "ssh")
        assert secret == {"secretName": "llama-3-1-405b-fp8-mpi-ssh", "defaultMode": 0o400}
    assert container(found["worker"])["command"][0] == "/usr/sbin/sshd"


def test_the_group_is_as_large_as_the_engine_needs(tmp_path):
    spec = by_kind(built(tmp_path, "multinode"), "LeaderWorkerSet")["spec"]
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_shellcheck_finds_nothing_in_what_the_pods_run(tmp_path):
    tool = shutil.which("shellcheck", path=Path(sys.executable).parent) or shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    overlay = write(deployed(tmp_path, "multinode"), tmp_path / "out")
    done = subprocess.run([tool, *overlay.glob("*.sh")], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("reference", "made"),
    [
        ("llm:v1", {"newName": "llm", "newTag": "v1"}),
        ("host:5000/team/llm", {"newName": "host:5000/team/llm"}),
        ("host:5000/team/llm:v1", {"newName": "host:5000/team/llm", "newTag": "v1"}),
        ("host/llm@sha256:00", {"newName": "host/llm", "digest": "sha256:00"}),
    ],
)
def test_an_image_is_told_to_kustomize_in_its_own_words(reference, made):
    assert _image(reference) == {"name": "trtllm-pipelines", **made}


@pytest.mark.parametrize(
    ("label", "variant", "name"),
    [
        ("Tiny_Gemma", "fp8", "tiny-gemma-fp8"),
        ("org--7B.v2", "none", "org-7b-v2-none"),
        ("7b", "none", "m-7b-none"),
        ("a" * 60, "fp8", "a" * 40),
    ],
)
def test_names_are_what_kubernetes_takes(label, variant, name):
    assert ManifestSettings().object_name(label, variant) == name
    assert ManifestSettings(name="own").object_name(label, variant) == "own"


@pytest.mark.parametrize("version", ["1.3.0rc3", "1.4"])
@pytest.mark.parametrize("choices", [{}, {"pod_monitor": False}], ids=["scraped", "not scraped"])
def test_the_llm_api_is_served_by_trtllm_serve_of_nvidias_image(tmp_path, version, choices):
    things = built(tmp_path, "llm_api", **choices)
    for thing in things:
        check(thing)
    (template,) = templates([thing for thing in things if thing["kind"] == "Deployment"]).values()
    main = container(template)
    assert main["image"] == "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc20"
    program, command, model, *words = [*main["command"][:1], "serve", *main["command"][1:]]
    options = json.loads(SERVE_OPTIONS.read_text())[version][command]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert program == "trtllm-serve"
    assert set(given) <= set(options)
    assert (main["workingDir"], model) == ("/repository", "tensorrt_llm/1/checkpoint")
    assert main["readinessProbe"]["httpGet"] == {"path": "/health", "port": int(given["--port"])}
    assert {"name": "TRTLLM_NO_USAGE_STATS", "value": "1"} in main["env"]
    made = by_kind(things, "ConfigMap")
    (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == "llm-api"]
    assert volume["configMap"]["name"] == made["metadata"]["name"]
    folder, _, name = given["--extra_llm_api_options"].rpartition("/")
    assert folder in {mount["mountPath"] for mount in main["volumeMounts"]}
    content = yaml.safe_load(made["data"][name])
    assert not complaints(content, version, "")
    assert content["tensor_parallel_size"] == int(main["resources"]["limits"]["nvidia.com/gpu"]) == 2
    assert content.get("return_perf_metrics", False) is (not choices)
    kinds = {thing["kind"] for thing in things}
    assert "HorizontalPodAutoscaler" not in kinds
    if not choices:
        assert by_kind(things, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["path"] == "/prometheus/metrics"
