"""Convert settings to the terms of the memory model."""

from __future__ import annotations

from pipelines.domain.model_shape import ModelShape
from pipelines.predict.performance.lengths import known_lengths
from pipelines.predict.performance.memory import EngineSizes
from pipelines.settings.root import Settings


def engine_sizes(settings: Settings, shape: ModelShape) -> EngineSizes:
    """Return the sizes that determine an engine's memory, from the settings."""
    build, triton = settings.build, settings.triton
    return EngineSizes(
        shape=shape,
        qformat=settings.quant.qformat,
        kv_format=settings.kv_cache.dtype,
        group_size=settings.quant.group_size,
        mean_bits=settings.quant.mean_bits,
        tp_size=build.tp_size,
        pp_size=build.pp_size,
        max_batch_size=build.max_batch_size,
        max_beam_width=build.max_beam_width,
        max_num_tokens=build.max_num_tokens,
        max_seq_len=build.max_seq_len or shape.max_position_embeddings,
        tokens_per_block=build.tokens_per_block,
        user_buffers=build.user_buffer == "enable",
        gather_context_logits=build.gather_context_logits or build.gather_all_token_logits,
        gpu_weights_percent=triton.gpu_weights_percent if build.weight_streaming else 1.0,
        kv_fraction=triton.kv_cache_free_gpu_mem_fraction,
        max_kv_tokens=triton.max_tokens_in_paged_kv_cache,
        windows=tuple(triton.max_attention_window_size or shape.windows),
    )


def request_tokens(settings: Settings) -> int | None:
    """Return the mean prompt + output of the workload's requests in tokens; None where a file does not tell it."""
    found = known_lengths(settings)
    return None if found is None else found.mean
