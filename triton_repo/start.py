"""The commands that start a server on a repository, for repository.json.

Source: `scripts/launch_triton_server.py` of TensorRT-LLM's Triton backend. All run inside the repository's folder,
against which the C++ backend resolves its relative paths.
"""

from __future__ import annotations

import shlex
from typing import Any

from pipelines.engines.description import ServerBackend
from pipelines.settings.triton import TritonSettings
from triton_repo.spec import RepositorySpec
from triton_repo.tensors import BLS, DRAFT, ENCODERS, PREPROCESSING, TENSORRT_LLM

SERVER = ("tritonserver", "--model-repository=.", "--disable-auto-complete-config")
MPIRUN = ("mpirun", "--allow-run-as-root")
OF_NVIDIA = {
    PREPROCESSING: "/app/all_models/inflight_batcher_llm",
    BLS: "/app/all_models/inflight_batcher_llm",
    ENCODERS: "/app/all_models/multimodal",
}
"""Models that use NVIDIA's code for images -> path of that code in their container."""
LLMAPI_SOURCES = "/app/all_models/llmapi/tensorrt_llm/1"
"""Where NVIDIA's container keeps model.py and helpers.py of the LLM API, which only they may distribute."""


def start_commands(settings: TritonSettings, spec: RepositorySpec) -> dict[str, Any]:
    """Return every way to start this repository: mode -> one shell line."""
    if spec.engine.server is ServerBackend.PYTHON:
        lines = {"one_process": _line({}, [*SERVER, "--backend-directory=BACKENDS"])}
        needs = (
            "BACKENDS: a folder with Triton's python backend and the stub of this Python; `make serve` prepares one."
        )
    elif spec.engine.server is ServerBackend.LLM_API:
        lines = {"one_process": f"cp {LLMAPI_SOURCES}/*.py {TENSORRT_LLM}/1/ && {_line({}, SERVER)}"}
        needs = "a Triton with TensorRT-LLM 1.3 or later (none is released)."
    else:
        models = [TENSORRT_LLM] if spec.num_draft_tokens is None else [TENSORRT_LLM, DRAFT]
        lines = _tensorrt_llm(settings, spec.world_size, models)
        needs = "NVIDIA's Triton container with the TensorRT-LLM that built the engine."
    if spec.images is not None:
        lines = {name: f"{_code_of_nvidia()} && {line}" for name, line in lines.items()}
    return {"inside": "the folder of this file", "needs": needs, "commands": lines}


def _code_of_nvidia() -> str:
    """Return the commands to run once in NVIDIA's container, which has the Python models for images."""
    return " && ".join(f"cp -r {source}/{name}/1/. {name}/1/" for name, source in OF_NVIDIA.items())


def _tensorrt_llm(settings: TritonSettings, world_size: int, models: list[str]) -> dict[str, str]:
    """Return the commands for one process per rank (leader), or one that spawns the ranks (orchestrator)."""
    if settings.participant_ids is not None:
        env = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0"}
        ranks = 1 + max(rank for group in settings.participant_ids for rank in group)
        return {"orchestrator_without_spawning": _line(env, _ranks(ranks, models))}
    leader = _ranks(world_size, models) if world_size > 1 else [*SERVER]
    found = {"leader": _line({}, leader)}
    if settings.num_nodes == 1:  # spawning works on one machine only
        pools = [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(world_size)]
        spawning = [*SERVER, "--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *pools]
        found["orchestrator"] = _line({"TRTLLM_ORCHESTRATOR": "1"}, spawning)
    return found


def _ranks(count: int, models: list[str]) -> list[str]:
    """Return the ranks: rank 0 serves every model; the others load only models with an engine."""
    command = [*MPIRUN]
    for rank in range(count):
        loaded = [f"--load-model={name}" for name in models]
        helper = [] if rank == 0 else ["--model-control-mode=explicit", *loaded]
        prefix = f"--backend-config=python,shm-region-prefix-name=prefix{rank}_"
        command += ["-n", "1", *SERVER, prefix, *helper, ":"]
    return command


def _line(env: dict[str, str], command: list[str] | tuple[str, ...]) -> str:
    return " ".join([*(f"{name}={value}" for name, value in env.items()), shlex.join(command)])
