"""Open engine folders: the contents of one, and the OpenVINO properties to run it with."""

import ctypes
import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

import openvino as ov

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, KvFormat
from pipelines.domain.mixture_layers import was_grouped
from pipelines.domain.units import MIB
from pipelines.engines.config import OpenVinoSettings
from pipelines.engines.openvino import memory
from pipelines.engines.openvino.build import CONFIG_FILE, FLAVOUR, HEAD_PRECISION, MODEL_FILE
from pipelines.engines.openvino.lora import LoraAdapter, apply_adapter
from pipelines.engines.openvino.memory import (
    KV_BLOCK_TOKENS,
    Eviction,
    eviction,
    inference_precision,
    least_window,
    nearest_window,
    rounds_activations,
    usual_kv_precision,
)
from pipelines.engines.openvino.prompt_table import mappings
from pipelines.engines.port import BuildLimits
from pipelines.host.lifetimes import repeated
from pipelines.host.machine import int8_saturates, trim_heap
from pipelines.settings.base import Positive

# Take back the signal stack that OpenVINO's CPU plugin gives the thread that loads it.
#
# With AMX, the plugin installs an alternate signal stack and frees it when it is unloaded. Unless the stack is removed
# first, the next signal is written to freed memory: Ctrl-C then ends in SIGSEGV. The ordinary stack is large enough.

SS_DISABLE = 2
"""From <signal.h> of Linux."""


class SignalStack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def take_back_signal_stack() -> None:
    """Let signals to this thread use its ordinary stack."""
    ctypes.CDLL(None).sigaltstack(ctypes.byref(SignalStack(None, SS_DISABLE, 0)), None)


# Pages of an engine's weights file that stay resident although the plugin has its own copies of the weights.
#
# The plugin maps the file and packs each weight when it is first multiplied. The pages that it read for that stay in
# the process, as much again as the model, until the kernel needs memory; later only the embedding's rows are read. The
# mapping cannot be written to, so its pages are those of the file, and a dropped one is read again on use.

INTERVAL_S = 0.02
"""Time between two drops while weights are packed, at about 1 GB/s: what is resident in between is 20 MB."""
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def drop_pages(file: Path) -> int:
    """Drop the resident pages of a file's read-only mappings, and return their bytes; locked pages stay."""
    dropped, name = 0, str(file.resolve())
    for start, stop, permissions, _, path in mappings():
        ours = path == name and "w" not in permissions  # pages that cannot have changed
        if ours and _libc.madvise(start, stop - start, mmap.MADV_DONTNEED) == 0:
            dropped += stop - start
    return dropped


# Huge pages for the packed weights.
#
# Every token reads all weights, in pages of 4 KiB more of them than the processor has translations for. The kernel
# gives the plugin's allocations no huge pages unless it is asked to.

HUGE_PAGE = 2 * MIB
MADV_COLLAPSE = 25
"""From <linux/mman.h>, since Linux 6.1: gather resident pages into a huge one now."""
WITHOUT_FILE = ("", "[heap]")


def use_huge_pages() -> int:
    """Gather this process's own memory into huge pages where all of one is resident; return their bytes.

    Nothing becomes resident that was not, such as unused blocks of the KV cache. A kernel that cannot do it, or has no
    huge page free, leaves the pages as they are.
    """
    trim_heap()
    gathered, small = 0, ctypes.create_string_buffer(HUGE_PAGE // mmap.PAGESIZE)
    for start, stop, permissions, _, path in mappings():
        if "w" not in permissions or path not in WITHOUT_FILE:
            continue
        for page in range(-(-start // HUGE_PAGE) * HUGE_PAGE, stop - HUGE_PAGE + 1, HUGE_PAGE):
            resident = _libc.mincore(page, HUGE_PAGE, small) == 0 and all(byte & 1 for byte in small.raw)
            if resident and _libc.madvise(page, HUGE_PAGE, MADV_COLLAPSE) == 0:
                gathered += HUGE_PAGE
    return gathered


# Run-time options of the OpenVINO engine; none of them affects what is built.


class OpenVinoOptions(OpenVinoSettings):
    """The settings under `engine.openvino`, and settings of other groups that affect how the engine runs.

    Attributes:
        enable_prefix_caching: reuse KV blocks of equal prompt prefixes (TensorRT-LLM: enable_kv_cache_reuse).
        enable_chunked_context: split prompts longer than max_num_tokens over several iterations.
        attention_window: tokens of a sequence that the KV cache keeps while it generates (TensorRT-LLM:
            max_attention_window_size); None means all.
        sink_tokens: how many of these are the first tokens, which always stay (TensorRT-LLM: sink_token_length).
        draft_dir: engine folder of a draft model, whose tokens this engine verifies; None means none.
        num_draft_tokens: draft tokens per iteration and sequence.
    """

    enable_prefix_caching: bool = True
    enable_chunked_context: bool = False
    attention_window: int | None = None
    sink_tokens: int = 0
    draft_dir: Path | None = None
    num_draft_tokens: Positive = 4

    def eviction(self, max_seq_len: int) -> Eviction | None:
        """Return which tokens of a sequence the KV cache keeps while it generates, or None if nothing is ever dropped.

        TensorRT-LLM drops the oldest token after the sinks; openvino_genai drops whole blocks, keeps at least one block
        of sinks, and chooses among the oldest blocks after them by the attention they received.

        Raises:
            UserError: the engine cannot keep exactly this many tokens, or not with shared prefixes or a draft model.
        """
        window, sinks = self.attention_window, self.sink_tokens
        if window is None or window >= max_seq_len:
            if sinks and window is None:
                raise UserError(
                    f"sink_token_length={sinks} needs max_attention_window_size.",
                    todo="Set both or neither.",
                )
            return None
        works = nearest_window(window, sinks)
        if works != window:
            raise UserError(
                f"max_attention_window_size={window} with sink_token_length={sinks} is not supported by the CPU"
                " engine.",
                allowed=f"It must be a multiple of {KV_BLOCK_TOKENS}, at least {least_window(sinks)}: whole KV blocks"
                " are dropped.",
                todo=f"Set {works}.",
            )
        if self.enable_prefix_caching:
            raise UserError(
                f"max_attention_window_size={window} together with KV reuse is not supported by the CPU engine:"
                " openvino_genai 2026.4 frees dropped blocks twice when they are shared.",
                todo="Set kv_cache.enable_block_reuse=false (enable_kv_cache_reuse of the model tensorrt_llm).",
            )
        if self.draft_dir is not None:
            raise UserError(
                f"max_attention_window_size={window} together with a draft model is not supported by the CPU engine.",
                todo="Leave one of the two out.",
            )
        return eviction(window, sinks)


USUAL_GROUP = 128
"""Activations that share a scale: of the sizes that lose no accuracy the fastest (docs/benchmarks.md)."""

FIRST_TOKENS = 2
"""Tokens of the first inference. The layout of weights that the plugin chooses for two serves any number but one; after
a first inference of 16 it packed the linears a second time (float32, AVX2)."""


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """An engine folder of OpenVINO that has been read.

    Attributes:
        config: the model, as described in the checkpoint.
        adapter: LoRA adapter to apply when the model is loaded, or None.
        int8_head: whether its output head was rounded to INT8.
        grouped_experts: whether one product is for all experts.
    """

    path: Path
    config: CheckpointConfig
    limits: BuildLimits
    adapter: LoraAdapter | None = None
    int8_head: bool = False
    grouped_experts: bool = False

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read config.json of an engine folder.

        Raises:
            UserError: the folder is not an OpenVINO engine, or is incomplete.
        """
        file = path / CONFIG_FILE
        if not file.is_file() or not (path / MODEL_FILE).is_file():
            raise UserError(
                f"{path} is not an OpenVINO engine: it lacks {CONFIG_FILE} or {MODEL_FILE}.",
                todo="Rebuild the engine.",
            )
        raw = json.loads(file.read_text(encoding="utf-8"))
        own = raw.get("engine", {})
        flavour = own.get("flavour")
        if flavour != FLAVOUR:
            raise UserError(f"{file} describes an engine built with engine={flavour}, not with engine={FLAVOUR}.")
        config = CheckpointConfig.parse(raw["pretrained_config"], str(file), path)
        names = {field.name for field in fields(BuildLimits)}
        limits = BuildLimits(**{key: value for key, value in raw["build_config"].items() if key in names})
        form = {"int8_head": own.get(HEAD_PRECISION) == "int8", "grouped_experts": was_grouped(raw)}
        return cls(path, config, limits, **form)

    def read_model(self) -> ov.Model:
        """Read the graph and apply its adapter."""
        model = ov.Core().read_model(self.path / MODEL_FILE)
        if self.adapter is not None:
            apply_adapter(model, self.adapter, self.config)
        return model

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Compile and run for the first time in here: the plugin then makes its copies of the weights.

        The pages of the mapped file are kept out of memory while weights are packed, and dropped at the end. The copies
        are then moved to huge pages.
        """
        weights = (self.path / MODEL_FILE).with_suffix(".bin")
        with repeated(partial(drop_pages, weights), INTERVAL_S, "weights dropped"):
            try:
                yield
                use_huge_pages()
            finally:
                take_back_signal_stack()


def kv_precision(config: CheckpointConfig, options: OpenVinoOptions) -> str:
    """Return the storage type of the paged KV cache; see `OpenVinoOptions.kv_cache_precision`."""
    if options.kv_cache_precision != "auto":
        return options.kv_cache_precision
    return usual_kv_precision(options) if config.kv_format is KvFormat.AUTO else "u8"


def dynamic_quantization(config: CheckpointConfig, options: OpenVinoOptions) -> int:
    """Return how many activations share a dynamic INT8 scale, 0 for none; see `OpenVinoOptions.dynamic_quantization`.

    Formats that quantize activations do so in the graph, with the checkpoint's scales; and not every processor does it.
    """
    chosen = options.dynamic_quantization
    weight_only = all(FORMATS[qformat].weight_only for qformat in config.qformats)
    if chosen == "off" or not weight_only or not rounds_activations(options):
        return 0
    if chosen == "auto":
        return USUAL_GROUP if options.inference_precision == "auto" else 0
    return int(chosen)


def arithmetic(folder: EngineFolder, options: OpenVinoOptions) -> str:
    """Return the type of the arithmetic in words, e.g. "bf16, activations rounded to INT8 in groups of 128"."""
    group = dynamic_quantization(folder.config, options)
    rounded = f", activations rounded to INT8 in groups of {group}" if group else ""
    return inference_precision(options) + rounded + (", head in INT8" if folder.int8_head else "")


def properties(config: CheckpointConfig, options: OpenVinoOptions, kv_cache: str) -> dict[str, Any]:
    """Return the CPU plugin's properties."""
    chosen: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": inference_precision(options),
        "KV_CACHE_PRECISION": kv_cache,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(dynamic_quantization(config, options)),
        "CPU_RUNTIME_CACHE_CAPACITY": str(memory.KERNEL_CACHE),
    }
    if int8_saturates() and any(FORMATS[qformat].activation == "int8" for qformat in config.qformats):
        chosen["LP_TRANSFORMS_MODE"] = False  # products of rounded activations in float32, as the checkpoint says
    if options.num_threads is not None:
        chosen["INFERENCE_NUM_THREADS"] = options.num_threads
    return chosen


def kv_block_bytes(config: CheckpointConfig, precision: str) -> int:
    """Return the size of one block of the paged KV cache, bytes."""
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    return memory.kv_block_bytes(layers, heads, config.head_size, precision=precision)


def kv_blocks(folder: EngineFolder, options: OpenVinoOptions) -> int:
    """Return how many blocks the paged KV cache has; see `OpenVinoOptions.kv_cache_bytes`."""
    size = kv_block_bytes(folder.config, kv_precision(folder.config, options))
    return memory.kv_blocks(size, folder.limits.max_seq_len, options.kv_cache_bytes)


def check_request(folder: EngineFolder, options: OpenVinoOptions, length: int, new_tokens: int) -> None:
    """Reject a generation request beyond the limits of the engine.

    Raises:
        UserError: naming the limit, the length and what to change.
    """
    limits = folder.limits
    if length < 1:
        raise UserError("A prompt has no tokens.", allowed="Every prompt needs at least one.")
    if length > limits.max_input_len:
        raise UserError(
            f"A prompt has {length} tokens; the engine was built with max_input_len={limits.max_input_len}.",
            todo="Shorten the prompt or build with a larger max_input_len.",
        )
    check_length(folder, length + new_tokens, new_tokens)
    if length > limits.max_num_tokens and not options.enable_chunked_context:
        raise UserError(
            f"A prompt has {length} tokens; the engine was built with max_num_tokens={limits.max_num_tokens}.",
            todo="Set runtime.enable_chunked_context=true or build with a larger max_num_tokens.",
        )


def check_length(folder: EngineFolder, tokens: int, new_tokens: int = 0) -> None:
    """Reject a sequence longer than max_seq_len.

    Raises:
        UserError: naming the length and max_seq_len.
    """
    if tokens > folder.limits.max_seq_len:
        raise UserError(
            f"A sequence would have {tokens} tokens{f', {new_tokens} of them new' if new_tokens else ''};"
            f" the engine was built with max_seq_len={folder.limits.max_seq_len}.",
            todo=f"{'Ask for fewer new tokens, shorten' if new_tokens else 'Shorten'} the prompt, or build with a"
            " larger max_seq_len.",
        )
