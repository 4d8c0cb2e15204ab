"""`make manifests`: from a repository to a folder, all or nothing, twice the same."""

import json
import re
from pathlib import Path

import pytest
import yaml

from pipelines.deploy.commands import write_manifests
from pipelines.deploy.facts import read_served
from pipelines.domain.errors import UserError
from pipelines.host import files
from pipelines.host.files import INDEX, write_folder
from pipelines.host.machine import Machine
from pipelines.settings.compose import load
from tests.support.deployments import repository
from tests.support.engine_folders import write_engine

CPU = Machine(2, 2**34, (), "nvidia-smi is not installed", has_tensorrt_llm=False, platform="test")


def manifests(tmp_path: Path, kind: str, *overrides: str) -> Path:
    given = tmp_path / "given" / "repo"
    folder = given if given.is_dir() else repository(tmp_path / "given", kind)
    words = [f"serving.repository={folder}", f"manifests.folder={tmp_path / 'out'}", *overrides]
    return write_manifests(load(words), CPU, words)


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_a_repository_from_elsewhere_becomes_an_overlay(tmp_path, capsys):
    overlay = manifests(tmp_path, "cpu")
    assert overlay == tmp_path / "out" / "tiny-llama-fp8" / "overlays" / "cpu"
    assert (overlay / "kustomization.yaml").is_file()
    said = capsys.readouterr().out
    assert "copy the repository into the claim tiny-llama-fp8-repository" in said
    assert f"kubectl apply -k {overlay}" in said


def test_too_little_memory_is_said(tmp_path, capsys):
    manifests(tmp_path, "cpu", "manifests.memory_gib=0.1")
    said = " ".join(capsys.readouterr().out.split())
    assert "manifests.memory_gib=0.1 is less than the computed need of 3." in said
    assert "; Kubernetes kills a server that uses more than its limit" in said
    manifests(tmp_path, "cpu", "manifests.memory_gib=9")
    assert "computed need" not in capsys.readouterr().out


def test_a_second_run_touches_nothing(tmp_path, capsys):
    manifests(tmp_path, "cpu")
    before = content(tmp_path / "out")
    manifests(tmp_path, "cpu")
    assert content(tmp_path / "out") == before
    assert "unchanged: " in capsys.readouterr().out


def test_a_changed_setting_replaces_what_was_written_and_leaves_nothing_behind(tmp_path):
    manifests(tmp_path, "cpu")
    manifests(tmp_path, "cpu", "manifests.max_replicas=1", "manifests.pod_monitor=false")
    folder = tmp_path / "out" / "tiny-llama-fp8"
    assert not (folder / "base" / "autoscaler.yaml").exists()
    assert not (folder / "prometheus-adapter.yaml").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny-llama-fp8"]


@pytest.mark.parametrize("name", ["base/service.yaml", "overlays/cpu/own-patch.yaml"])
def test_what_a_person_wrote_is_never_overwritten(name, tmp_path):
    manifests(tmp_path, "cpu")
    own = tmp_path / "out" / "tiny-llama-fp8" / name
    own.write_text("mine\n")
    with pytest.raises(UserError, match=rf"were changed since: {name}\. Keep changes in another folder"):
        manifests(tmp_path, "cpu", "manifests.replicas=2")
    assert own.read_text() == "mine\n"


def test_a_write_that_fails_leaves_the_old_files(tmp_path, monkeypatch):
    folder = tmp_path / "x"
    write_folder(folder, {"a/b": "1"}, command="make manifests", setting="manifests.folder")
    before = content(folder)

    def full(self, *words, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.Path, "write_text", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_folder(folder, {"a/b": "2"}, command="make manifests", setting="manifests.folder")
    assert content(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_swap_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    folder = tmp_path / "x"
    write_folder(folder, {"a": "1"}, command="make manifests", setting="manifests.folder")
    real = Path.rename

    def rename(self, target):
        if Path(target) == folder and not self.name.endswith(".old"):
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(files.Path, "rename", rename)
    with pytest.raises(UserError, match="Input/output error"):
        write_folder(folder, {"a": "2"}, command="make manifests", setting="manifests.folder")
    assert (folder / "a").read_text() == "1"
    assert INDEX in [path.name for path in folder.iterdir()]


def test_without_a_repository_the_command_that_makes_it_is_named(tmp_path):
    words = [f"paths.store={tmp_path}/store", "quant=int4_awq", "manifests.namespace=llm", "image.uid=2000"]
    wanted = re.escape(f"or make it: make repository paths.store={tmp_path}/store quant=int4_awq")
    with pytest.raises(UserError, match="There is no repository of tiny_gemma-int4_awq yet") as error:
        write_manifests(load(words), CPU, words)
    assert re.search(wanted, str(error.value))
    assert "preview" not in str(error.value)  # it would be refused
    with pytest.raises(UserError, match=r"A preview needs none: manifests\.preview=true"):
        write_manifests(load([*words, "engine=tensorrt_llm", "hardware=a10"]), CPU, words)
    assert not (tmp_path / "manifests").exists()


def test_a_folder_that_is_no_repository_of_ours_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no complete description: repository\.json.*No such file"):
        read_served(tmp_path)
    (tmp_path / "repository.json").write_text('{"flavour": "openvino", "label": "x"}')
    with pytest.raises(UserError, match="engine_version, settings, variant, world_size"):
        read_served(tmp_path)


def edit(folder: Path, **changes) -> Path:
    file = folder / "repository.json"
    described = json.loads(file.read_text())
    described["settings"] |= changes.pop("settings", {})
    file.write_text(json.dumps(described | changes))
    return folder


def test_ranks_that_do_not_spread_over_the_nodes_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"triton\.num_nodes=3 does not divide the engine's 8 ranks"):
        read_served(edit(repository(tmp_path, "multinode"), settings={"num_nodes": 3}))


def test_the_llm_api_over_several_nodes_is_left_to_the_scripts(tmp_path):
    edit(repository(tmp_path / "given", "llm_api"), settings={"num_nodes": 2})
    with pytest.raises(UserError, match=r"num_nodes=2: .* for a server on one node\. Write scripts for several"):
        manifests(tmp_path, "llm_api")


def test_the_llm_api_is_served_by_trtllm_serve(tmp_path, capsys):
    manifests(tmp_path, "llm_api", "serving.request_timeout_s=5", "serving.http_port=8100")
    said = " ".join(capsys.readouterr().out.split())
    assert "not read by `make manifests` for this deployment: serving.request_timeout_s, serving.http_port note" in said
    assert (
        "note: trtllm-serve of nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc20, not run here; without HPA and alerts"
        in said
    )
    assert "may also POST /update_weights" in said


def test_a_disk_of_one_node_is_enough_for_one_server_of_the_llm_api(tmp_path):
    manifests(tmp_path, "llm_api", "manifests.access_mode=ReadWriteOnce")
    with pytest.raises(UserError, match=r"up to 2 pods mount it\. .* one server: manifests\.replicas=1$"):
        manifests(tmp_path, "llm_api", "manifests.access_mode=ReadWriteOnce", "manifests.replicas=2")


@pytest.mark.parametrize(
    ("kind", "overrides", "pods"),
    [
        ("multinode", ["manifests.max_replicas=1"], 2),
        ("llm_api", ["manifests.operator=dynamo"], 2),
        ("llm_api", ["manifests.operator=dynamo", "cluster.prefill=1", "cluster.decode=1"], 3),
    ],
)
def test_a_disk_of_one_node_is_not_enough_where_one_server_is_several_pods(kind, overrides, pods, tmp_path):
    with pytest.raises(UserError, match=rf"up to {pods} pods mount it\. Set manifests\.access_mode=ReadWriteMany$"):
        manifests(tmp_path, kind, "manifests.access_mode=ReadWriteOnce", *overrides)


def test_the_way_to_one_server_works(tmp_path):
    words = ["manifests.access_mode=ReadWriteOnce", "manifests.replicas=2"]
    with pytest.raises(UserError, match=r"up to 4 pods mount it\. .*manifests\.replicas=1 manifests\.max_replicas=1$"):
        manifests(tmp_path, "cpu", *words)
    manifests(tmp_path, "cpu", *words, "manifests.replicas=1", "manifests.max_replicas=1")


def test_five_replicas_need_no_second_setting(tmp_path):
    overlay = manifests(tmp_path, "cpu", "manifests.replicas=5")
    assert yaml.safe_load((overlay / "deployment.yaml").read_text())["spec"]["replicas"] == 5
    assert not (overlay.parents[1] / "base" / "autoscaler.yaml").exists()


@pytest.mark.parametrize(
    ("kind", "overrides", "unread"),
    [
        ("cpu", ["manifests.max_replicas=1", "manifests.queue_time_ms=5"], "manifests.queue_time_ms"),
        ("cpu", ["cluster=slurm", "cluster.partition=gpu"], "cluster.kind, cluster.partition"),
        ("cpu", ["serving.tritonserver=/x", "serving.host=10.0.0.5"], "serving.tritonserver, serving.host"),
        ("cpu", ["manifests.claim=models", "manifests.storage_class=fast"], "manifests.storage_class"),
        ("gpu", ["manifests.image=a/b:1", "image.tag=v2"], "image.tag"),
        ("gpu", ["manifests.slo_percent=99.9", "benchmark.slo.ttft_ms=9", "manifests.pod_monitor=false"],
         "manifests.slo_percent"),
        ("gpu", ["manifests.ssh_secret=keys"], "manifests.ssh_secret"),
        ("multinode", ["serving.restarts=3", "manifests.ssh_secret=keys"], "serving.restarts"),
        ("llm_api", ["manifests.max_replicas=3", "serving.restarts=3"], "manifests.max_replicas, serving.restarts"),
        ("llm_api", ["serving.request_timeout_s=9", "manifests.route={name: a, gateway: b}"], None),
        ("cpu", ["serving.host=0.0.0.0", "serving.restarts=3", "manifests.claim=models"], None),
    ],
)  # fmt: skip
def test_what_no_file_follows_is_said(kind, overrides, unread, tmp_path, capsys):
    manifests(tmp_path, kind, *overrides)
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"warning: not read by `make manifests` for this deployment: (.*?) (note:|written:)", said)
    assert (found and found[1]) == unread


def test_facts_come_from_the_repository(tmp_path):
    cpu, group = read_served(repository(tmp_path / "a", "cpu")), read_served(repository(tmp_path / "b", "multinode"))
    assert (cpu.kind, cpu.gpus_per_node, cpu.threads, cpu.kv_bytes) == ("cpu", 0, 2, 2**30)
    assert (group.kind, group.gpus_per_node, group.world_size, group.num_nodes) == ("multinode", 4, 8, 2)
    assert group.engine_bytes >= 8 * len(b"weights")


@pytest.mark.parametrize(
    ("kind", "override", "message"),
    [
        ("multinode", "serving.multi_gpu=orchestrator", "serving.multi_gpu=orchestrator spawns ranks on one node"),
        ("gpu", "engine=openvino", "engine=openvino is set, but the repository runs on TensorRT-LLM"),
        ("cpu", "manifests.access_mode=ReadWriteOnce", "up to 4 pods mount it. Set manifests.access_mode"),
        ("cpu", "serving.chat_template=conf/serving/plain.jinja", "is a file of this machine, which no pod has"),
    ],
)
def test_what_works_on_one_machine_only_is_refused(kind, override, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        manifests(tmp_path, kind, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["manifests.name=My_App"], "manifests.name='My_App' is not valid"),
        (["manifests.replicas=5", "manifests.max_replicas=4"], "max_replicas '4' is less than replicas=5"),
        (["manifests.replicas=4", "manifests.ttft_ms=500"], "scales nothing where max_replicas is replicas=4"),
        (
            ["manifests.fetch.secret=aws"],
            "fetch.secret 'aws' is read by manifests.fetch.hub and manifests.fetch.command",
        ),
        (["manifests.ttft_ms=500", "manifests.max_replicas=1"], "scales nothing where max_replicas is replicas=1"),
        (["manifests.slo_percent=90"], "manifests.slo_percent='90' is not valid"),
        (["manifests.storage=host_path"], "storage 'host_path' needs manifests.host_path=/folder/on/the/nodes"),
        (["manifests.host_path=/m"], "host_path '/m' goes only with manifests.storage=host_path, not 'claim'"),
        (["manifests=hub", "manifests.fetch.hub=org/name@-x"], "manifests.fetch.hub='org/name@-x' is not valid"),
        (["manifests=hub", "manifests.fetch.hub=-o/name"], "manifests.fetch.hub='-o/name' is not valid"),
        (["manifests.storage=empty_dir"], "storage 'empty_dir' needs manifests.fetch.hub=org/name"),
        (["manifests.fetch.hub=org/name"], "fetch goes only with manifests.storage=empty_dir, not 'claim'"),
        (["manifests.hf_token_secret=hub"], "hf_token_secret 'hub' is read by manifests.fetch.hub"),
        (["manifests.env={HF_TOKEN:hf_x}"], "'HF_TOKEN' looks like a secret"),
        (["manifests.host_path=relative"], "manifests.host_path='relative' is not valid"),
        (["manifests.sub_path=../x"], "sub_path '../x' contains '..'"),
        (["manifests=host_path", "manifests.host_path=/a/../b"], "host_path '/a/../b' contains '..'"),
        (["manifests.extra_resources={foo:1}"], "'foo' is no resource of a device"),
        (["manifests.node_selector={a_:b}"], "'a_' is no name in Kubernetes"),
        (["manifests.node_selector={A_/b:c}"], "'A_/b' is no name in Kubernetes"),
        (["manifests.node_selector={a:'x y'}"], "'x y' is no value of the label a"),
        (["manifests.extra_resources={rdma/ib:0}"], "manifests.extra_resources.rdma/ib='0' is not valid"),
        (
            ["manifests=hub", "manifests.fetch.hub=org/name", "manifests.fetch.command=[cp]"],
            "hub 'org/name' and command are two ways to fetch one repository",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load(overrides)


def test_mappings_are_given_on_the_command_line():
    given = [
        "manifests.node_selector={nvidia.com/gpu.product:NVIDIA-H100-80GB-HBM3}",
        "manifests.env={NCCL_DEBUG:INFO}",
    ]
    made = load([*given, "manifests.extra_resources={rdma/ib:8}"]).manifests
    assert made.node_selector == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert (made.env, made.extra_resources) == ({"NCCL_DEBUG": "INFO"}, {"rdma/ib": 8})


def test_two_versions_of_a_route_have_one_port(tmp_path, capsys):
    route = "manifests.route={name: llm, gateway: public%s}"
    manifests(tmp_path, "cpu", "manifests.name=old", "serving.openai_port=8004", route % "")
    beside = route % ", beside: old, weight: 10"
    with pytest.raises(
        UserError, match=r"openai_port=8010, but .*beside=old listens on port 8004 \(.*openai_port=8004"
    ):
        manifests(tmp_path, "cpu", "manifests.name=new", "serving.openai_port=8010", beside)
    assert not (tmp_path / "out" / "new").exists()
    manifests(tmp_path, "cpu", "manifests.name=new", "serving.openai_port=8004", beside)
    said = capsys.readouterr().out
    assert "10 % of the requests here, the rest to old, to port 8004 of both" in said
    assert "see that its Service exists" not in said
    refs = yaml.safe_load((tmp_path / "out" / "new" / "route.yaml").read_text())["spec"]["rules"][0]["backendRefs"]
    assert [(ref["name"], ref["port"]) for ref in refs] == [("new", 8004), ("old", 8004)]
    for words, said in (
        (
            [beside.replace("llm", "lim")],
            r"route\.name=lim, but .*beside=old has llm \(.*same: manifests.route",
        ),
        ([beside.replace("weight", "hostname: a.org, weight")], r"hostname=a\.org, but .*beside=old has null"),
        ([beside.replace("public", "publik")], r"gateway=publik, but .*beside=old has public"),
        ([beside, "manifests.namespace=other"], r"namespace=other, but .*beside=old has null"),
    ):
        with pytest.raises(UserError, match=said):
            manifests(tmp_path, "cpu", "manifests.name=newest", "serving.openai_port=8004", *words)
    manifests(tmp_path, "cpu", "manifests.name=newest", beside.replace("old", "misspelt"))
    assert "out has no misspelt: see that its Service exists" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "out" / "old" / "route.yaml").write_text("spec: {}")
    with pytest.raises(UserError, match=r"old/route\.yaml is not a route as `make manifests` writes one"):
        manifests(tmp_path, "cpu", "manifests.name=newest", "serving.openai_port=8004", beside)


OF_A_GPU = ("engine=tensorrt_llm", "model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm", "build.tp_size=2")


def preview(tmp_path: Path, *overrides: str) -> Path:
    words = ["manifests.preview=true", f"manifests.folder={tmp_path / 'out'}", f"paths.store={tmp_path / 'store'}"]
    return write_manifests(load([*words, *overrides]), CPU, words)


def test_a_preview_needs_neither_gpu_nor_repository(tmp_path, capsys):
    overlay = preview(tmp_path, *OF_A_GPU)
    assert overlay == tmp_path / "out" / "llama-3-1-8b-fp8-kv-fp8-preview" / "overlays" / "gpu"
    said = capsys.readouterr().out
    assert "preview (llama_3_1_8b, fp8-kv_fp8, about 8.6 GiB)" in said
    assert "kubectl apply" not in said
    text = (overlay / "deployment.yaml").read_text()
    assert text.startswith("# PREVIEW")
    (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_a_preview_of_an_engine_that_is_built_already_has_its_formats_and_ranks(tmp_path, capsys):
    engine = write_engine(tmp_path / "engine", "tensorrt_llm", tp_size=4)
    overlay = preview(tmp_path, "model=llama_3_1_8b", f"engine.path={engine}")
    assert "preview (llama_3_1_8b, fp8, about" in (said := capsys.readouterr().out)
    assert "one server: 4 GPUs," in said
    (container,) = yaml.safe_load((overlay / "deployment.yaml").read_text())["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_scripts_of_a_previewed_group_begin_with_their_interpreter(tmp_path):
    overlay = preview(tmp_path, *OF_A_GPU, "triton.num_nodes=2")
    assert (overlay / "drain.sh").read_text().startswith("#!")
    assert (overlay / "leaderworkerset.yaml").read_text().startswith("# PREVIEW")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=openvino"], r"only a GPU builds; engine=openvino is made here"),
        (
            ["engine=tensorrt_llm", "model=hub", "model.hub_id=org/name"],
            r"sizes, and those of org--name are",
        ),
        ([*OF_A_GPU, "serving.repository=/tmp"], r"without a repository, and serving.repository='/tmp' is given"),
        ([*OF_A_GPU, "triton.num_nodes=3"], r"num_nodes=3 does not divide"),
    ],
)
def test_what_cannot_be_previewed_is_said(overrides, message, tmp_path):
    with pytest.raises(UserError, match=message):
        preview(tmp_path, *overrides)
    assert not (tmp_path / "out").exists()
