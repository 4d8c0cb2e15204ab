"""`make scripts` for the LLM API: real shells run the scripts with recorders in NVIDIA's place; every word is judged.

The recorders know trtllm-serve's options from NVIDIA's sources (tests/support/trtllm_serve_options.json), and its files
from the tables of options. Nothing of NVIDIA runs here.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipelines.compress.config import KvCacheSettings
from pipelines.deploy.cluster import script_files, write_scripts
from pipelines.deploy.config import ClusterSettings
from pipelines.deploy.facts import read_served
from pipelines.domain.errors import UserError
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.engines.tensorrt_llm.llm_api import complaints
from pipelines.host.machine import gather
from pipelines.serving.config import ServingSettings
from pipelines.settings.compose import load
from pipelines.stages.unified import ConfigureLlm
from tests.support.cluster_targets import target
from tests.support.deployments import repository
from tests.support.emulated_trtllm.trtllm_serve import parsed
from triton_repo.config import TritonSettings

VERSIONS = ("1.3.0rc3", "1.4")
TOOLS = {
    "trtllm-serve": 'printf "%s\\n" "$PWD" "$TRTLLM_NO_USAGE_STATS" "$@" > "$RECORDS/$$"\nsleep 0.5\n',
    "trtllm-llmapi-launch": 'exec "$@"\n',
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "mpirun": 'while [[ $1 == -* ]]; do [[ $1 == --allow-run-as-root ]] || shift; shift; done\nexec "$@"\n',
    "scontrol": "printf '%s\\n' node1 node2 node3\n",
}
ARGUMENTS = ConfigureLlm(
    BuildSettings(tp_size=2), TritonSettings(), KvCacheSettings(), enable_chunked_context=False
).arguments
SLURM = ClusterSettings(kind="slurm", env={"NCCL_DEBUG": "INFO"})
MPI = ClusterSettings(kind="mpi", hosts=("node1", "node2", "node3"), env={"NCCL_DEBUG": "INFO"})
APART = {"prefill": 1, "decode": 2}
CASES = {
    "one GPU": (SLURM, 1, 1),
    "several GPUs": (MPI.model_copy(update={"hosts": ("node1",)}), 2, 1),
    "several nodes": (MPI, 6, 3),
    "several nodes under Slurm": (SLURM, 6, 3),
    "prompts and answers apart": (MPI.model_copy(update=APART), 2, 3),
    "prompts and answers apart under Slurm": (SLURM.model_copy(update=APART), 2, 3),
}


def written(folder: Path, cluster: ClusterSettings, ranks: int, nodes: int) -> Path:
    """Write the scripts and the folder that they serve; return the script that serves."""
    made = replace(
        target(folder / "it's here"),
        label="llama",
        world_size=ranks,
        num_nodes=nodes,
        whole=cluster.disaggregated,
        llm_api=ARGUMENTS,
    )
    made.folder.mkdir(parents=True)
    (made.runs / "engine").mkdir(parents=True)
    files = script_files(made, cluster, ServingSettings())
    for name, text in files.items():
        (made.folder / name).write_text(text)
    return made.folder / ("serve.sbatch" if cluster.kind == "slurm" else "serve.sh")


def run(folder: Path, script: Path) -> list[list[str]]:
    """Run a script with the recorders; return the words of every trtllm-serve, the proxy last."""
    tools, records = folder / "bin", folder / "records"
    tools.mkdir()
    records.mkdir()
    for name, body in TOOLS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}")
        (tools / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "RECORDS": str(records), "SLURM_JOB_NODELIST": "n"}
    subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=False, timeout=30)
    found = [path.read_text().splitlines() for path in records.iterdir()]
    return sorted(found, key=lambda words: words[2] == "disaggregated")


@pytest.mark.parametrize("case", CASES)
def test_the_shell_reads_every_script_without_complaint(tmp_path, case):
    folder = written(tmp_path, *CASES[case]).parent
    scripts = [path for path in folder.iterdir() if path.suffix in (".sh", ".sbatch")]
    tool = shutil.which("shellcheck", path=Path(sys.executable).parent) or "shellcheck"
    found = subprocess.run([tool, "--shell=bash", *scripts], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", [case for case in CASES if "apart" not in case])
def test_one_server_gets_the_checkpoint_and_its_options(tmp_path, case, version):
    (words,) = run(tmp_path, written(tmp_path, *CASES[case]))
    assert words[:2] == [str(tmp_path / "it's here.runs" / "engine"), "1"]  # reports of use are off
    assert parsed(words[2:], version) == {
        "model": "checkpoint",
        "--host": "127.0.0.1",
        "--port": "9000",
        "--extra_llm_api_options": "extra_llm_api_options.yaml",
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", [case for case in CASES if "apart" in case])
def test_a_proxy_knows_the_servers_for_prompts_and_for_answers(tmp_path, case, version):
    *servers, proxy = run(tmp_path, written(tmp_path, *CASES[case]))
    given = parsed(proxy[2:], version)
    config = yaml.safe_load(Path(given.pop("--config_file")).read_text())
    assert given == {"--server_start_timeout": "600", "--request_timeout": "600"}  # NVIDIA's own are 180 s
    assert config == {  # the keys of disagg_utils.py; as many addresses as instances
        "hostname": "127.0.0.1",
        "port": 9000,
        "backend": "pytorch",
        "context_servers": {"num_instances": 1, "urls": ["node1:8001"]},
        "generation_servers": {"num_instances": 2, "urls": ["node2:8001", "node3:8001"]},
    }
    values = [parsed(words[2:], version) for words in servers]
    roles = sorted(Path(each["--extra_llm_api_options"]).name for each in values)
    assert roles == ["context.yaml", "generation.yaml", "generation.yaml"]
    assert {(each["model"], each["--host"], each["--port"]) for each in values} == {("checkpoint", "0.0.0.0", "8001")}
    for each in values:
        options = yaml.safe_load(Path(each["--extra_llm_api_options"]).read_text())
        assert not complaints(options, version, "")
        assert options["cache_transceiver_config"] == {"backend": "DEFAULT", "max_tokens_in_buffer": 1024}
        assert options.get("disable_overlap_scheduler", False) is each["--extra_llm_api_options"].endswith(
            "context.yaml"
        )
        assert {name: options[name] for name in ARGUMENTS} == ARGUMENTS


def test_the_proxy_keeps_to_the_time_limits(tmp_path, capsys):
    repo = repository(tmp_path / "given", "llm_api")
    words = [f"serving.repository={repo}", f"cluster.folder={tmp_path / 'out'}", "cluster=mpi"]
    words += ["cluster.hosts=[a,b]", "cluster.prefill=1", "cluster.decode=1"]
    words += ["serving.startup_timeout_s=1900", "serving.request_timeout_s=1200"]
    text = (write_scripts(load(words), gather(), words) / "serve.sh").read_text()
    assert "--server_start_timeout 1900 --request_timeout 1200" in text
    assert "timeout_s" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("apart", [{}, APART], ids=["whole", "apart"])
def test_a_repository_of_the_llm_api_is_served_as_it_is(tmp_path, apart):
    repo = repository(tmp_path / "given", "llm_api")
    words = [f"serving.repository={repo}", f"cluster.folder={tmp_path / 'out'}", "cluster=slurm"]
    words += [f"cluster.{name}={count}" for name, count in apart.items()]
    script = write_scripts(load(words), gather(), words) / "serve.sbatch"
    started = [each for each in run(tmp_path, script) if each[2] != "disaggregated"]
    assert len(started) == (sum(apart.values()) or 1)
    for place, _, *serve in started:
        given = parsed(serve, VERSIONS[-1])
        assert place == str(repo)
        assert (repo / given["model"] / "config.json").is_file()
        options = yaml.safe_load((repo / given["--extra_llm_api_options"]).read_text())
        assert options.items() >= (read_served(repo).llm_api or {}).items()


def test_a_repository_over_nodes_is_not_cut_into_servers_of_one_node(tmp_path):
    repo = repository(tmp_path / "given", "llm_api")
    file = repo / "repository.json"
    described = json.loads(file.read_text())
    described["settings"]["num_nodes"] = 2
    file.write_text(json.dumps(described))
    words = [f"serving.repository={repo}", f"cluster.folder={tmp_path / 'out'}", "cluster=slurm"]
    write_scripts(load(words), gather(), words)  # one server over both
    with pytest.raises(
        UserError, match=r"triton\.num_nodes=2 spreads one server over nodes.*write the repository again"
    ):
        write_scripts(load([*words, "cluster.prefill=1", "cluster.decode=1"]), gather(), words)


def test_what_the_user_says_of_the_transfer_wins(tmp_path):
    made = replace(target(tmp_path), whole=True, llm_api={**ARGUMENTS, "cache_transceiver_config": {"backend": "UCX"}})
    files = script_files(made, SLURM.model_copy(update=APART), ServingSettings())
    transfer = yaml.safe_load(files["context.yaml"])["cache_transceiver_config"]
    assert transfer == {"backend": "UCX", "max_tokens_in_buffer": 1024}


def test_other_hosts_get_the_variables_of_this_one(tmp_path):
    text = written(tmp_path, *CASES["several nodes"]).read_text()
    assert "-x TRTLLM_NO_USAGE_STATS -x NCCL_DEBUG" in text
    assert "export NCCL_DEBUG=INFO" in text


def test_half_of_a_disaggregation_is_refused():
    with pytest.raises(Exception, match="prefill=1 and decode=0: both are 0, or both at least 1"):
        load(["engine=tensorrt_llm_llmapi", "cluster=slurm", "cluster.prefill=1"])


def test_beams_are_not_handed_over(tmp_path):
    words = ["engine=tensorrt_llm_llmapi", "model=tiny_llama", "quant=none", "build.max_beam_width=4", "cluster=slurm"]
    words += [f"cluster.folder={tmp_path}", f"paths.store={tmp_path}/store", "cluster.prefill=1", "cluster.decode=1"]
    with pytest.raises(UserError, match=r"max_beam_width=4 with cluster\.prefill and decode: .* of one beam"):
        write_scripts(load(words), gather(), words)
