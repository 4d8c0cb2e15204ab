"""The engine `tensorrt_llm`, as a `port.Engine`."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.domain.errors import UserError, refuse
from pipelines.domain.progress import Progress
from pipelines.domain.units import MIB, show_bytes, show_seconds
from pipelines.engines.port import BuildLimits, EngineFacts, OnGpu, Session
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.engines.tensorrt_llm.folder import PROGRAM, BuildPaths, BuiltOn, command, fit_faults, read_back
from pipelines.host.files import replacing
from pipelines.host.lifetimes import SupervisedProcess

# Parse the log of trtllm-build: its steps, sizes and warnings, and why it failed.
#
# Source of the lines: TensorRT-LLM `builder.py`, `commands/build.py`, `plugin/plugin.py` and, for lines that only
# earlier versions print, `profiler.py` (`check_gpt_mem_usage`); TensorRT 10's own log.

STEPS = {
    "constructed the network": re.compile(r"Total time of constructing network from module object"),
    "loaded the weights": re.compile(r"Total time to initialize the weights in network"),
    "chose the kernels": re.compile(r"Engine generation completed in"),
    "wrote the engine": re.compile(r"Engine serialized\. Total time"),
}
"""Steps of each rank."""

LINE = re.compile(r"^\[(?P<time>[\d/]+-[\d:]+)\] \[(?P<tool>TRT|TRT-LLM)\] \[(?P<level>[A-Z])\] (?P<text>.*)$")
EXCEPTION = re.compile(r"^(?:trtllm-build: error|[A-Za-z_][\w.]*(?:Error|Exception)): .+")
ONLY_A_CONSEQUENCE = "Engine building failed, please check"
EXPECTED_WARNINGS = re.compile(
    "--gather_generation_logits is deprecated"  # printed by every build
    "|Overriding paged_state to False"  # printed for every transformer
    "|opt_num_tokens is not set"
    "|max_input_len is not required and will be ignored"
    "|using freshly created one"  # the first timing cache
    r"|Implicitly setting \w+Config\.\w+ = "  # keys of ModelOpt that TensorRT-LLM keeps without reading them
    # W4A8: the fused linears share one scale
    r"|Provided but not required tensors: \{(?:'[\w.]+\.activation_scaling_factor'(?:, |\}$))+"
)


def _clock(text: str) -> float:
    """Return the seconds of "00:01:15"."""
    hours, minutes, seconds = text.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def _mib(text: str) -> int:
    return round(float(text) * MIB)


ReadNumber = Callable[[str], float]
NUMBERS: tuple[tuple[str, re.Pattern[str], ReadNumber], ...] = (
    ("weights_bytes", re.compile(r"Total Weights Memory: (\d+)"), int),
    ("activation_bytes", re.compile(r"Total Activation Memory: (\d+)"), int),
    ("weights_bytes", re.compile(r"Weights memory size: ([\d.]+) MiB"), _mib),
    ("activation_bytes", re.compile(r"Activation memory size: ([\d.]+) MiB"), _mib),
    ("kv_cache_estimate_bytes", re.compile(r"Max KV Cache memory size: ([\d.]+) MiB"), _mib),
    ("memory_estimate_bytes", re.compile(r"Estimated max memory usage on runtime: ([\d.]+) MiB"), _mib),
    ("peak_gpu_bytes", re.compile(r"Peak memory usage of TRT CPU/GPU memory allocators: .* GPU (\d+) MiB"), _mib),
    (
        "peak_host_bytes",
        re.compile(r"Peak memory usage during Engine building and serialization: CPU: (\d+) MiB"),
        _mib,
    ),
    ("peak_host_bytes", re.compile(r"Build phase peak memory: ([\d.]+) MB"), _mib),
)
"""Fact, line, conversion. The largest rank counts: each must fit into its own GPU or machine."""
RANK_SECONDS = re.compile(r"Total time of building (?!all )[^:]+: (\d+:\d+:\d+)")
TOTAL_SECONDS = re.compile(r"Total time of building all(?: \d+)? engines: (\d+:\d+:\d+)")
VERSION = re.compile(r"TensorRT[- ]LLM version: (\S+)")


@dataclass
class BuildLog:
    """Reads a log line by line.

    Attributes:
        numbers: sizes so far, bytes.
        rank_seconds: seconds of each rank, in the order in which they ended.
        total_seconds: seconds of the whole build, once it has ended.
        version: version of TensorRT-LLM.
        warnings: what the builder changed or questioned, each once.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    rank_seconds: list[float] = field(default_factory=list)
    total_seconds: float | None = None
    version: str | None = None
    warnings: list[str] = field(default_factory=list)
    _errors: list[str] = field(default_factory=list)
    _exceptions: list[str] = field(default_factory=list)
    _last: str = ""

    def feed(self, line: str) -> tuple[bool, str | None]:
        """Process one line.

        Returns:
            whether a rank finished a step, and a message to show to the user now.
        """
        line = line.rstrip()
        if not line:
            return False, None
        self._last = line
        entry = LINE.match(line)
        if entry is None:
            if EXCEPTION.match(line):
                self._exceptions.append(line)
            if version := VERSION.search(line):
                self.version = version.group(1)
                return False, f"TensorRT-LLM {self.version}"
            return False, None
        self._read(entry["text"])
        step = any(pattern.search(entry["text"]) for pattern in STEPS.values())
        return step, self._note(entry["tool"], entry["level"], entry["text"])

    def facts(self) -> dict[str, Any]:
        """Return facts for the manifest, only those that the log contains."""
        facts: dict[str, Any] = dict(self.numbers)
        if self.rank_seconds:
            facts["rank_seconds"] = self.rank_seconds
        if self.total_seconds is not None:
            facts["build_seconds"] = self.total_seconds
        if self.warnings:
            facts["warnings"] = self.warnings
        return facts

    def failure(self) -> str:
        """Return the line with the cause of a failure: the first exception not caused by another, or an error."""
        causes = [line for line in self._exceptions if ONLY_A_CONSEQUENCE not in line]
        return next(iter([*causes, *self._errors, *self._exceptions]), self._last)

    def _read(self, text: str) -> None:
        for name, pattern, read in NUMBERS:
            if match := pattern.search(text):
                self.numbers[name] = max(self.numbers.get(name, 0), int(read(match.group(1))))
        if match := RANK_SECONDS.search(text):
            self.rank_seconds.append(_clock(match.group(1)))
        if match := TOTAL_SECONDS.search(text):
            self.total_seconds = _clock(match.group(1))

    def _note(self, tool: str, level: str, text: str) -> str | None:
        if level == "E":
            self._errors.append(text)
            return f"error: {text}"
        if level == "W":
            # TensorRT-LLM's warnings are about options, TensorRT's own about its internals
            text = text.strip()
            if tool != "TRT-LLM" or text in self.warnings or EXPECTED_WARNINGS.search(text):
                return None
            self.warnings.append(text)
            return f"warning: {text}"
        if RANK_SECONDS.search(text):
            texts = {"weights_bytes": "weights", "activation_bytes": "activations"}
            sizes = [f"{word} {show_bytes(self.numbers[name])}" for name, word in texts.items() if name in self.numbers]
            return f"built in {show_seconds(self.rank_seconds[-1])}" + (f": {', '.join(sizes)}" if sizes else "")
        return None


# Checkpoint -> engine folder: run trtllm-build, show its progress, and check its output.

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
    warm = cache.is_file()  # of a cache that does not exist yet, trtllm-build would warn
    places = BuildPaths(str(checkpoint), str(out_dir), str(cache) if warm else None, str(out_dir / TIMING))
    parts = command(build, limits, places)
    log = _run([program, *(word for part in parts[1:] for word in part)], out_dir, config.world_size, on_gpu, progress)
    if faults := read_back(out_dir, build, limits, config):
        _keep_log(out_dir, on_gpu)
        raise UserError.of(faults)
    if (timing := out_dir / TIMING).is_file():  # it includes the old cache's contents
        with replacing(cache) as fresh:
            shutil.copyfile(timing, fresh)
        timing.unlink()
    built_on.save(out_dir)
    size = sum(path.stat().st_size for path in out_dir.glob("rank*.*"))
    details = {
        "flavour": "tensorrt_llm",
        "gpu": built_on.gpu,
        "sm": built_on.sm,
        "tensorrt_llm_version": built_on.tensorrt_llm,
        "tensorrt_version": built_on.tensorrt,
        # as given, without paths
        "options": {
            part[0].removeprefix("--"): " ".join(part[1:]) for part in parts[3:] if "timing_cache" not in part[0]
        },
    }
    return EngineFacts(size, {**details, "timing_cache_reused": warm, **log.facts()})


def _run(words: list[str], out_dir: Path, world_size: int, on_gpu: OnGpu, progress: Progress) -> BuildLog:
    """Run the command to its end; leave no process behind in any case."""
    log, file = BuildLog(), out_dir / LOG
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = SupervisedProcess(words, env=env, cwd=out_dir, log_file=file)
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


def _lines(file: Path, process: SupervisedProcess) -> Iterator[str]:
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
    reason = log.failure() or "it printed nothing"
    full = shutil.disk_usage(out_dir).free < MIB  # in that case the log may have stopped before mentioning it
    if full or "No space left on device" in reason:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out_dir))
    log_file = _keep_log(out_dir, on_gpu)
    hints = [hint for pattern, hint in HINTS if re.search(pattern, reason)]
    return UserError(
        f"{PROGRAM} failed ({ended}): {reason.rstrip('.')}.",
        allowed=f"Its log: {log_file}",
        todo=" ".join(hints),
    )


def _keep_log(out_dir: Path, on_gpu: OnGpu) -> Path:
    on_gpu.failed_logs.mkdir(parents=True, exist_ok=True)
    log_file = on_gpu.failed_logs / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}-{LOG}"
    shutil.copyfile(out_dir / LOG, log_file)
    return log_file


class TensorRtEngine:
    """TensorRT engines; implements `port.Engine`."""

    def __init__(self, build: BuildSettings | None = None, on_gpu: OnGpu | None = None) -> None:
        """Take trtllm-build's options and this machine's GPU, which are required to build but not to open."""
        self._build, self._on_gpu = build or BuildSettings(), on_gpu

    def build(self, checkpoint: Path, limits: BuildLimits, out_dir: Path, progress: Progress) -> EngineFacts:
        """Build every rank with trtllm-build; see `build.build_engine`.

        Raises:
            UserError: see there; or this machine has no GPU.
        """
        if self._on_gpu is None or self._on_gpu.sm is None:
            raise UserError("engine=tensorrt_llm builds for a GPU, and this machine has none.")
        return build_engine(checkpoint, self._build, limits, out_dir, self._on_gpu, progress)

    def open(self, engine_dir: Path) -> Session:
        """Load an engine with TensorRT-LLM's own runtime.

        Raises:
            UserError: the engine belongs to another GPU or other versions.
        """
        from pipelines.engines.tensorrt_llm.runtime import TensorRtSession

        refuse(fit_faults(engine_dir))
        return TensorRtSession(engine_dir)
