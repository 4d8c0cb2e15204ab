"""The exact trtllm-build command: the limits, and every option that differs from trtllm-build's default.

INT8 and INT4 weight-only need no option: the checkpoint's config.json specifies W8A16 or W4A16 and the checkpoint
holds 16-bit weights, which trtllm-build quantizes (TensorRT-LLM 1.2 `modeling_utils.py`, `preprocess_weights`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipelines.engines.port import BuildLimits
from pipelines.engines.tensorrt_llm.options import FLAG, LIST, BuildOption, options
from pipelines.settings.build import DECIDED, BuildSettings

PROGRAM = "trtllm-build"
ALWAYS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")
"""Limits, which are passed even if they are the defaults, so that a log shows them."""
NO_BYTES = ("workers", "log_level", "monitor_memory")
"""Options that affect how a build runs but not its output."""

Part = tuple[str, ...]
"""One option with its values."""


@dataclass(frozen=True, slots=True)
class BuildPaths:
    """Paths that a build reads and writes.

    Attributes:
        checkpoint: folder of the TensorRT-LLM checkpoint.
        output: folder of the engine.
        timing_in: timing cache to start from; None if there is none yet.
        timing_out: where to write the timing cache.
    """

    checkpoint: str
    output: str
    timing_in: str | None
    timing_out: str


def command(build: BuildSettings, limits: BuildLimits, places: BuildPaths) -> list[Part]:
    """Return the command in parts of one option each; the first is the program."""
    parts: list[Part] = [(PROGRAM,), ("--checkpoint_dir", places.checkpoint), ("--output_dir", places.output)]
    if places.timing_in is not None:
        parts.append(("--input_timing_cache", places.timing_in))
    parts.append(("--output_timing_cache", places.timing_out))
    given = asdict(limits)
    for option in options():
        if option.key in DECIDED:
            continue
        value = given.get(option.key, getattr(build, option.key))
        if option.key in ALWAYS or value != option.default:
            parts.append(_part(option, value))
    return parts


def identity(build: BuildSettings) -> dict[str, Any]:
    """Return what determines the engine's bytes: the limits, and the options that differ from the defaults."""
    chosen = build.model_dump(mode="json")
    changed = [option for option in options() if chosen.get(option.key) != option.default]
    kept = {option.key for option in changed} - set(NO_BYTES) - set(DECIDED) | {*ALWAYS, "tokens_per_block"}
    return {key: chosen[key] for key in sorted(kept)}


def _part(option: BuildOption, value: Any) -> Part:
    if option.type == FLAG:
        return (option.name,)
    if option.type == LIST:
        return (option.name, *map(str, value))
    return (option.name, str(value))
