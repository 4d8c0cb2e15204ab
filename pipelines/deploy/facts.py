"""Facts that a deployment reads from its repository, so that the user need not state them again."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.deploy.config import ManifestSettings
from pipelines.document.show import count
from pipelines.domain.errors import Fault, UserError
from pipelines.domain.mixture_layers import was_grouped
from pipelines.domain.units import GIB, MIB
from pipelines.engines.registry import ServerBackend, describe
from pipelines.host.files import json_object
from pipelines.host.screen import warn
from pipelines.plan.plan import Plan
from pipelines.predict.performance.limits import engine_sizes
from pipelines.predict.performance.memory import rank_weight_bytes
from pipelines.serving.config import ServingSettings
from pipelines.serving.process import EXIT_GRACE_S
from pipelines.serving.repository import DESCRIPTION
from pipelines.settings.base import Group
from triton_repo.llmapi import BESIDE_THE_ARGUMENTS, MODEL_YAML, read_arguments
from triton_repo.parameters import ENGINE_DIR
from triton_repo.tensors import TENSORRT_LLM

USUAL_KV_BYTES = GIB
"""Default size of the CPU engine's paged KV cache (upper bound)."""

NEEDED = {"flavour", "label", "variant", "world_size", "settings", "engine_version"}

Kind = Literal["cpu", "gpu", "multinode"]


@dataclass(frozen=True, slots=True)
class RepositoryFacts:
    """A model repository, as its own files describe it.

    Attributes:
        folder: name of its folder, which contains the store's key and so identifies the content.
        gpu: whether it runs on TensorRT-LLM.
        world_size: ranks, each with a GPU.
        num_nodes: machines that one server spans.
        kv_bytes: host memory of the KV cache: the CPU engine's pool, or the part a GPU engine offloads.
        threads: of the CPU engine; None takes every core.
        needs_amx: whether the CPU engine was built for processors with AMX.
        llm_api: arguments of the LLM API, which trtllm-serve serves; None for engines that Triton serves.
    """

    folder: str
    label: str
    variant: str
    gpu: bool
    world_size: int
    num_nodes: int
    size_bytes: int
    engine_bytes: int
    engine_version: str
    kv_bytes: int
    threads: int | None = None
    needs_amx: bool = False
    llm_api: Mapping[str, Any] | None = None

    @property
    def kind(self) -> Kind:
        """Name of the overlay for this repository."""
        if not self.gpu:
            return "cpu"
        return "gpu" if self.num_nodes == 1 else "multinode"

    @property
    def gpus_per_node(self) -> int:
        """Ranks of one pod; 0 on the CPU."""
        return self.world_size // self.num_nodes if self.gpu else 0


def read_served(path: Path) -> RepositoryFacts:
    """Read the facts of a repository.

    Raises:
        UserError: it has no description, cannot be deployed, or its ranks cannot be spread over its nodes.
    """
    described = _described(path)
    settings = described["settings"]
    engine, world, nodes = describe(described["flavour"]), int(described["world_size"]), int(settings["num_nodes"])
    llm_api = engine.server is ServerBackend.LLM_API
    _check_spread(world, nodes)
    gpu = engine.needs_gpu
    return RepositoryFacts(
        folder=path.resolve().name,
        label=described["label"],
        variant=described["variant"],
        gpu=gpu,
        world_size=world,
        num_nodes=nodes,
        size_bytes=_size(path),
        engine_bytes=_size(path / "tensorrt_llm" / "1"),
        engine_version=str(described["engine_version"] or "of the image"),
        kv_bytes=int(settings["kv_cache_host_memory_bytes"])
        if gpu
        else _parameter(path, "openvino_kv_cache_bytes") or USUAL_KV_BYTES,
        threads=None if gpu else _parameter(path, "openvino_num_threads"),
        needs_amx=not gpu and was_grouped(json_object(path / ENGINE_DIR / "config.json")),
        llm_api=read_arguments(path / TENSORRT_LLM / "1" / MODEL_YAML, BESIDE_THE_ARGUMENTS) if llm_api else None,
    )


def can_preview(plan: Plan) -> bool:
    """Return whether only a machine with a GPU can make the repository."""
    return plan.deployment.engine.server is ServerBackend.TENSORRTLLM


def planned(plan: Plan) -> RepositoryFacts:
    """Predict the facts of a repository that only a machine with a GPU can make.

    Raises:
        UserError: this machine can make it, the model's sizes are unknown, or the ranks cannot be spread over nodes.
    """
    settings, engine, shape = plan.settings, plan.deployment.engine, plan.deployment.shape
    if not can_preview(plan):
        what = f"manifests.preview=true is for engines that only a GPU builds; engine={engine.setting} is made here."
        raise UserError(what, todo="Leave it out, and make the repository first: make repository")
    if shape is None:
        what = f"manifests.preview=true needs the model's sizes, and those of {settings.model.label} are unknown here."
        raise UserError(what, todo="Download it first: make stage stage.name=download")
    sizes, nodes = engine_sizes(settings, shape), settings.triton.num_nodes
    world = sizes.tp_size * sizes.pp_size
    _check_spread(world, nodes)
    engine_bytes = math.ceil(world * rank_weight_bytes(sizes))
    return RepositoryFacts(
        folder="preview",
        label=settings.model.label,
        variant=plan.deployment.variant.label,
        gpu=True,
        world_size=world,
        num_nodes=nodes,
        size_bytes=engine_bytes,
        engine_bytes=engine_bytes,
        engine_version="of the image",
        kv_bytes=settings.triton.kv_cache_host_memory_bytes,
    )


def _check_spread(world: int, nodes: int) -> None:
    if world % nodes:
        raise UserError(
            f"triton.num_nodes={nodes} does not divide the engine's {count(world, 'rank')}.",
            todo="Every node needs the same number of GPUs: write the repository again with another triton.num_nodes.",
        )


def key_faults(serving: ServingSettings) -> Iterator[Fault]:
    """Find a key that the server of the LLM API would not ask for."""
    if serving.api_key:
        yield Fault("trtllm-serve does not ask for the key of serving.api_key=true.", todo="Leave it out.")


def warn_unread(command: str, groups: Mapping[str, Group], *rows: tuple[str, Iterable[str], bool]) -> None:
    """Name what was given and is not read: a row has a group, fields of it, and whether this deployment leaves them."""
    if given := [f"{name}.{key}" for name, keys, unread in rows if unread for key in groups[name].changed(keys)]:
        warn(f"not read by `{command}` for this deployment: {', '.join(given)}")


def not_of_trtllm_serve(*, time_limit: bool) -> list[str]:
    """Return the settings of `serving` that trtllm-serve has not; what is in front of it may keep the time limit."""
    ours = (*ServingSettings.OF_THE_FRONT, *ServingSettings.OF_TRITON)
    return [key for key in ours if key != "request_timeout_s" or not time_limit]


def leader_faults(serving: ServingSettings, nodes: int) -> Iterator[Fault]:
    """Yield what is wrong with how the ranks of a TensorRT engine over so many nodes are started."""
    if nodes > 1 and serving.multi_gpu != "leader":
        what = f"serving.multi_gpu={serving.multi_gpu} spawns ranks on one node; this server spans {nodes}."
        yield Fault(what, todo="Set serving.multi_gpu=leader.")


def _described(path: Path) -> dict[str, Any]:
    """Read repository.json and check that it has every required key."""
    file = path / DESCRIPTION
    try:
        described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        missing = sorted(NEEDED - set(described))
    except (OSError, ValueError) as error:
        described, missing = {}, [getattr(error, "strerror", None) or str(error)]
    if missing:
        raise UserError(
            f"'{path}' has no complete description: {DESCRIPTION}: {', '.join(missing)}.",
            todo="Give a repository written by this project: make repository, or serving.repository=/its/folder",
        )
    return described


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _parameter(path: Path, name: str) -> int | None:
    """Read a number from the parameters of `tensorrt_llm` in config.pbtxt."""
    text = (path / "tensorrt_llm" / "config.pbtxt").read_text(encoding="utf-8")
    match = re.search(rf'key: "{name}"\s*value \{{\s*string_value: "(\d+)"', text)
    return int(match[1]) if match else None


# Compute the resources of one pod from the repository's sizes; assumed values are constants marked as such.

CPU_PROGRAMS_BYTES = 2 * GIB
"""tritonserver, three Python models and `make serve`: 0.49 GiB measured with a 3 MB model under 64 requests."""
GPU_PROGRAMS_BYTES = 8 * GIB
"""The same for each GPU, with CUDA, TensorRT and NCCL in the process (assumed)."""
CPU_SHM_BYTES = GIB // 4
"""Triton's Python backend: 1 MiB per model instance (measured, 64 requests), more for large tensors."""
GPU_SHM_BYTES = GIB
"""Per GPU: NCCL's buffers between processes, and those of the Python backend (assumed)."""
START_BASE_S = 120
"""From the container's start to the first byte of the engine, including CUDA and the Python models (assumed)."""
READ_BYTES_PER_S = 200 * MIB
"""Read speed of the storage (assumed); what is slower needs a longer `serving.startup_timeout_s`."""
PRE_STOP_S = 5
"""How long a stopping server still accepts requests, until every proxy knows."""
PROBE_S = 10
LONGEST_POLICY_S, LONGEST_WINDOW_S = 1800, 3600
"""Upper bound of Kubernetes for the behaviour of an HPA."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Resources of one pod.

    Attributes:
        cpus: requested cores; there is no limit, since the engine does not adapt its threads to one.
        memory_mib: memory requested and limited, including /dev/shm.
        shm_mib: /dev/shm.
        startup_s: estimated time from start to ready, used by the HPA.
        startup_limit_s: when a start counts as failed: serving.startup_timeout_s, or longer if the sizes require it.
        drain_s: how long running requests may take when it ends.
        claim_gib: of the claim that holds the repository.
    """

    cpus: int
    memory_mib: int
    shm_mib: int
    startup_s: int
    startup_limit_s: int
    drain_s: int
    grace_s: int
    claim_gib: int

    @property
    def scale_up_s(self) -> int:
        """Seconds before another server is added, so that the last one can take effect first."""
        return min(self.startup_s, LONGEST_POLICY_S)

    @property
    def scale_down_s(self) -> int:
        """Seconds of quiet before a server is removed; longer for servers that start slowly."""
        return min(max(300, 2 * self.startup_s), LONGEST_WINDOW_S)


def sizes(served: RepositoryFacts, settings: ManifestSettings, serving: ServingSettings) -> Sizes:
    """Compute the sizes that were not given.

    Memory on the CPU: the programs + the engine twice (as read, and as OpenVINO packs it) + the KV pool + /dev/shm.
    On GPUs: for each rank of the node the programs, its share of the engine (it passes through host memory) and its
    offloaded KV cache, + /dev/shm. A Llama-3-8B in fp8 on one GPU: 8 + 8.5 + 0 + 1 = 17.5 GiB.
    """
    gpus = served.gpus_per_node
    shm = settings.shm_gib * GIB if settings.shm_gib else (gpus * GPU_SHM_BYTES if gpus else CPU_SHM_BYTES)
    if gpus:
        memory = gpus * (GPU_PROGRAMS_BYTES + served.engine_bytes / served.world_size + served.kv_bytes)
    else:
        memory = CPU_PROGRAMS_BYTES + 2 * served.engine_bytes + served.kv_bytes
    memory = settings.memory_gib * GIB if settings.memory_gib else memory + shm
    startup = START_BASE_S + math.ceil(served.size_bytes / READ_BYTES_PER_S)
    if settings.fetch.words is not None:
        startup *= 2  # not in the same container, but the HPA waits for both
    startup = math.ceil(startup / PROBE_S) * PROBE_S
    limit = max(startup, math.ceil(serving.startup_timeout_s / PROBE_S) * PROBE_S)
    drain = serving.drain_timeout_s
    return Sizes(
        cpus=settings.cpus or served.threads or (4 + 2 * gpus if gpus else 4),
        memory_mib=math.ceil(memory / MIB),
        shm_mib=math.ceil(shm / MIB),
        startup_s=startup,
        startup_limit_s=limit,
        drain_s=drain,
        grace_s=PRE_STOP_S + drain + math.ceil(EXIT_GRACE_S) + 5,
        claim_gib=math.ceil(1.2 * served.size_bytes / GIB),
    )
