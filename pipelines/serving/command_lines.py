"""Command lines that start a server, as pure functions.

They start in the folder of the models: the Python backend pastes the path of a model into a line for a shell, unquoted.

One process serves a CPU or one GPU. More GPUs: leader mode starts one tritonserver per rank under mpirun, of which
rank 0 loads every model and answers; orchestrator mode starts one, whose backend spawns the ranks. Both follow NVIDIA's
scripts/launch_triton_server.py (tensorrtllm_backend); they need GPUs and are checked here by their text only.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.domain.benchmark import NO_SLO, Slo
from pipelines.serving.config import ServingSettings

# Endpoints that could harm this machine: shared memory, loading and unloading models, log files, traces.
RESTRICTING_FLAGS = ("--http-restricted-api", "--grpc-restricted-protocol")
CLOSED_TO_STRANGERS = "shared-memory,model-repository,trace,logging"
HERE = Path()


@dataclass(frozen=True, slots=True)
class Launch:
    """A command to run."""

    command: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Number of GPUs per model, and the launcher of their processes.

    Attributes:
        world_size: tensor parallel x pipeline parallel.
        mode: "leader" or "orchestrator".
        models: what the ranks above 0 load in leader mode.
        oversubscribe: whether there are more ranks than cores, as mpirun counts them.
    """

    world_size: int = 1
    mode: str = "leader"
    models: Sequence[str] = ("tensorrt_llm",)
    oversubscribe: bool = False


def server_command(
    binary: Path,
    settings: ServingSettings,
    ports: Mapping[str, int],
    *,
    shm_prefix: str,
    repository: Path = HERE,
    backends: Path | None = None,
    ranks: Ranks = Ranks(),
    admin_key: str | None = None,
) -> Launch:
    """Return the command that starts tritonserver.

    Args:
        binary: tritonserver.
        settings: address, time limits, verbosity.
        ports: http_port, grpc_port, metrics_port.
        shm_prefix: first part of the names of the python backend's shared memory.
        repository: folder of the models, if the server does not start in it; a path without blanks or quotes.
        backends: a backend directory; None means the server's own.
        ranks: processes of a model on several GPUs.
        admin_key: opens the restricted endpoints; None means a random key that nobody learns.
    """
    common = _common_flags(repository, settings, ports, backends, admin_key or secrets.token_hex(16))
    verbose = [f"--log-verbose={settings.log_verbose}"] if settings.log_verbose else []
    shm = f"--backend-config=python,shm-region-prefix-name={shm_prefix}"
    if ranks.mode == "orchestrator":  # its front process uses no GPU, so that the spawned ranks have all their memory
        pools = [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(ranks.world_size)]
        pools = ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *pools]
        return Launch((str(binary), *common, shm, *verbose, *pools), {"TRTLLM_ORCHESTRATOR": "1"})
    if ranks.world_size == 1:
        return Launch((str(binary), *common, shm, *verbose), {})
    engine_only = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in ranks.models)]
    command = ["mpirun", "--allow-run-as-root", *(["--oversubscribe"] if ranks.oversubscribe else [])]
    for rank in range(ranks.world_size):
        own = verbose if rank == 0 else engine_only
        command += ["-n", "1", str(binary), *common, f"{shm}{rank}_", *own, ":"]
    return Launch(tuple(command), {})


def front_command(
    python: str, settings: ServingSettings, ports: Mapping[str, int], repository: Path | str, slo: Slo = NO_SLO
) -> list[str]:
    """Return the command that starts the service in front of a tritonserver on the same machine."""
    return [
        *(python, "-m", "pipelines.serving.openai"),
        f"--repository={repository}",
        f"--grpc={settings.local_host}:{ports['grpc_port']}",
        f"--metrics=http://{settings.local_host}:{ports['metrics_port']}/metrics",
        f"--port={ports['openai_port']}",
        *(f"--cors-origin={origin}" for origin in settings.cors_origins),
        *(f"--image-host={host}" for host in settings.image_hosts),
        *(["--api-key"] if settings.api_key else []),
        f"--host={settings.host}",
        f"--drain-timeout-s={settings.drain_timeout_s}",
        f"--max-body-bytes={settings.max_body_bytes}",
        f"--max-prompts={settings.max_prompts}",
        f"--request-timeout-s={settings.request_timeout_s}",
        *([f"--chat-template={settings.chat_template}"] if settings.chat_template else []),
        *(f"--slo-{metric}-ms={limit}" for metric, limit in slo.limits.items()),
    ]


def _common_flags(
    repository: Path, settings: ServingSettings, ports: Mapping[str, int], backends: Path | None, admin_key: str
) -> list[str]:
    flags = [
        f"--model-repository={repository}",
        *([f"--backend-directory={backends}"] if backends else []),
        f"--http-address={settings.triton_host}",
        f"--grpc-address={settings.triton_host}",
        f"--metrics-address={settings.triton_host}",
        f"--http-port={ports['http_port']}",
        f"--grpc-port={ports['grpc_port']}",
        f"--metrics-port={ports['metrics_port']}",
        "--allow-metrics=true",
        # Our configurations are complete; without this flag every Python model starts twice, once just to be queried.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={settings.drain_timeout_s}",
    ]
    if not settings.loopback:
        flags += [f"{flag}={CLOSED_TO_STRANGERS}:admin-key={admin_key}" for flag in RESTRICTING_FLAGS]
    return flags
