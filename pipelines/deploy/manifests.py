"""`make manifests`: find the repository, write the files, and say what else the cluster needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.deploy.deployment import ClusterDeployment, deployment
from pipelines.deploy.facts import RepositoryFacts, read_served
from pipelines.deploy.kustomize import files
from pipelines.deploy.output import write_folder
from pipelines.deploy.storage import claim_name
from pipelines.domain.errors import Fault, UserError
from pipelines.domain.units import show_bytes, show_seconds
from pipelines.engines.registry import with_setting
from pipelines.host.machine import Machine
from pipelines.host.paths import check_folders, relative_to_cwd
from pipelines.host.screen import say
from pipelines.plan.plan import make_plan
from pipelines.settings.root import Settings
from pipelines.store.store import Store


def write_manifests(settings: Settings, machine: Machine, overrides: Sequence[str]) -> Path:
    """Write Kustomize files for the repository of a configuration.

    Args:
        settings: the configuration.
        machine: facts of this machine, for the plan.
        overrides: as given, for the command that builds a missing repository.

    Returns:
        the overlay, for `kubectl apply -k`.

    Raises:
        UserError: there is no repository yet, or it cannot be deployed like this.
    """
    check_folders({"manifests.folder": settings.manifests.folder})
    served = read_served(_repository(settings, machine, overrides))
    if faults := _faults(settings, served):
        raise UserError.of(faults)
    deployed = deployment(
        served, settings.manifests, settings.serving, settings.image, compute_capability=settings.hardware.sm
    )
    folder = settings.manifests.folder.absolute() / deployed.name
    changed = write_folder(folder, files(deployed), command="make manifests", setting="manifests.folder")
    overlay = folder / "overlays" / served.kind
    _say(deployed, overlay, changed=changed)
    return overlay


def _repository(settings: Settings, machine: Machine, overrides: Sequence[str]) -> Path:
    """Return the repository given, or the finished one that the plan finds."""
    if settings.serving.repository is not None:
        return settings.serving.repository.absolute()
    step = make_plan(settings, "repository", Store(settings.paths.store), machine).steps[-1]
    if step.artifact is None:
        words = [word for word in overrides if not word.lstrip("+~").startswith(("manifests", "image"))]
        raise UserError(
            f"There is no repository of {step.node.label} yet ({step.why}).",
            todo="Name an existing one (serving.repository=/its/folder), or make it:",
            command=["make", "repository", *words],
        )
    return step.artifact.path


def _faults(settings: Settings, served: RepositoryFacts) -> list[Fault]:
    """Find settings that work on one machine but not in a pod."""
    serving, faults = settings.serving, []
    if serving.chat_template is not None:
        faults.append(
            Fault(
                f"serving.chat_template='{serving.chat_template}' is a file of this machine, which no pod has.",
                todo="Put the template into the tokenizer (chat_template) and write the repository again.",
            )
        )
    if served.kind == "multinode" and serving.multi_gpu != "leader":
        faults.append(
            Fault(
                f"serving.multi_gpu={serving.multi_gpu} spawns ranks on one node; this server spans "
                f"{served.num_nodes}.",
                todo="Set serving.multi_gpu=leader.",
            )
        )
    asked = with_setting(settings.engine.name)
    if asked is not None and not asked.needs_gpu and served.gpu:
        faults.append(Fault(f"engine={asked.setting} was given, but the repository runs on TensorRT-LLM."))
    return faults


def _say(deployed: ClusterDeployment, overlay: Path, *, changed: bool) -> None:
    """Print what was decided, and the next commands."""
    served, sizes, settings = deployed.served, deployed.sizes, deployed.settings
    say(f"repository: {served.folder} ({served.label}, {served.variant}, {show_bytes(served.size_bytes)})")
    gpus = f"{served.gpus_per_node} GPU, " if served.gpu else ""
    pods = f"{served.num_nodes} nodes, each " if served.num_nodes > 1 else ""
    shm = f"{sizes.shm_mib} MiB of it /dev/shm"
    say(f"one server: {pods}{gpus}{sizes.cpus} CPUs, {show_bytes(sizes.memory_mib * 2**20)} of memory, {shm}")
    start = f"about {show_seconds(sizes.startup_s)} to start, {show_seconds(sizes.startup_limit_s)} at most"
    say(f"            {start}; up to {show_seconds(sizes.drain_s)} to drain")
    if served.gpu and deployed.compute_capability is None:
        say("note: add hardware=... to select nodes with the GPU that the engine was built for")
    say(f"\n{'written' if changed else 'unchanged'}: {relative_to_cwd(overlay.parent.parent)}")
    say("Before the first start:")
    if settings.storage == "claim":
        say(f"  - copy the repository into the claim {claim_name(deployed)} (docs/deploy.md)")
    for secret, keys in _secrets(deployed).items():
        say(f"  - Secret {secret}: {keys}")
    if deployed.autoscaled:
        say(f"  - give {relative_to_cwd(overlay.parent.parent / 'prometheus-adapter.yaml')} to prometheus-adapter")
    say(f"Then: kubectl apply -k {relative_to_cwd(overlay)}")


def _secrets(deployed: ClusterDeployment) -> dict[str, str]:
    """Return the Secrets that must exist, and their content."""
    settings = deployed.settings
    found = {
        settings.image_pull_secret: "of type kubernetes.io/dockerconfigjson",
        settings.fetch.secret: "variables of the fetch container",
        settings.hf_token_secret: "key `token`, the Hub's",
        deployed.ssh_secret if deployed.served.kind == "multinode" else None: "ssh keys of the group (docs/deploy.md)",
    }
    return {name: what for name, what in found.items() if name is not None}
