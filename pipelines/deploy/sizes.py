"""Compute the resources of one pod from the repository's sizes; assumed values are constants marked as such."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelines.deploy.facts import RepositoryFacts
from pipelines.domain.units import GIB, MIB
from pipelines.serving.process import EXIT_GRACE_S
from pipelines.settings.manifests import ManifestSettings
from pipelines.settings.serving import ServingSettings

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
    startup = START_BASE_S + math.ceil(served.size_bytes / (settings.read_mib_per_s * MIB))
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
        grace_s=settings.pre_stop_s + drain + math.ceil(EXIT_GRACE_S) + 5,
        claim_gib=math.ceil(1.2 * served.size_bytes / GIB),
    )
