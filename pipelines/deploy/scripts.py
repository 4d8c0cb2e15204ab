"""Scripts that build an engine on a cluster node and serve it over one or several nodes, as text.

Sources. Build: trtllm-build makes the engines of all ranks on one machine, `--workers` at a time, at most one per
visible GPU (`tensorrt_llm/commands/build.py`); an engine belongs to the kind of GPU it was built on. Serving: leader
mode of `scripts/launch_triton_server.py` of TensorRT-LLM's Triton backend: one tritonserver per rank, rank 0 loads
every model and answers, the others load the engine's model alone (explicit model control). Under Slurm
`srun --mpi=pmix` starts the ranks (README of tensorrtllm_backend, "Launch Triton server within Slurm based
clusters"). One wrapper, rank.sh, knows what each rank runs, for srun and for mpirun.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.document.show import count
from pipelines.serving.command import Ranks, front_options, server_command
from pipelines.settings.cluster import ClusterSettings
from pipelines.settings.serving import ServingSettings

RANK = "${rank}"
KEY = "${key}"
KEY_LINE = "key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')  # told to nobody"
NOT_RUN = "Written by `make scripts`; checked by tests and by a real sbatch, but not run: that takes GPUs."


@dataclass(frozen=True, slots=True)
class ScriptTarget:
    """Target of the scripts: what is built and served, and where.

    Attributes:
        label: model and format.
        world_size: ranks, each with a GPU.
        num_nodes: nodes they are spread over equally.
        words: overrides of this configuration, for the build.
        workers: engines built at a time; None if the user set it, or if there is only one.
        build_gpus: GPUs the build needs.
        repository: an existing one; None if the build script makes it.
        folder: of the scripts, absolute.
        cwd: where `make scripts` ran; relative paths in the settings start there.
        python: interpreter that runs this project on the nodes.
        store: of artifacts, to mount in containers.
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

    @property
    def ranks_per_node(self) -> int:
        """GPUs of each node."""
        return self.world_size // self.num_nodes

    @property
    def runs(self) -> Path:
        """Folder of logs and the link to the build's result; the scripts' own folder holds nothing else."""
        return self.folder.with_name(f"{self.folder.name}.runs")

    @property
    def served(self) -> str:
        """The repository's path as the shell reads it."""
        return shlex.quote(str(self.repository or self.runs / "repository"))


def script_files(target: ScriptTarget, cluster: ClusterSettings, serving: ServingSettings) -> dict[str, str]:
    """Return all files by name."""
    files = {"rank.sh": _rank(target, cluster, serving)}
    if cluster.kind == "slurm":
        files["serve.sbatch"] = _serve_slurm(target, cluster, serving)
        if target.repository is None:
            files["build.sbatch"] = _build_slurm(target, cluster)
        return files
    files["hosts"] = "".join(f"{host} slots={target.ranks_per_node}\n" for host in cluster.hosts)
    files["serve.sh"] = _serve_mpi(target)
    if target.repository is None:
        files["build.sh"] = _lines(_head(_builds(target), "bash build.sh"), _build(target))
    return files


def _lines(*parts: Sequence[str]) -> str:
    return "\n".join(["#!/bin/bash", *(line for part in parts for line in part)]) + "\n"


def _head(what: str, how: str) -> list[str]:
    return [f"# {what} Start it with: {how}", f"# {NOT_RUN}"]


def _directives(target: ScriptTarget, cluster: ClusterSettings, name: str, options: Mapping[str, object]) -> list[str]:
    """Render #SBATCH lines; None leaves an option to the cluster."""
    where = {key: getattr(cluster, key) for key in ("partition", "account", "qos", "constraint")}
    options = {"job-name": f"{name}-{target.label}", **options, **where}
    return [f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in options.items() if value is not None]


def _build_slurm(target: ScriptTarget, cluster: ClusterSettings) -> str:
    gpus = target.build_gpus
    options = {
        "nodes": 1,
        "ntasks": 1,
        "gpus-per-node": gpus,
        "cpus-per-task": cluster.cpus_per_gpu * gpus,
        "time": cluster.build_minutes,
        "output": target.runs / "build-%j.log",
    }
    head = _head(_builds(target), "sbatch build.sbatch")
    prefix = ["srun", "--ntasks=1", *_container(target, cluster)] if cluster.image else []
    return _lines(head, _directives(target, cluster, "build", options), _build(target, prefix))


def _build(target: ScriptTarget, prefix: Sequence[str] = ()) -> list[str]:
    """Render the build: everything up to the Triton repository, and a link to it beside the scripts."""
    workers = [f"build.workers={target.workers}"] if target.workers else []
    command = [*prefix, target.python, "-m", "pipelines", "repository", *target.words, *workers]
    runs = shlex.quote(str(target.runs))
    return [
        "set -euo pipefail",
        f"cd {shlex.quote(str(target.cwd))}",
        f"{shlex.join(command)} | tee {runs}/build.out",
        "# Its closing lines say where the repository is.",
        f"made=$(sed -n 's/^repository: *//p' {runs}/build.out | tail -n 1)",
        f'ln -sfn "$(realpath -e "$made")" {runs}/repository',
    ]


def _serve_slurm(target: ScriptTarget, cluster: ClusterSettings, serving: ServingSettings) -> str:
    options = {
        "nodes": target.num_nodes,
        "ntasks-per-node": target.ranks_per_node,
        "gpus-per-node": target.ranks_per_node,
        "cpus-per-task": cluster.cpus_per_gpu,
        "time": cluster.serve_minutes,
        "output": target.runs / "serve-%j.log",
    }
    command = [
        "srun", f"--mpi={cluster.srun_mpi}", "--distribution=block", "--kill-on-bad-exit=1",
        *_container(target, cluster), f"--output={target.runs}/serve-%j-%t.log",
        "bash", str(target.folder / "rank.sh"),
    ]  # fmt: skip
    body = [
        "set -euo pipefail",
        'echo "The server answers on $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1), HTTP port '
        f'{serving.ports["openai_port" if serving.front else "http_port"]}, when its log says so."',
        shlex.join(command),
    ]
    head = _head(_serves(target), "sbatch serve.sbatch")
    return _lines(head, _directives(target, cluster, "serve", options), body)


def _builds(target: ScriptTarget) -> str:
    engines = f"the engines of all {target.world_size} ranks" if target.world_size > 1 else "the engine"
    return f"Builds {engines} of {target.label} on one node."


def _serves(target: ScriptTarget) -> str:
    nodes = f"{target.num_nodes} nodes" if target.num_nodes > 1 else "one node"
    return f"Serves {target.label} with {count(target.world_size, 'GPU')} on {nodes}."


def _container(target: ScriptTarget, cluster: ClusterSettings) -> list[str]:
    """Return the options that Pyxis adds to srun."""
    if cluster.image is None:
        return []
    own = [target.cwd, target.folder.parent, target.store, *([target.repository] if target.repository else [])]
    folders = dict.fromkeys([*own, *cluster.mounts])
    mounts = ",".join(f"{folder}:{folder}" for folder in folders)
    return [f"--container-image={cluster.image}", f"--container-mounts={mounts}", f"--container-workdir={target.cwd}"]


def _serve_mpi(target: ScriptTarget) -> str:
    folder = shlex.quote(str(target.folder))
    command = (
        f"mpirun --allow-run-as-root --hostfile {folder}/hosts -n {target.world_size} --map-by slot --bind-to none "
        f"bash {folder}/rank.sh"
    )
    head = _head(_serves(target) + " The first host answers.", "bash serve.sh")
    return _lines(head, ["set -euo pipefail", command])


def _rank(target: ScriptTarget, cluster: ClusterSettings, serving: ServingSettings) -> str:
    """Render the script of one rank; srun and mpirun each pass it its number."""
    first, other = _commands(target, cluster, serving)
    head = [
        "# One rank of the server: rank 0 answers, the others help with the engine. srun or mpirun starts it.",
        f"# {NOT_RUN}",
    ]
    body = [
        "set -euo pipefail",
        "rank=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:?srun or mpirun must start this}}",
        *(f"export {name}={shlex.quote(value)}" for name, value in cluster.env.items()),
        *([] if serving.loopback else [KEY_LINE]),
        f"cd {target.served}  # relative paths of the engine start there",
    ]
    start = [*(_front(target, serving) if serving.front else []), f"exec {first}"]
    if target.world_size == 1:
        return _lines(head, body, start)
    return _lines(head, body, ['if [ "$rank" -eq 0 ]; then', *(f"  {line}" for line in start), "fi", f"exec {other}"])


def _front(target: ScriptTarget, serving: ServingSettings) -> list[str]:
    """Render the start of the service through which other machines reach the server; it ends with the server."""
    ports = serving.ports
    command = [
        target.python, "-m", "pipelines.serving.openai", "--repository=.",
        f"--grpc={serving.local_host}:{ports['grpc_port']}",
        f"--metrics=http://{serving.local_host}:{ports['metrics_port']}/metrics",
        f"--port={ports['openai_port']}",
        *front_options(serving),
    ]  # fmt: skip
    root = shlex.quote(str(target.cwd))
    return [
        "# The kernel ends it together with this shell, which becomes the server.",
        f"PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}} setpriv --pdeathsig TERM {shlex.join(command)} &",
    ]


def _commands(target: ScriptTarget, cluster: ClusterSettings, serving: ServingSettings) -> tuple[str, str]:
    """Return the command lines of rank 0 and of the others, quoted for the shell."""
    launch = server_command(
        cluster.server,
        Path(),
        serving,
        serving.ports,
        shm_prefix="trtllm_pipelines_",
        ranks=Ranks(max(2, target.world_size)),
        admin_key=KEY,
    )
    per_rank: list[list[str]] = [[]]
    for word in launch.command[launch.command.index("-n") :]:
        if word == ":":
            per_rank.append([])
        else:
            per_rank[-1].append(word)
    first, other = (words[2:] for words in per_rank[:2])  # without `-n 1`
    return _shell(first, 0), _shell(other, 1)


def _shell(words: Sequence[str], rank: int) -> str:
    """Quote words for the shell; the rank's number and the key are shell variables."""
    mine = [word.replace(f"trtllm_pipelines_{rank}_", f"trtllm_pipelines_{RANK}_") for word in words]
    return " \\\n    ".join(f'"{word}"' if "${" in word else shlex.quote(word) for word in mine)
