"""`make scripts`: check the split over nodes, write the scripts, and show how to start them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.deploy.facts import read_served
from pipelines.deploy.output import write_folder
from pipelines.deploy.scripts import ScriptTarget, script_files
from pipelines.document.show import count
from pipelines.domain.errors import Fault, UserError
from pipelines.engines.registry import with_setting
from pipelines.host.machine import Machine
from pipelines.host.paths import check_folders, relative_to_cwd
from pipelines.host.screen import say
from pipelines.plan.plan import make_plan
from pipelines.settings.root import Settings
from pipelines.store.store import Store

OWN = ("cluster", "paths.runs")
"""Overrides that the build on a node does not need."""


def write_scripts(settings: Settings, machine: Machine, overrides: Sequence[str]) -> Path:
    """Write scripts that build and serve a configuration on a cluster.

    Args:
        settings: the configuration.
        machine: facts of this machine, for the plan.
        overrides: as given; the build script repeats them.

    Returns:
        the folder of the scripts.

    Raises:
        UserError: there is nothing to write, or the ranks do not fit the nodes.
    """
    if faults := _unwritable(settings):
        raise UserError.of(faults)
    check_folders({"cluster.folder": settings.cluster.folder})
    target = _target(settings, machine, overrides)
    if faults := _faults(settings, target):
        raise UserError.of(faults)
    changed = write_folder(
        target.folder,
        script_files(target, settings.cluster, settings.serving),
        command="make scripts",
        setting="cluster.folder",
    )
    target.runs.mkdir(parents=True, exist_ok=True)  # Slurm does not create the folder of a job's output
    _say(settings, target, changed=changed)
    return target.folder


def _unwritable(settings: Settings) -> list[Fault]:
    if settings.cluster.kind == "none":
        return [
            Fault("cluster=none needs no scripts.", "Choose one of slurm, mpi.", "Add cluster=slurm or cluster=mpi.")
        ]
    engine = with_setting(settings.engine.name)
    if settings.serving.repository is None and (engine is None or not engine.spans_machines):
        return [
            Fault(
                f"engine={settings.engine.name} runs in one process on one machine; scripts are for engines of "
                "TensorRT-LLM.",
                todo="Add engine=tensorrt_llm, or a repository of one: serving.repository=/its/folder",
            )
        ]
    return []


def _target(settings: Settings, machine: Machine, overrides: Sequence[str]) -> ScriptTarget:
    """Return what to build and serve: the repository given, or the one of the configuration."""
    given = settings.serving.repository
    if given is not None:
        served = read_served(given.absolute())
        if not served.gpu:
            raise UserError(f"'{given}' runs on the CPU engine, in one process: start it with make serve.")
        label, world, nodes = f"{served.label}-{served.variant}", served.world_size, served.num_nodes
    else:
        # raises if it cannot be built
        planned = make_plan(settings, "repository", Store(settings.paths.store), machine)
        label = f"{settings.model.label}-{planned.settings.variant}"
        world, nodes = settings.build.tp_size * settings.build.pp_size, settings.triton.num_nodes
    workers = min(world, settings.hardware.gpus_per_server or world)
    return ScriptTarget(
        label=label,
        world_size=world,
        num_nodes=nodes,
        words=tuple(word for word in overrides if not word.lstrip("+~").startswith(OWN)),
        workers=workers if settings.build.workers == 1 and workers > 1 else None,
        build_gpus=max(workers, settings.build.workers),
        repository=given.absolute() if given else None,
        folder=settings.cluster.folder.absolute() / label,
        cwd=Path.cwd(),
        python=settings.cluster.python or ("python3" if settings.cluster.image else sys.executable),
        store=settings.paths.store.absolute(),
    )


def _faults(settings: Settings, target: ScriptTarget) -> list[Fault]:
    """Find faults that neither plan nor repository finds: too many ranks per server, modes that need a single node."""
    faults, serving, cluster = [], settings.serving, settings.cluster
    most = settings.hardware.gpus_per_server
    if most and target.ranks_per_node > most:
        faults.append(
            Fault(
                f"{target.ranks_per_node} ranks on a node need {target.ranks_per_node} GPUs; a server with "
                f"hardware={settings.hardware.name} has {most}.",
                todo=f"Set triton.num_nodes={-(-target.world_size // most)}.",
            )
        )
    if target.num_nodes > 1 and serving.multi_gpu != "leader":
        faults.append(
            Fault(
                f"serving.multi_gpu={serving.multi_gpu} spawns ranks on one node; this server spans "
                f"{target.num_nodes}.",
                todo="Set serving.multi_gpu=leader.",
            )
        )
    if cluster.kind == "mpi" and len(cluster.hosts) != target.num_nodes:
        faults.append(
            Fault(
                f"cluster.hosts names {len(cluster.hosts)} machines; the server needs {target.num_nodes}.",
                todo="Name one host per node: 'cluster.hosts=[gpu1,gpu2]', and set triton.num_nodes.",
            )
        )
    if cluster.kind == "mpi" and cluster.image is not None:
        faults.append(Fault("cluster.image is for Slurm with Pyxis.", todo="Run mpirun inside the containers instead."))
    return faults


def _say(settings: Settings, target: ScriptTarget, *, changed: bool) -> None:
    """Print what was written, and the next commands."""
    slurm = settings.cluster.kind == "slurm"
    run, suffix = ("sbatch", "sbatch") if slurm else ("bash", "sh")
    folder = relative_to_cwd(target.folder)
    nodes = f"{target.num_nodes} nodes" if target.num_nodes > 1 else "one node"
    say(f"{target.label}: {count(target.world_size, 'rank')} on {nodes}, {count(target.ranks_per_node, 'GPU')} each")
    say(f"{'written' if changed else 'unchanged'}: {folder} (not run here)")
    if target.repository is None:
        say(f"  {run} {folder}/build.{suffix}")
    say(f"  {run} {folder}/serve.{suffix}")
    if target.num_nodes > 1 and settings.serving.loopback:
        say("note: the server listens on its first node only; serving.host=0.0.0.0 lets other machines in")
