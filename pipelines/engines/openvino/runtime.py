"""Open engine folders: the contents of one, and the OpenVINO properties to run it with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import openvino as ov

from pipelines.checkpoint.config import CheckpointConfig
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, KvFormat
from pipelines.engines.openvino import memory
from pipelines.engines.openvino.build import CONFIG_FILE, FLAVOUR, MODEL_FILE
from pipelines.engines.openvino.lora import LoraAdapter, apply_adapter
from pipelines.engines.openvino.mapped import weights_dropped
from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.precision import inference_precision, rounds_activations
from pipelines.engines.openvino.signal_stack import take_back_signal_stack
from pipelines.engines.port import BuildLimits
from pipelines.host.machine import int8_saturates

USUAL_GROUP = 128
"""Activations that share a scale: of the sizes that lose no accuracy the fastest (docs/benchmarks.md)."""

FIRST_TOKENS = 2
"""Tokens of the first inference. The layout of weights that the plugin chooses for two serves any number but one; after
a first inference of 16 it packed the linears a second time (float32, AVX2)."""


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """An engine folder of OpenVINO that has been read.

    Attributes:
        path: the folder.
        config: the model, as described in the checkpoint.
        limits: limits that it was built for.
        adapter: LoRA adapter to apply when the model is loaded, or None.
    """

    path: Path
    config: CheckpointConfig
    limits: BuildLimits
    adapter: LoraAdapter | None = None

    @classmethod
    def load(cls, path: Path) -> EngineFolder:
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
        flavour = raw.get("engine", {}).get("flavour")
        if flavour != FLAVOUR:
            raise UserError(f"{file} describes an engine built with engine={flavour}, not with engine={FLAVOUR}.")
        config = CheckpointConfig.parse(raw["pretrained_config"], str(file), path)
        names = {field.name for field in fields(BuildLimits)}
        limits = BuildLimits(**{key: value for key, value in raw["build_config"].items() if key in names})
        return cls(path, config, limits)

    def read_model(self) -> ov.Model:
        """Read the graph and apply its adapter."""
        model = ov.Core().read_model(self.path / MODEL_FILE)
        if self.adapter is not None:
            apply_adapter(model, self.adapter, self.config)
        return model

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Compile and run for the first time in here: the plugin then makes its copies of the weights."""
        with weights_dropped((self.path / MODEL_FILE).with_suffix(".bin")):
            try:
                yield
            finally:
                take_back_signal_stack()


def kv_precision(config: CheckpointConfig, options: OpenVinoOptions) -> str:
    """Return the storage type of the paged KV cache; see `OpenVinoOptions.kv_cache_precision`."""
    if options.kv_cache_precision != "auto":
        return options.kv_cache_precision
    return inference_precision(options) if config.kv_format is KvFormat.AUTO else "u8"


def dynamic_quantization(config: CheckpointConfig, options: OpenVinoOptions) -> int:
    """Return how many activations share a dynamic INT8 scale, 0 for none; see `OpenVinoOptions.dynamic_quantization`.

    Formats that quantize activations do so in the graph, with the checkpoint's scales; and not every processor does it.
    """
    asked = options.dynamic_quantization
    weight_only = all(FORMATS[qformat].weight_only for qformat in config.qformats)
    if asked == "off" or not weight_only or not rounds_activations(options):
        return 0
    if asked == "auto":
        return USUAL_GROUP if options.inference_precision == "auto" else 0
    return int(asked)


def arithmetic(config: CheckpointConfig, options: OpenVinoOptions) -> str:
    """Return the type of the arithmetic in words, e.g. "bf16, activations rounded to INT8 in groups of 128"."""
    group = dynamic_quantization(config, options)
    return inference_precision(options) + (f", activations rounded to INT8 in groups of {group}" if group else "")


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

    Args:
        folder: the engine.
        options: whether long prompts may be chunked.
        length: tokens in the prompt.
        new_tokens: most tokens to generate.

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
            todo="Set runtime.enable_chunked_context=true or build with a larger max_num_tokens.",
        )


def check_length(folder: EngineFolder, tokens: int) -> None:
    """Reject a sequence longer than max_seq_len.

    Raises:
        UserError: naming the length and max_seq_len.
    """
    if tokens > folder.limits.max_seq_len:
        raise UserError(
            f"A sequence would have {tokens} tokens;"
            f" the engine was built with max_seq_len={folder.limits.max_seq_len}.",
            todo="Shorten the prompt or build with a larger max_seq_len.",
        )
