"""`make scripts`: what each rank runs is what NVIDIA's launcher runs; the shell reads it without complaint."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipelines.cli.main import main
from pipelines.deploy.cluster import script_files, write_scripts
from pipelines.deploy.config import ClusterSettings
from pipelines.domain.errors import UserError
from pipelines.host.machine import Machine
from pipelines.run import console
from pipelines.serving.command_lines import Ranks, server_command
from pipelines.serving.config import USUAL_PORTS, ServingSettings
from pipelines.settings.compose import load
from tests.support.cluster_targets import CONTAINER, MPI, SLURM, target
from tests.support.deployments import repository

LOGIN_NODE = Machine(2, 2**34, (), "nvidia-smi is not installed", has_tensorrt_llm=False, platform="test")
RECORDER = """#!/bin/bash
printf '%s\\n' "$0" "$@" > "$RECORD"
pwd >> "$RECORD"
"""


def write(files, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def words_after(line_start: str, text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(line_start)]
    return shlex.split(line)


@pytest.mark.parametrize("cluster", [SLURM, MPI, CONTAINER], ids=["slurm", "mpi", "container"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_shell_reads_every_script_without_complaint(tmp_path, cluster, host):
    folder = write(script_files(target(tmp_path / "it's here"), cluster, ServingSettings(host=host)), tmp_path / "out")
    scripts = [path for path in folder.iterdir() if path.name != "hosts"]
    tool = shutil.which("shellcheck", path=Path(sys.executable).parent) or "shellcheck"
    found = subprocess.run([tool, "--shell=bash", *scripts], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(("cluster", "variable"), [(SLURM, "SLURM_PROCID"), (MPI, "OMPI_COMM_WORLD_RANK")])
@pytest.mark.parametrize("rank", [0, 1, 15])
def test_every_rank_runs_what_the_launcher_gives_it(tmp_path, cluster, variable, rank):
    """rank.sh runs in a real shell with a recorder in tritonserver's place."""
    server, record, repo = tmp_path / "tritonserver", tmp_path / "record", tmp_path / "a repository"
    server.write_text(RECORDER)
    server.chmod(0o755)
    repo.mkdir()
    chosen = cluster.model_copy(update={"server": server})
    serving = ServingSettings(http_port=9100)
    files = script_files(target(tmp_path / "x", repository=repo), chosen, serving)
    script = write(files, tmp_path / "out") / "rank.sh"
    environment = {"PATH": "/usr/bin:/bin", "RECORD": str(record), variable: str(rank)}
    subprocess.run(["bash", script], env=environment, check=True)
    *argv, folder = record.read_text().splitlines()
    ports = {**USUAL_PORTS, "http_port": 9100}
    launch = server_command(server, serving, ports, shm_prefix="trtllm_pipelines_", ranks=Ranks(16))
    per_rank = " ".join(launch.command[2:]).removesuffix(" :").split(" : ")
    assert ["-n", "1", *argv] == per_rank[rank].split()
    assert ("--model-control-mode=explicit" in argv) == ("--load-model=tensorrt_llm" in argv) == (rank > 0)
    assert folder == str(repo)


def test_other_machines_reach_the_front_of_rank_0_which_ends_with_the_server(tmp_path):
    """Tritonserver itself listens on its own machine only."""
    server, front, repo = tmp_path / "tritonserver", tmp_path / "python", tmp_path / "a repository"
    server.write_text(f"#!/bin/bash\nuntil [ -s {shlex.quote(str(tmp_path))}/front ]; do sleep 0.02; done\n")
    front.write_text(f'#!/bin/bash\necho "$$" "$@" > {shlex.quote(str(tmp_path))}/front\nexec sleep 60\n')
    for program in (server, front):
        program.chmod(0o755)
    repo.mkdir()
    serving = ServingSettings(host="0.0.0.0", openai_port=9100)
    place = replace(target(tmp_path / "x", repository=repo), python=str(front))
    files = script_files(place, SLURM.model_copy(update={"server": server}), serving)
    script = write(files, tmp_path / "out") / "rank.sh"
    assert "HTTP port 9100" in files["serve.sbatch"]
    assert files["rank.sh"].count("--http-address=127.0.0.1") == 2
    subprocess.run(["bash", script], env={"PATH": "/usr/bin:/bin", "SLURM_PROCID": "0"}, check=True, timeout=20)
    pid, *words = (tmp_path / "front").read_text().split()
    assert words[:2] == ["-m", "pipelines.serving.openai"]
    assert {"--grpc=127.0.0.1:8001", "--host=0.0.0.0", "--port=9100"} <= set(words)
    until = time.monotonic() + 60
    while (alive := psutil.pid_exists(int(pid))) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive


def test_a_rank_that_nobody_numbered_is_refused(tmp_path):
    script = write(script_files(target(tmp_path), SLURM, ServingSettings()), tmp_path / "out") / "rank.sh"
    done = subprocess.run(["bash", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "srun or mpirun must start this" in done.stderr


def test_endpoints_that_change_things_are_closed_with_a_key_of_the_moment(tmp_path):
    files = script_files(target(tmp_path), SLURM, ServingSettings(host="0.0.0.0"))
    assert "admin-key=${key}" in files["rank.sh"]
    assert files == script_files(target(tmp_path), SLURM, ServingSettings(host="0.0.0.0"))


def test_srun_starts_one_rank_per_gpu_over_the_nodes(tmp_path):
    text = script_files(target(tmp_path / "x"), SLURM, ServingSettings())["serve.sbatch"]
    directives = dict(line.removeprefix("#SBATCH --").split("=") for line in text.splitlines() if "#SBATCH" in line)
    assert {name: directives[name] for name in ("nodes", "ntasks-per-node", "gpus-per-node", "partition")} == {
        "nodes": "2",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "partition": "gpu",
    }
    before, _, _ = text.partition("\nsrun ")
    assert f"\nexport SRUN_CPUS_PER_TASK={directives['cpus-per-task']}\n" in before  # srun does not ask sbatch
    command = words_after("srun", text)
    assert {"--mpi=pmix", "--distribution=block", "--kill-on-bad-exit=1"} <= set(command)
    assert command[-2:] == ["bash", f"{tmp_path}/x/rank.sh"]


def test_mpirun_fills_the_hosts_in_their_order(tmp_path):
    files = script_files(target(tmp_path / "x"), MPI, ServingSettings())
    assert files["hosts"] == "gpu1 slots=8\ngpu2 slots=8\n"
    command = words_after("mpirun", files["serve.sh"])
    assert command[command.index("-n") + 1] == "16"
    assert command[command.index("--hostfile") + 1] == f"{tmp_path}/x/hosts"
    assert command[command.index("--map-by") + 1] == "slot"


def test_the_build_leaves_a_link_to_its_repository(tmp_path):
    """The build script runs with a program in Python's place that prints what `make repository` prints."""
    made = tmp_path / "artifacts" / "repository" / "m-fp8-0123"
    made.mkdir(parents=True)
    python = tmp_path / "python"
    closing = console.closing([], Path("runs/x")).replace("run:", "run:       ")
    said = f"repository: m-fp8\nrepository: made in 3 s\n\nrepository: artifacts/repository/m-fp8-0123{closing}"
    python.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" > argv\ncat <<'END'\n{said}\nEND\n")
    python.chmod(0o755)
    wanted = replace(target(tmp_path / "scripts", cwd=tmp_path), python=str(python))
    wanted.runs.mkdir()
    script = write(script_files(wanted, SLURM, ServingSettings()), tmp_path / "scripts") / "build.sbatch"
    subprocess.run(["bash", script], check=True, capture_output=True)
    assert (wanted.runs / "repository").resolve() == made
    argv = (tmp_path / "argv").read_text().split()
    assert argv == ["-m", "pipelines", "repository", *wanted.words, "build.workers=8"]


def test_a_build_that_fails_leaves_no_link(tmp_path):
    wanted = replace(target(tmp_path / "scripts", cwd=tmp_path), python="false")
    wanted.runs.mkdir()
    script = write(script_files(wanted, SLURM, ServingSettings()), tmp_path / "scripts") / "build.sbatch"
    assert subprocess.run(["bash", script], check=False, capture_output=True).returncode != 0
    assert list(wanted.runs.iterdir()) == [wanted.runs / "build.out"]


def scripts(tmp_path, *overrides: str) -> Path:
    repo = tmp_path / "given" / "repo"
    if not repo.is_dir():
        repository(tmp_path / "given", "multinode")
    words = [f"serving.repository={repo}", f"cluster.folder={tmp_path / 'out'}", *overrides]
    return write_scripts(load(words), LOGIN_NODE, words)


def test_a_repository_from_elsewhere_needs_no_build(tmp_path, capsys):
    folder = scripts(tmp_path, "cluster=slurm")
    assert sorted(path.name for path in folder.iterdir()) == [".generated.json", "rank.sh", "serve.sbatch"]
    assert folder == tmp_path / "out" / "llama_3_1_405b-fp8"
    said = capsys.readouterr().out
    assert "llama_3_1_405b-fp8: 8 ranks on 2 nodes, 4 GPUs each" in said
    assert f"sbatch {folder}/serve.sbatch" in said
    assert "listens on its first node only; serving.host=0.0.0.0" in said
    assert json.loads((folder / ".generated.json").read_text()).keys() == {"rank.sh", "serve.sbatch"}


def test_what_a_person_changed_is_never_overwritten(tmp_path):
    (scripts(tmp_path, "cluster=slurm") / "serve.sbatch").write_text("mine")
    expected = r"`make scripts` did not write or that were changed since: serve\.sbatch.* cluster\.folder="
    with pytest.raises(UserError, match=expected):
        scripts(tmp_path, "cluster=slurm", "serving.host=0.0.0.0")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"cluster=none needs no scripts\. Choose one of slurm, mpi"),
        (["cluster=mpi", "cluster.hosts=[a]"], r"cluster\.hosts names 1 machine; the server needs 2"),
        (["cluster=mpi", "cluster.hosts=[a,a]"], r"cluster has a twice in hosts: each is a node of its own"),
        (["cluster=slurm", "serving.multi_gpu=orchestrator"], r"multi_gpu=orchestrator spawns ranks on one node"),
        (["cluster=slurm", "hardware=l4", "hardware.gpus_per_server=2"], r"has 2\. Set triton\.num_nodes=4"),
        (["cluster=mpi", "cluster.hosts=[a,b]", "cluster.image=x"], r"cluster\.image is for Slurm"),
    ],
)
def test_a_split_that_cannot_work_is_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        scripts(tmp_path, *overrides)


def test_the_folder_has_the_name_of_the_engine_as_it_is_tuned(tmp_path):
    words = ["cluster=slurm", f"cluster.folder={tmp_path}", f"paths.store={tmp_path}/store", "engine=tensorrt_llm"]
    words += ["model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm", "build.tp_size=2"]
    assert write_scripts(load(words), LOGIN_NODE, words).name == "llama_3_1_8b-fp8-kv_fp8"


def test_the_server_of_the_llm_api_reads_few_settings_and_no_key(tmp_path, capsys):
    words = ["cluster=slurm", f"cluster.folder={tmp_path}", f"paths.store={tmp_path}/store", "hardware=h100_sxm"]
    words += ["engine=tensorrt_llm_llmapi", "model=llama_3_1_8b", "quant=fp8", "serving.host=0.0.0.0"]
    write_scripts(load([*words, "serving.max_prompts=3"]), LOGIN_NODE, words)
    said = " ".join(capsys.readouterr().out.split())
    assert "not read by `make scripts` for this deployment: serving.max_prompts" in said
    with pytest.raises(UserError, match=r"does not ask for the key of serving\.api_key=true"):
        write_scripts(load([*words, "serving.api_key=true"]), LOGIN_NODE, words)


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        (["cluster=slurm", "cluster.hosts=[a]", "cluster.build_minutes=9"], "cluster.hosts, cluster.build_minutes"),
        (["cluster=mpi", "cluster.hosts=[a,b]", "cluster.partition=gpu"], "cluster.partition"),
        (["cluster=slurm", "serving.restarts=3", "serving.show_log=true"], "serving.restarts, serving.show_log"),
        (["cluster=slurm", "cluster.partition=gpu", "serving.drain_timeout_s=9"], None),
    ],
)
def test_what_no_script_follows_is_said(tmp_path, capsys, overrides, unread):
    scripts(tmp_path, *overrides)
    said = " ".join(capsys.readouterr().out.split())
    assert (f"not read by `make scripts` for this deployment: {unread} llama_3_1_405b" in said) or not unread
    assert ("not read by" in said) is bool(unread)


@pytest.mark.parametrize("words", [["scripts", "cluster=slurm"], ["manifests", "manifests.preview=true"], ["migrate"]])
def test_what_the_plan_warns_of_is_said(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words += ["engine=tensorrt_llm", "model=llama_3_1_8b", "quant=int8_wo", "hardware=rtx_pro_6000"]
    assert main(words) == 0
    assert "warning: quant=int8_wo on compute capability 12.0" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["scripts", "cluster=slurm"], ["manifests", "manifests.preview=true"], ["migrate"]])
def test_what_is_said_fits_a_narrow_terminal(words, tmp_path, monkeypatch, capsys):
    """But for commands and paths, which are copied."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    words += ["engine=tensorrt_llm", "model=llama_3_1_8b", "quant=int8_wo", "hardware=h100_sxm", "build.tp_size=2"]
    assert main(words) == 0
    too_long = [line for line in capsys.readouterr().out.splitlines() if len(line) > 59]
    assert [line for line in too_long if not line.startswith(("  sbatch ", "      make "))] == []


def test_the_service_in_front_counts_the_limits_of_the_benchmark(tmp_path):
    folder = scripts(tmp_path, "cluster=slurm", "serving.host=0.0.0.0", "benchmark.slo.ttft_ms=450")
    assert "--slo-ttft-ms=450" in (folder / "rank.sh").read_text()


def test_the_cpu_engine_needs_no_scripts(tmp_path):
    words = ["cluster=slurm", f"cluster.folder={tmp_path}", "engine=openvino"]
    with pytest.raises(UserError, match="engine=openvino runs in one process on one machine"):
        write_scripts(load(words), LOGIN_NODE, words)


@pytest.mark.parametrize("value", ['"a b"', "x;rm"])
def test_names_that_no_cluster_has_are_refused(value):
    with pytest.raises(UserError, match=r"cluster\.partition="):
        load(["cluster=slurm", f"cluster.partition={value}"])


def test_variables_of_ranks_have_names():
    with pytest.raises(UserError, match="'A-B' is no name of a variable"):
        load(["cluster=slurm", "cluster.env={A-B: x}"])
    assert ClusterSettings(env={"NCCL_IB_HCA": "mlx5"}).env == {"NCCL_IB_HCA": "mlx5"}
