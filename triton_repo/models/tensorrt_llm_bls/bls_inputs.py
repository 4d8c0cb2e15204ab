"""Inputs of the models that `tensorrt_llm_bls` calls: their names, refused combinations, and additions."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

NO_EXPIRATION = -1
"""A duration that means forever. Source: `kRetentionNoExpirationTime` in TensorRT-LLM's Triton backend, utils.cc."""
TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
TO_MODEL = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
} | {
    name: name
    for name in (
        "exclude_input_in_output",
        "temperature",
        "repetition_penalty",
        "min_tokens",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "return_log_probs",
        "return_context_logits",
        "return_generation_logits",
        "return_perf_metrics",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "num_return_sequences",
        "beam_width",
        "prompt_embedding_table",
        "prompt_vocab_size",
        "lora_task_id",
        "lora_weights",
        "lora_config",
        "guided_decoding_guide_type",
        "guided_decoding_guide",
    )
}
PASSED_ON = frozenset(
    {
        "cum_log_probs",
        "output_log_probs",
        "context_logits",
        "generation_logits",
        "batch_index",
        "sequence_index",
        "kv_cache_alloc_new_blocks",
        "kv_cache_reused_blocks",
        "kv_cache_alloc_total_blocks",
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
        "acceptance_rate",
        "total_accepted_draft_tokens",
        "total_draft_tokens",
        "num_input_tokens",
        "num_output_tokens",
    }
)
NEEDS_DRAFT = ("num_draft_tokens", "use_draft_logits")
NOT_WITH_DRAFTS = (
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "prompt_embedding_table",
)
ONE_WITH_DRAFTS = ("beam_width", "num_return_sequences")
TO_ENCODER = {"PIXEL_VALUES": "pixel_values"}
FROM_ENCODER = {"OUT_PROMPT_EMBEDDING_TABLE": "prompt_embedding_table", "OUT_PROMPT_VOCAB_SIZE": "prompt_vocab_size"}
IMAGE = "image_bytes_input"
"""The form in which a configured vision model takes pictures here."""
NEEDS_ENCODER = ("image_input", "image_bytes_input", "image_url_input", "image_sizes_input", "video_bytes_input")


class RefusedError(Exception):
    """A request that cannot be answered; the message is for the client."""


class Retention:
    """How long the KV blocks of a prompt's beginning are kept: what a system prompt needs."""

    def __init__(self, tokens: int, priority: int, duration_ms: int) -> None:
        self._tokens, self._priority, self._duration = tokens, priority, duration_ms

    @classmethod
    def of(cls, config: dict[str, Any]) -> Retention:
        """Read the parameters `retention_tokens` (0 is off), `retention_priority` and `retention_duration_ms`."""
        names = ("retention_tokens", "retention_priority", "retention_duration_ms")
        tokens, priority, duration = (parameter(config, name) for name in names)
        return cls(int(tokens or 0), int(priority or 0), int(duration or NO_EXPIRATION))

    def inputs(self, prepared: dict[str, Array]) -> dict[str, Array]:
        """Return the engine's inputs for one range from the first token on; empty if retention is off."""
        if not self._tokens:
            return {}
        batch, longest = prepared["input_ids"].shape
        values = {
            "retention_token_range_starts": 0,
            "retention_token_range_ends": min(self._tokens, longest),
            "retention_token_range_priorities": self._priority,
            "retention_token_range_durations_ms": self._duration,
        }
        return {name: np.full((batch, 1), value, dtype=np.int32) for name, value in values.items()}


def refuse(inputs: dict[str, Array], *, has_draft: bool, has_encoder: bool = False) -> None:
    """Refuse what the configured models cannot do."""
    for name in NEEDS_DRAFT if not has_draft else ():
        if name in inputs and inputs[name].any():
            raise RefusedError(
                f"{name} asks for speculative decoding, but no draft model is configured"
                " (tensorrt_llm_draft_model_name is empty). Leave it out."
            )
    for name in NEEDS_ENCODER:
        if name not in inputs or not inputs[name].size or (has_encoder and name == IMAGE):
            continue
        if has_encoder:
            raise RefusedError(f"{name} was given, but pictures are taken as {IMAGE} alone.")
        raise RefusedError(f"{name} was given, but no vision model is configured (multimodal_encoders_name is empty).")
    if has_encoder and IMAGE in inputs and "prompt_embedding_table" in inputs:
        raise RefusedError(f"prompt_embedding_table and {IMAGE} were given; a prompt has one table.")
    if "num_draft_tokens" in inputs and inputs["num_draft_tokens"].any():
        _refuse_with_drafts(inputs)


def _refuse_with_drafts(inputs: dict[str, Array]) -> None:
    """Refuse what draft tokens do not support: more than one prompt or sequence, and outputs other than tokens."""
    count = inputs["num_draft_tokens"].reshape(-1)
    if count.min() < 1:
        raise RefusedError(f"num_draft_tokens is {count.min()}; it must be at least 1.")
    if len(count) > 1:
        raise RefusedError(f"num_draft_tokens goes with one prompt at a time, not with a batch of {len(count)}.")
    for name in ONE_WITH_DRAFTS:
        if name in inputs and inputs[name].max() > 1:
            raise RefusedError(f"{name} is {inputs[name].max()}; with num_draft_tokens it must be 1.")
    for name in NOT_WITH_DRAFTS:
        if name in inputs and (inputs[name].any() if inputs[name].dtype == np.bool_ else inputs[name].size):
            raise RefusedError(f"{name} does not go with num_draft_tokens. Leave one of them out.")


def parameter(config: dict[str, Any], name: str) -> str:
    """Text of a parameter; empty when it is absent or a placeholder was left in it."""
    text = str(config.get("parameters", {}).get(name, {}).get("string_value", ""))
    return "" if text.startswith("${") else text
