"""Parse the log of trtllm-build: its steps, sizes and warnings, and why it failed.

Source of the lines: TensorRT-LLM `builder.py`, `commands/build.py`, `plugin/plugin.py` and, for lines that only
earlier versions print, `profiler.py` (`check_gpt_mem_usage`); TensorRT 10's own log.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipelines.domain.units import MIB, show_bytes, show_seconds

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
        found = LINE.match(line)
        if found is None:
            if EXCEPTION.match(line):
                self._exceptions.append(line)
            if version := VERSION.search(line):
                self.version = version.group(1)
                return False, f"TensorRT-LLM {self.version}"
            return False, None
        self._read(found["text"])
        step = any(pattern.search(found["text"]) for pattern in STEPS.values())
        return step, self._note(found["tool"], found["level"], found["text"])

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
            if found := pattern.search(text):
                self.numbers[name] = max(self.numbers.get(name, 0), int(read(found.group(1))))
        if found := RANK_SECONDS.search(text):
            self.rank_seconds.append(_clock(found.group(1)))
        if found := TOTAL_SECONDS.search(text):
            self.total_seconds = _clock(found.group(1))

    def _note(self, tool: str, level: str, text: str) -> str | None:
        if level == "E":
            self._errors.append(text)
            return f"error: {text}"
        if level == "W":
            return self._warning(tool, text)
        if RANK_SECONDS.search(text):
            return f"built in {show_seconds(self.rank_seconds[-1])}{self._sizes()}"
        return None

    def _warning(self, tool: str, text: str) -> str | None:
        """Keep TensorRT-LLM's warnings, which are about options; TensorRT's own are about its internals."""
        text = text.strip()
        if tool != "TRT-LLM" or text in self.warnings or EXPECTED_WARNINGS.search(text):
            return None
        self.warnings.append(text)
        return f"warning: {text}"

    def _sizes(self) -> str:
        words = {"weights_bytes": "weights", "activation_bytes": "activations"}
        known = [f"{word} {show_bytes(self.numbers[name])}" for name, word in words.items() if name in self.numbers]
        return f": {', '.join(known)}" if known else ""
