"""How much of a node one pod asks for, from the repository's own sizes; what is assumed is a constant and says so."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelines.deploy.facts import RepositoryFacts
from pipelines.domain.units import GIB, MIB
from pipelines.serving.process import EXIT_GRACE_S
from pipelines.settings.manifests import ManifestSettings
from pipelines.settings.serving import ServingSettings

CPU_PROGRAMS_BYTES = 2 * GIB
"""tritonserver, three python models and `make serve`: 0.49 GiB were measured with a model of 3 MB under 64 requests."""
GPU_PROGRAMS_BYTES = 8 * GIB
"""The same for each GPU, with CUDA, TensorRT and NCCL in the process (assumed)."""
CPU_SHM_BYTES = GIB // 4
"""Triton's python backend: 1 MiB for each model instance (measured, 64 requests), more for large tensors."""
GPU_SHM_BYTES = GIB
"""For each GPU: NCCL's buffers between processes, and those of the python backend (assumed)."""
START_BASE_S = 120
"""From the container's start to the first byte of the engine, with room for CUDA and the python models (assumed)."""
PROBE_S = 10
LONGEST_POLICY_S, LONGEST_WINDOW_S = 1800, 3600
"""What Kubernetes allows in the behaviour of an HPA."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one pod.

    Attributes:
        cpus: cores asked for; there is no upper limit, since the engine's threads are not cut to one.
        memory_mib: memory, asked for and limited, with /dev/shm.
        shm_mib: of that, /dev/shm.
        startup_s: from start to ready, as far as sizes tell; what the HPA reckons with.
        startup_limit_s: when a start counts as failed: serving.startup_timeout_s, or longer where sizes ask for it.
        drain_s: how long running requests may take when it ends.
        grace_s: from SIGTERM to SIGKILL.
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
        """No second server is added before the first could help."""
        return min(self.startup_s, LONGEST_POLICY_S)

    @property
    def scale_down_s(self) -> int:
        """A server that took long to start is not given away for a short calm."""
        return min(max(300, 2 * self.startup_s), LONGEST_WINDOW_S)


def sizes(served: RepositoryFacts, settings: ManifestSettings, serving: ServingSettings) -> Sizes:
    """Compute what was not given.

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
    startup = START_BASE_S + math.ceil(served.size_bytes / (settings.read_mib_per_s * MIB))
    if settings.fetch.words is not None:
        startup *= 2  # not of the same container, but the HPA waits for both
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
        grace_s=settings.pre_stop_s + drain + math.ceil(EXIT_GRACE_S) + 5,
        claim_gib=math.ceil(1.2 * served.size_bytes / GIB),
    )
