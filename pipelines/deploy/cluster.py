"""`make scripts`: check the split over nodes, write the scripts, and show how to start them."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import yaml

from pipelines.deploy.config import ClusterSettings
from pipelines.deploy.facts import key_faults, leader_faults, not_of_trtllm_serve, read_served, warn_unread
from pipelines.deploy.trtllm_serve import ScriptTarget, all_ranks, beam_faults, role_files, serve_lines
from pipelines.document.show import count
from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.engines.registry import with_setting
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.files import write_folder
from pipelines.host.machine import Machine
from pipelines.host.screen import say, tell, warn
from pipelines.plan.plan import make_plan
from pipelines.serving.command_lines import Ranks, front_command, server_command
from pipelines.serving.config import ServingSettings
from pipelines.settings.root import Settings
from pipelines.stages.unified import ConfigureLlm
from pipelines.store.store import Store
from triton_repo.llmapi import OPTIONS

# Scripts that build an engine on a cluster node and serve it over one or several nodes, as text.
#
# Sources. Build: trtllm-build makes the engines of all ranks on one machine, `--workers` at a time, at most one per
# visible GPU (`tensorrt_llm/commands/build.py`); an engine belongs to the kind of GPU it was built on. Serving: leader
# mode of `scripts/launch_triton_server.py` of TensorRT-LLM's Triton backend: one tritonserver per rank, rank 0 loads
# every model and answers, the others load the engine's model alone (explicit model control). Under Slurm
# `srun --mpi=pmix` starts the ranks (README of tensorrtllm_backend, "Launch Triton server within Slurm based
# clusters"). One wrapper, rank.sh, knows what each rank runs, for srun and for mpirun.

RANK = "${rank}"
KEY = "${key}"
KEY_LINE = "key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')  # told to nobody"
NOT_RUN = "Written by `make scripts`; checked by tests and by a real sbatch, but not run: that takes GPUs."
NEVER_RUN = "Written by `make scripts`; checked by tests against trtllm-serve's options, but not run: that takes GPUs."


def script_files(target: ScriptTarget, cluster: ClusterSettings, serving: ServingSettings) -> dict[str, str]:
    """Return all files by name."""
    if target.llm_api is None:
        files, note = {"rank.sh": _rank(target, cluster, serving)}, NOT_RUN
        start = _start_ranks(target, cluster, serving)
    else:
        files, note = role_files(target.llm_api, cluster), NEVER_RUN
        if target.repository and not files:
            files = {OPTIONS: yaml.safe_dump(dict(target.llm_api), sort_keys=False)}
        start = serve_lines(target, cluster, serving, _container(target, cluster))
    if cluster.kind == "slurm":
        options = {
            "nodes": target.num_nodes,
            "ntasks-per-node": target.ranks_per_node,
            "gpus-per-node": target.ranks_per_node,
            "cpus-per-task": cluster.cpus_per_gpu,
            "time": cluster.serve_minutes,
            "output": target.runs / "serve-%j.log",
        }
        head = _head(_serves(target), "sbatch serve.sbatch", note)
        files["serve.sbatch"] = _lines(head, _directives(target, cluster, "serve", options), start)
        if target.repository is None:
            files["build.sbatch"] = _build_slurm(target, cluster)
        return files
    files["hosts"] = "".join(f"{host} slots={target.ranks_per_node}\n" for host in cluster.hosts)
    files["serve.sh"] = _lines(_head(_serves(target) + " The first host answers.", "bash serve.sh", note), start)
    if target.repository is None:
        files["build.sh"] = _lines(_head(_builds(target), "bash build.sh"), _build(target))
    return files


def _lines(*parts: Sequence[str]) -> str:
    return "\n".join(["#!/bin/bash", *(line for part in parts for line in part)]) + "\n"


def _head(what: str, how: str, note: str = NOT_RUN) -> list[str]:
    return [f"# {what} Start it with: {how}", f"# {note}"]


def _directives(target: ScriptTarget, cluster: ClusterSettings, name: str, options: Mapping[str, object]) -> list[str]:
    """Render #SBATCH lines, and after them what srun does not take from them; None leaves a place to the cluster.

    Since Slurm 22.05 srun binds each task to one processor unless it is told (srun's manual, --cpus-per-task).
    """
    where = {key: getattr(cluster, key) for key in ("partition", "account", "qos", "constraint")}
    options = {"job-name": f"{name}-{target.label}", **options, **where}
    lines = [f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in options.items() if value is not None]
    return [*lines, f"export SRUN_CPUS_PER_TASK={options['cpus-per-task']}"]


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
    in_image = cluster.image and target.llm_api is None  # for the LLM API it needs no GPU and no container of NVIDIA's
    prefix = ["srun", "--ntasks=1", *_container(target, cluster)] if in_image else []
    return _lines(head, _directives(target, cluster, "build", options), _build(target, prefix))


def _build(target: ScriptTarget, prefix: Sequence[str] = ()) -> list[str]:
    """Render the build: everything up to the Triton repository, and a link to it beside the scripts."""
    workers = [f"build.workers={target.workers}"] if target.workers else []
    made, what = target.made, "repository" if target.llm_api is None else "build"
    command = [*prefix, target.python, "-m", "pipelines", what, *target.words, *workers]
    runs = shlex.quote(str(target.runs))
    return [
        "set -euo pipefail",
        f"cd {shlex.quote(str(target.cwd))}",
        f"{shlex.join(command)} | tee {runs}/build.out",
        f"# Its closing lines say where the {made} is.",
        f"made=$(sed -n 's/^{made}: *//p' {runs}/build.out | tail -n 1)",
        f'ln -sfn "$(realpath -e "$made")" {runs}/{made}',
    ]


def _start_ranks(target: ScriptTarget, cluster: ClusterSettings, serving: ServingSettings) -> list[str]:
    if cluster.kind == "mpi":
        return ["set -euo pipefail", f"{all_ranks(target, cluster)} bash {shlex.quote(str(target.folder))}/rank.sh"]
    script = [f"--output={target.runs}/serve-%j-%t.log", "bash", str(target.folder / "rank.sh")]
    return [
        "set -euo pipefail",
        'echo "The server answers on $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1), HTTP port '
        f'{serving.ports["openai_port" if serving.front else "http_port"]}, when its log says so."',
        all_ranks(target, cluster, [*_container(target, cluster), *script]),
    ]


def _builds(target: ScriptTarget) -> str:
    if target.llm_api is not None:
        return f"Makes the checkpoint of {target.label} and its options, on one node."
    engines = f"the engines of all {target.world_size} ranks" if target.world_size > 1 else "the engine"
    return f"Builds {engines} of {target.label} on one node."


def _serves(target: ScriptTarget) -> str:
    if target.whole:
        return f"Serves {target.label} with a server on each of {target.num_nodes} nodes, and a proxy on the first."
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
    command = front_command(target.python, serving, serving.ports, ".", target.slo)
    root = shlex.quote(str(target.cwd))
    return [
        "# The kernel ends it together with this shell, which becomes the server.",
        f"PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}} setpriv --pdeathsig TERM {shlex.join(command)} &",
    ]


def _commands(target: ScriptTarget, cluster: ClusterSettings, serving: ServingSettings) -> tuple[str, str]:
    """Return the command lines of rank 0 and of the others, quoted for the shell."""
    launch = server_command(
        cluster.server,
        serving,
        serving.ports,
        shm_prefix="trtllm_pipelines_",
        ranks=Ranks(max(2, target.world_size)),
        admin_key=KEY,
    )
    ranks = launch.command[launch.command.index("-n") :]
    per_rank = [list(words) for is_colon, words in groupby(ranks, ":".__eq__) if not is_colon]
    first, other = (command[2:] for command in per_rank[:2])  # without `-n 1`
    return _shell(first, 0), _shell(other, 1)


def _shell(command: Sequence[str], rank: int) -> str:
    """Quote words for the shell; the rank's number and the key are shell variables."""
    mine = [word.replace(f"trtllm_pipelines_{rank}_", f"trtllm_pipelines_{RANK}_") for word in command]
    return " \\\n    ".join(f'"{word}"' if "${" in word else shlex.quote(word) for word in mine)


OF_SLURM = ("partition", "account", "qos", "constraint", "cpus_per_gpu", "serve_minutes", "srun_mpi")
"""Settings of `cluster` that only Slurm has."""
OWN = ("cluster", "paths.runs")
"""Overrides that the build on a node does not need."""


def write_scripts(settings: Settings, machine: Machine, overrides: Sequence[str]) -> Path:
    """Write scripts that build and serve a configuration on a cluster.

    Returns:
        the folder of the scripts.

    Raises:
        UserError: there is nothing to write, or the ranks do not fit the nodes.
    """
    _refuse_unwritable(settings)
    check_folders({"cluster.folder": settings.cluster.folder})
    target = _target(settings, machine, overrides)
    refuse(_faults(settings, target))
    if target.llm_api is None and settings.serving.unused:
        warn(settings.serving.unused)
    _warn_unread(settings, target)
    changed = write_folder(
        target.folder,
        script_files(target, settings.cluster, settings.serving),
        command="make scripts",
        setting="cluster.folder",
    )
    target.runs.mkdir(parents=True, exist_ok=True)  # Slurm does not create the folder of a job's output
    _say(settings, target, changed=changed)
    return target.folder


def _warn_unread(settings: Settings, target: ScriptTarget) -> None:
    slurm, triton, finished = settings.cluster.kind == "slurm", target.llm_api is None, target.repository is not None
    warn_unread(
        "make scripts",
        {"cluster": settings.cluster, "serving": settings.serving},
        ("cluster", ["hosts"], slurm),
        ("cluster", OF_SLURM, not slurm),
        ("cluster", ["build_minutes"], finished or not slurm),
        ("cluster", ["mounts"], settings.cluster.image is None),
        ("cluster", ["server"], not triton),
        ("cluster", ["python"], finished and not (triton and settings.serving.front)),
        ("serving", ["restarts", "show_log", "tritonserver"], True),
        ("serving", ["startup_timeout_s"], not target.whole),
        ("serving", ["drain_timeout_s"], not triton),
        ("serving", ["server", "multi_gpu"], triton),
        ("serving", not_of_trtllm_serve(time_limit=target.whole), not triton),
    )


def _refuse_unwritable(settings: Settings) -> None:
    if settings.cluster.kind == "none":
        todo = "Add cluster=slurm or cluster=mpi."
        raise UserError("cluster=none needs no scripts.", allowed="Choose one of slurm, mpi.", todo=todo)
    engine = with_setting(settings.engine.name)
    if settings.serving.repository is None and (engine is None or not engine.spans_machines):
        raise UserError(
            f"engine={settings.engine.name} runs in one process on one machine; scripts are for engines of "
            "TensorRT-LLM.",
            todo="Add engine=tensorrt_llm, or a repository of one: serving.repository=/its/folder",
        )


def _target(settings: Settings, machine: Machine, overrides: Sequence[str]) -> ScriptTarget:
    """Return what to build and serve: the repository given, or the one of the configuration."""
    repository, arguments = settings.serving.repository, None
    servers = settings.cluster.prefill + settings.cluster.decode
    if repository is not None:
        served = read_served(repository.absolute())
        if not served.gpu:
            raise UserError(f"'{repository}' runs on the CPU engine, in one process: start it with make serve.")
        label, world, nodes = f"{served.label}-{served.variant}", served.world_size, served.num_nodes
        arguments = served.llm_api
    else:
        # raises if it cannot be built
        planned = make_plan(settings, "repository", Store(settings.paths.store), machine)
        warn(*planned.warnings)
        label = f"{settings.model.label}-{planned.settings.variant.label}"
        build = planned.settings.build  # of an engine that is already built, its own
        world, nodes = build.tp_size * build.pp_size, settings.triton.num_nodes
        stages = [step.node.stage for step in planned.steps]
        arguments = next((stage.arguments for stage in stages if isinstance(stage, ConfigureLlm)), None)
    if servers and arguments is not None:
        if nodes > 1:
            raise UserError(
                f"triton.num_nodes={nodes} spreads one server over nodes, but each server of "
                f"cluster.prefill={settings.cluster.prefill} and cluster.decode={settings.cluster.decode} has one.",
                todo="Set triton.num_nodes=1" + (", and write the repository again." if repository else "."),
            )
        nodes = servers
    workers = min(world, settings.hardware.gpus_per_server or world)
    return ScriptTarget(
        label=label,
        world_size=world,
        num_nodes=nodes,
        words=tuple(word for word in overrides if not word.lstrip("+~").startswith(OWN)),
        workers=workers if settings.build.workers == 1 and workers > 1 and arguments is None else None,
        build_gpus=max(workers, settings.build.workers) if arguments is None else 1,
        repository=repository.absolute() if repository else None,
        folder=settings.cluster.folder.absolute() / label,
        cwd=Path.cwd(),
        python=settings.cluster.python or ("python3" if settings.cluster.image else sys.executable),
        store=settings.paths.store.absolute(),
        whole=servers > 0 and arguments is not None,
        llm_api=arguments,
        slo=settings.benchmark.slo.to_slo(),
    )


def _faults(settings: Settings, target: ScriptTarget) -> Iterator[Fault]:
    """Find faults that neither plan nor repository finds: too many ranks per server, modes that need a single node."""
    cluster = settings.cluster
    if cluster.disaggregated and target.llm_api is None:
        yield Fault(
            f"cluster.prefill={cluster.prefill} and cluster.decode={cluster.decode} are servers of the LLM API.",
            todo="Use engine=tensorrt_llm_llmapi, or leave them out.",
        )
    most = settings.hardware.gpus_per_server
    if most and target.ranks_per_node > most:
        yield Fault(
            f"{target.ranks_per_node} ranks on a node need {target.ranks_per_node} GPUs; a server with "
            f"hardware={settings.hardware.name} has {most}.",
            todo=f"Set triton.num_nodes={-(-target.world_size // most)}.",
        )
    if target.llm_api is None:
        yield from leader_faults(settings.serving, target.num_nodes)
    else:
        yield from key_faults(settings.serving)
        yield from beam_faults(target.llm_api, cluster)
    if cluster.kind == "mpi" and len(cluster.hosts) != target.num_nodes:
        yield Fault(
            f"cluster.hosts names {count(len(cluster.hosts), 'machine')}; the server needs {target.num_nodes}.",
            todo="Name one host per node: 'cluster.hosts=[gpu1,gpu2]', and set triton.num_nodes.",
        )
    if cluster.kind == "mpi" and cluster.image is not None:
        yield Fault("cluster.image is for Slurm with Pyxis.", todo="Run mpirun inside the containers instead.")


def _say(settings: Settings, target: ScriptTarget, *, changed: bool) -> None:
    slurm = settings.cluster.kind == "slurm"
    run, suffix = ("sbatch", "sbatch") if slurm else ("bash", "sh")
    folder = relative_to_cwd(target.folder)
    nodes = f"{target.num_nodes} nodes" if target.num_nodes > 1 else "one node"
    ranks = target.world_size * (target.num_nodes if target.whole else 1)
    tell(f"{target.label}: {count(ranks, 'rank')} on {nodes}, {count(target.ranks_per_node, 'GPU')} each")
    say(f"{'written' if changed else 'unchanged'}: {folder} (not run here)")
    if target.repository is None:
        say(f"  {run} {folder}/build.{suffix}")
    say(f"  {run} {folder}/serve.{suffix}")
    if target.num_nodes > 1 and settings.serving.loopback:
        tell("note: the server listens on its first node only; serving.host=0.0.0.0 lets other machines in")
