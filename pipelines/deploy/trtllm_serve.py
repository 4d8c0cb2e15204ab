"""Scripts that serve the LLM API with trtllm-serve: on one node, over several, or prompts and answers apart.

Sources, of TensorRT-LLM 1.3.0rc3: `examples/llm-api/llm_mgmn_trtllm_serve.sh` (every rank runs trtllm-llmapi-launch),
`examples/disaggregated/disagg_config.yaml`, `llmapi/disagg_utils.py` (its keys), `commands/serve.py` (options).
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipelines.deploy.config import ClusterSettings
from pipelines.domain.benchmark import NO_SLO, Slo
from pipelines.domain.errors import Fault
from pipelines.engines.tensorrt_llm.llm_api import merged
from pipelines.serving.config import ServingSettings
from triton_repo.llmapi import CHECKPOINT, CHECKPOINT_DIR, OPTIONS, serve_command

QUIET = "export TRTLLM_NO_USAGE_STATS=1  # trtllm-serve reports its use to NVIDIA unless it is told not to"
WORKER_PORT = 8001
"""Of each server behind the proxy; there is one on a node."""
CONTEXT, GENERATION, PROXY = "context.yaml", "generation.yaml", "disagg_config.yaml"
LAUNCH = "trtllm-llmapi-launch"
"""NVIDIA's program that makes one server of all ranks of srun or mpirun."""


@dataclass(frozen=True, slots=True)
class ScriptTarget:
    """Target of the scripts: what is built and served, and where.

    Attributes:
        label: model and format.
        num_nodes: nodes they are spread over equally.
        words: overrides of this configuration, for the build.
        workers: engines built at a time; None if the user set it, or if there is only one.
        repository: an existing one; None if the build script makes it.
        cwd: where `make scripts` ran; relative paths in the settings start there.
        python: interpreter that runs this project on the nodes.
        store: of artifacts, to mount in containers.
        whole: whether every node has a server of its own.
        llm_api: arguments of the LLM API; None for TensorRT engines, which Triton serves.
        slo: limits that the metrics of the service in front show exactly how many answers meet.
    """

    label: str
    world_size: int
    num_nodes: int
    words: tuple[str, ...]
    workers: int | None
    build_gpus: int
    repository: Path | None
    folder: Path
    cwd: Path
    python: str
    store: Path
    whole: bool = False
    llm_api: Mapping[str, Any] | None = None
    slo: Slo = NO_SLO

    @property
    def ranks_per_node(self) -> int:
        """GPUs of each node; of servers for prompts or answers alone, there is a whole one on each."""
        return self.world_size // (1 if self.whole else self.num_nodes)

    @property
    def runs(self) -> Path:
        """Folder of logs and the link to the build's result; the scripts' own folder holds nothing else."""
        return self.folder.with_name(f"{self.folder.name}.runs")

    @property
    def served(self) -> str:
        """Path of the repository, or of the folder of the LLM API, as the shell reads it."""
        return shlex.quote(str(self.repository or self.runs / self.made))

    @property
    def checkpoint(self) -> str:
        """Path of the LLM API's checkpoint in what is served."""
        return CHECKPOINT_DIR if self.repository else CHECKPOINT

    @property
    def made(self) -> str:
        """What the build makes; also the name of the link to it."""
        return "repository" if self.llm_api is None else "engine"


def role_files(arguments: Mapping[str, Any], cluster: ClusterSettings) -> dict[str, str]:
    """Return the options of servers for prompts and for answers; transfer settings in the arguments win."""
    if not cluster.disaggregated:
        return {}
    # The buffer holds the KV cache of one prompt; a prompt ends before the next token is planned, so nothing overlaps.
    transfer = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": arguments["max_input_len"]}}
    roles: dict[str, dict[str, Any]] = {CONTEXT: transfer | {"disable_overlap_scheduler": True}, GENERATION: transfer}
    return {name: yaml.safe_dump(merged(own, arguments), sort_keys=False) for name, own in roles.items()}


def beam_faults(arguments: Mapping[str, Any], cluster: ClusterSettings) -> Iterator[Fault]:
    """Yield the beams that servers for prompts cannot hand over. Source: `batch_manager/cacheFormatter.cpp`."""
    width = arguments.get("max_beam_width", 1)
    if cluster.disaggregated and width > 1:
        what = (
            f"max_beam_width={width} with cluster.prefill and decode: TensorRT-LLM hands over the KV cache of one beam."
        )
        yield Fault(what, todo="Set build.max_beam_width=1, or leave out cluster.prefill and decode.")


def serve_lines(
    target: ScriptTarget, cluster: ClusterSettings, serving: ServingSettings, container: Sequence[str]
) -> list[str]:
    """Return the lines that serve, after the head of the script; `container` has options of srun."""
    head = ["set -euo pipefail", QUIET, *(f"export {name}={shlex.quote(value)}" for name, value in cluster.env.items())]
    head += [f"cd {target.served}"]
    if cluster.disaggregated:
        return [*head, *_disaggregated(target, cluster, serving, container)]
    folder = f"{shlex.quote(str(target.folder))}/" if target.repository else ""  # a repository has no file of options
    command = serve_command(serving.host, serving.ports["openai_port"], target.checkpoint, f"{folder}{OPTIONS}")
    if cluster.kind == "mpi" and target.world_size == 1:
        return [*head, f"exec {command}"]
    passed_on = "" if cluster.kind == "slurm" else f" {_passed_on(cluster)}"
    return [*head, f"{all_ranks(target, cluster, container)}{passed_on} {LAUNCH} {command}"]


def all_ranks(target: ScriptTarget, cluster: ClusterSettings, options: Sequence[str] = ()) -> str:
    """Return what starts all ranks, before their command: srun with options, or mpirun on the hosts of the folder."""
    if cluster.kind == "slurm":
        usual = (f"--mpi={cluster.srun_mpi}", "--distribution=block", "--kill-on-bad-exit=1")
        return shlex.join(["srun", *usual, *options])
    hosts = f"{shlex.quote(str(target.folder))}/hosts"
    return f"mpirun --allow-run-as-root --hostfile {hosts} -n {target.world_size} --map-by slot --bind-to none"


def _passed_on(cluster: ClusterSettings) -> str:
    """Return mpirun's options that give other hosts the variables of this one."""
    return shlex.join(word for name in ("TRTLLM_NO_USAGE_STATS", *cluster.env) for word in ("-x", name))


def _disaggregated(
    target: ScriptTarget, cluster: ClusterSettings, serving: ServingSettings, container: Sequence[str]
) -> list[str]:
    """Start one server on each node and the proxy on the first; all end when one of them does."""
    slurm, ranks = cluster.kind == "slurm", target.world_size
    folder, runs = shlex.quote(str(target.folder)), shlex.quote(str(target.runs))
    hosts = 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    lines = [hosts if slurm else f"hosts=({shlex.join(cluster.hosts)})", f"mkdir -p {runs}"]
    roles = [CONTEXT] * cluster.prefill + [GENERATION] * cluster.decode
    lines += [f"cat > {runs}/{PROXY} <<EOF", *_proxy_config(cluster, serving), "EOF", "trap 'kill $(jobs -p)' EXIT"]
    for number, role in enumerate(roles):
        name = f'"${{hosts[{number}]}}'
        srun = ["--overlap", f"--mpi={cluster.srun_mpi}", "--nodes=1", f"--ntasks={ranks}", *container]
        start = f'{shlex.join(["srun", *srun])} --nodelist={name}"'
        if not slurm:
            start = f'mpirun --allow-run-as-root --host {name}:{ranks}" -n {ranks} --bind-to none {_passed_on(cluster)}'
        worker = serve_command("0.0.0.0", WORKER_PORT, target.checkpoint, f"{folder}/{role}")
        lines.append(f"{start} {LAUNCH} {worker} &")
    limits = f"--server_start_timeout {serving.startup_timeout_s} --request_timeout {serving.request_timeout_s}"
    proxy = f"trtllm-serve disaggregated --config_file {runs}/{PROXY} {limits}"
    first = shlex.join(["srun", "--overlap", "--nodes=1", "--ntasks=1", *container]) + ' --nodelist="${hosts[0]}" '
    return [*lines, f"{first if slurm else ''}{proxy} &", "wait -n  # whichever ends first"]


def _proxy_config(cluster: ClusterSettings, serving: ServingSettings) -> list[str]:
    """Render the proxy's file; the shell fills in the names of the nodes."""
    first = 0
    lines = [f"hostname: {serving.host}", f"port: {serving.ports['openai_port']}", "backend: pytorch"]
    for group, count in (("context_servers", cluster.prefill), ("generation_servers", cluster.decode)):
        lines += [f"{group}:", f"  num_instances: {count}", "  urls:"]
        lines += [f'  - "${{hosts[{first + number}]}}:{WORKER_PORT}"' for number in range(count)]
        first += count
    return lines
