"""An engine folder opened: what was built, and the OpenVINO properties to run it with."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import openvino as ov
import openvino_genai as genai

from pipelines.checkpoint.config import CheckpointConfig
from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat
from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.openvino.build import CONFIG_FILE, FLAVOUR, MODEL_FILE
from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.port import BuildLimits

USUAL_REQUESTS = 32
"""Requests of max_seq_len tokens that the paged KV cache has room for when nobody says how large it shall be."""
KV_BLOCK_TOKENS = 32
"""Tokens of one paged KV block on the CPU plugin; not configurable there."""

_ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "u8": 1}
_U8_SCALE_BYTES = 8  # one float32 scale and zero point per token and head


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """A built engine.

    Attributes:
        path: the folder.
        config: the model, as the checkpoint described it.
        limits: what it was built for.
    """

    path: Path
    config: CheckpointConfig
    limits: BuildLimits

    @classmethod
    def load(cls, path: Path) -> EngineFolder:
        """Read config.json of an engine folder.

        Raises:
            UserError: the folder is not an OpenVINO engine, or a part of it is missing.
        """
        file = path / CONFIG_FILE
        if not file.is_file() or not (path / MODEL_FILE).is_file():
            raise UserError(
                f"{path} is not an OpenVINO engine: it lacks {CONFIG_FILE} or {MODEL_FILE}.",
                todo="Build the engine again.",
            )
        raw = json.loads(file.read_text(encoding="utf-8"))
        flavour = raw.get("engine", {}).get("flavour")
        if flavour != FLAVOUR:
            raise UserError(f"{file} belongs to an engine of flavour '{flavour}', not '{FLAVOUR}'.")
        config = CheckpointConfig.parse(raw["pretrained_config"], str(file))
        names = {field.name for field in fields(BuildLimits)}
        limits = BuildLimits(**{key: value for key, value in raw["build_config"].items() if key in names})
        return cls(path, config, limits)


def inference_precision(options: OpenVinoOptions) -> str:
    """Return "f32" or "bf16": what was asked for, or what this CPU does natively."""
    if options.inference_precision != "auto":
        return options.inference_precision
    capabilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "bf16" if "BF16" in capabilities else "f32"


def kv_precision(config: CheckpointConfig, options: OpenVinoOptions) -> str:
    """Return the storage type of the paged KV cache; see `OpenVinoOptions.kv_cache_precision`."""
    if options.kv_cache_precision != "auto":
        return options.kv_cache_precision
    return inference_precision(options) if config.kv_format is KvFormat.AUTO else "u8"


def properties(options: OpenVinoOptions, kv_cache: str) -> dict[str, Any]:
    """Return the CPU plugin's properties.

    Activations are quantized by the graph with the checkpoint's scales or not at all: the plugin's own dynamic
    INT8 activations, on by default for packed weights, are switched off.
    """
    chosen: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": inference_precision(options),
        "KV_CACHE_PRECISION": kv_cache,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    }
    if options.num_threads is not None:
        chosen["INFERENCE_NUM_THREADS"] = options.num_threads
    return chosen


def kv_block_bytes(config: CheckpointConfig, precision: str) -> int:
    """Bytes of one block of the paged KV cache: 2 (K, V) x layers x KV heads x 32 tokens x head bytes.

    Gemma 2B at f32: 2 * 18 * 1 * 32 * 256 * 4 = 1,179,648.
    """
    head_bytes = config.head_size * _ELEMENT_BYTES[precision] + (_U8_SCALE_BYTES if precision == "u8" else 0)
    return 2 * config.num_hidden_layers * config.num_key_value_heads * KV_BLOCK_TOKENS * head_bytes


def kv_blocks(folder: EngineFolder, options: OpenVinoOptions) -> int:
    """Return how many blocks the paged KV cache has; see `OpenVinoOptions.kv_cache_bytes`."""
    size = kv_block_bytes(folder.config, kv_precision(folder.config, options))
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes // size
    one_request = -(-folder.limits.max_seq_len // KV_BLOCK_TOKENS)
    return max(one_request, min(USUAL_REQUESTS * one_request, GIB // size))


def open_pipeline(folder: EngineFolder, options: OpenVinoOptions) -> genai.ContinuousBatchingPipeline:
    """Load the paged, in-flight batching pipeline on token ids; it needs no tokenizer.

    Raises:
        UserError: the KV cache cannot hold one request of max_seq_len tokens.
    """
    precision = kv_precision(folder.config, options)
    blocks = kv_blocks(folder, options)
    if blocks * KV_BLOCK_TOKENS < folder.limits.max_seq_len:
        needed = -(-folder.limits.max_seq_len // KV_BLOCK_TOKENS) * kv_block_bytes(folder.config, precision)
        raise UserError(
            f"engine.openvino.kv_cache_bytes={options.kv_cache_bytes} holds {blocks * KV_BLOCK_TOKENS} tokens at"
            f" {precision}; one request may have max_seq_len={folder.limits.max_seq_len}.",
            todo=f"Give at least {needed} bytes ({show_bytes(needed)}).",
        )
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = folder.limits.max_num_tokens
    scheduler.max_num_seqs = folder.limits.max_batch_size
    scheduler.cache_size, scheduler.num_kv_blocks = 0, blocks
    scheduler.enable_prefix_caching = options.enable_prefix_caching
    # one iteration holds prompts and single tokens together, as TensorRT-LLM's in-flight batching does
    scheduler.dynamic_split_fuse = True
    return genai.ContinuousBatchingPipeline(str(folder.path), scheduler, "CPU", properties(options, precision))


def check_request(folder: EngineFolder, options: OpenVinoOptions, length: int, new_tokens: int) -> None:
    """Refuse a request to generate that the engine was not built for.

    Args:
        folder: the engine.
        options: whether long prompts may be chunked.
        length: tokens of the prompt.
        new_tokens: tokens to generate at most.

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
    check_length(folder, length + new_tokens)
    if length > limits.max_num_tokens and not options.enable_chunked_context:
        raise UserError(
            f"A prompt has {length} tokens; the engine was built with max_num_tokens={limits.max_num_tokens}.",
            todo="Set engine.enable_chunked_context=true or build with more.",
        )


def check_length(folder: EngineFolder, tokens: int) -> None:
    """Refuse a sequence longer than any the engine may hold.

    Raises:
        UserError: naming the length and max_seq_len.
    """
    if tokens > folder.limits.max_seq_len:
        raise UserError(
            f"A sequence would have {tokens} tokens;"
            f" the engine was built with max_seq_len={folder.limits.max_seq_len}.",
            todo="Shorten the prompt or build with a larger max_seq_len.",
        )
