"""Checkpoint -> engine folder: run trtllm-build, show its progress, and check its output."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.checkpoint.config import CheckpointConfig
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.domain.units import MIB
from pipelines.engines.port import BuildLimits, EngineFacts, OnGpu
from pipelines.engines.tensorrt_llm.command import PROGRAM, BuildPaths, command
from pipelines.engines.tensorrt_llm.folder import BuiltOn, read_back
from pipelines.engines.tensorrt_llm.log import STEPS, BuildLog
from pipelines.host.files import replacing
from pipelines.host.kept import KeptProcess
from pipelines.settings.build import BuildSettings

LOG, TIMING = "trtllm-build.log", ".timing.cache"
POLL_S, STOP_S = 0.2, 10.0
HINTS = (
    (
        r"out of memory|OutOfMemory|MemoryError",
        "Lower build.max_num_tokens or build.max_batch_size, or split the model with build.tp_size.",
    ),
    (r"not supported on SM", "This format does not run on this GPU; `make plan` shows which do."),
    (r"^trtllm-build: error", "This trtllm-build differs from 1.2; `make doctor` compares its --help with ours."),
    (
        r"Unsupported model architecture|unexpected keyword argument",
        "The checkpoint does not match this version of TensorRT-LLM.",
    ),
)
"""Pattern in the line with the cause -> what to do."""


def build_engine(
    checkpoint: Path,
    build: BuildSettings,
    limits: BuildLimits,
    out_dir: Path,
    on_gpu: OnGpu,
    progress: Progress,
) -> EngineFacts:
    """Build every rank of a checkpoint on this machine's GPUs.

    Args:
        checkpoint: TensorRT-LLM checkpoint folder.
        build: options of trtllm-build.
        limits: limits, with max_seq_len filled in.
        out_dir: the engine's folder; it keeps the log.
        on_gpu: this machine's GPU, and folders that outlive the build.
        progress: advanced with each step of each rank.

    Raises:
        UserError: trtllm-build is not installed, failed (its log is kept), or wrote something other than requested.
        OSError: the disk is full.
    """
    config = CheckpointConfig.load(checkpoint)
    program = shutil.which(PROGRAM)
    if program is None:
        raise UserError(f"{PROGRAM} is not on PATH.", todo="Run inside NVIDIA's container: make shell")
    out_dir.mkdir(parents=True, exist_ok=True)
    built_on = BuiltOn.here(on_gpu.gpu, on_gpu.sm or 0.0)
    cache = on_gpu.timing_caches / f"{built_on.file_name}.cache"
    parts = command(build, limits, _places(checkpoint, out_dir, cache))
    log = _run([program, *(word for part in parts[1:] for word in part)], out_dir, config.world_size, on_gpu, progress)
    if faults := read_back(out_dir, build, limits, config):
        _keep_log(out_dir, on_gpu)
        raise UserError.of(faults)
    warm = cache.is_file()
    _keep_timing(out_dir / TIMING, cache)
    built_on.save(out_dir)
    return EngineFacts(
        _engine_bytes(out_dir), {**_details(parts, built_on), "timing_cache_reused": warm, **log.facts()}
    )


def _places(checkpoint: Path, out_dir: Path, cache: Path) -> BuildPaths:
    """Return the build paths, without a timing cache that does not exist yet, as trtllm-build would warn about it."""
    return BuildPaths(str(checkpoint), str(out_dir), str(cache) if cache.is_file() else None, str(out_dir / TIMING))


def _run(words: list[str], out_dir: Path, world_size: int, on_gpu: OnGpu, progress: Progress) -> BuildLog:
    """Run the command to its end; leave no process behind in any case."""
    log, file = BuildLog(), out_dir / LOG
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = KeptProcess(words, env=env, cwd=out_dir, log_file=file)
    try:
        with progress.task(PROGRAM, world_size * len(STEPS), "steps") as advance:
            for line in _lines(file, process):
                step, note = log.feed(line)
                if note:
                    progress.note(note)
                if step:
                    advance(1)
    except BaseException:
        process.stop(STOP_S)
        raise
    if process.wait():
        raise _failure(log, process.describe_exit(), out_dir, on_gpu)
    return log


def _lines(file: Path, process: KeptProcess) -> Iterator[str]:
    """Yield complete lines as they are written, until the process has ended and all are read."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        rest = ""
        while True:
            ended = process.wait(POLL_S) is not None
            *whole, rest = (rest + stream.read()).split("\n")
            yield from whole
            if ended:
                yield rest
                return


def _failure(log: BuildLog, ended: str, out_dir: Path, on_gpu: OnGpu) -> Exception:
    """Return an error that explains the failure, and keep the log."""
    reason = log.failure() or "it printed nothing"
    full = shutil.disk_usage(out_dir).free < MIB  # in that case the log may have stopped before mentioning it
    if full or "No space left on device" in reason:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out_dir))
    kept = _keep_log(out_dir, on_gpu)
    hints = [hint for pattern, hint in HINTS if re.search(pattern, reason)]
    return UserError(
        f"{PROGRAM} failed ({ended}): {reason.rstrip('.')}.",
        allowed=f"Its log: {kept}",
        todo=" ".join(hints),
    )


def _keep_log(out_dir: Path, on_gpu: OnGpu) -> Path:
    """Keep the log of a build whose output is deleted."""
    on_gpu.failed_logs.mkdir(parents=True, exist_ok=True)
    kept = on_gpu.failed_logs / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}-{LOG}"
    shutil.copyfile(out_dir / LOG, kept)
    return kept


def _keep_timing(made: Path, cache: Path) -> None:
    """Replace the timing cache atomically; the new one includes the old one's contents."""
    if not made.is_file():
        return
    with replacing(cache) as fresh:
        shutil.copyfile(made, fresh)
    made.unlink()


def _engine_bytes(out_dir: Path) -> int:
    return sum(path.stat().st_size for path in out_dir.glob("rank*.*"))


def _details(parts: list[tuple[str, ...]], built_on: BuiltOn) -> dict[str, Any]:
    """Return the options as given, without paths."""
    options = {part[0].removeprefix("--"): " ".join(part[1:]) for part in parts[3:] if "timing_cache" not in part[0]}
    return {
        "flavour": "tensorrt_llm",
        "gpu": built_on.gpu,
        "sm": built_on.sm,
        "tensorrt_llm_version": built_on.tensorrt_llm,
        "tensorrt_version": built_on.tensorrt,
        "options": options,
    }
