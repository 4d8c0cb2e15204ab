"""Inputs of TensorRT-LLM's backend that the CPU engine does not support, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.domain.errors import UserError

Array = np.ndarray[Any, Any]

_GPU = "Use the GPU repository for it, or leave it out."
_ENCODER = "the model has no encoder"
_LORA = "the CPU engine loads its LoRA adapters from lora_prefetch_dir when it starts; send lora_task_id alone"
_DRAFT = "the CPU engine has no speculative decoding with draft tokens from the client"
_TABLE = "the CPU engine has no prompt tuning"
_RETENTION = "the CPU engine evicts its KV blocks by age only"
_LOOKAHEAD = "the CPU engine has no lookahead decoding"
_MROPE = "the model has no multimodal positions"
_TOP_P = "the CPU engine keeps top_p constant"

REFUSED: dict[str, str] = {
    "encoder_input_features": _ENCODER,
    "encoder_output_lengths": _ENCODER,
    "cross_attention_mask": _ENCODER,
    "skip_cross_attn_blocks": _ENCODER,
    "lora_weights": _LORA,
    "lora_config": _LORA,
    "draft_input_ids": _DRAFT,
    "draft_logits": _DRAFT,
    "draft_acceptance_threshold": _DRAFT,
    "prompt_embedding_table": _TABLE,
    "prompt_vocab_size": _TABLE,
    "mrope_rotary_cos_sin": _MROPE,
    "mrope_position_deltas": _MROPE,
    "context_phase_params": "the CPU engine runs prefill and decode in one place",
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
    "lookahead_window_size": _LOOKAHEAD,
    "lookahead_ngram_size": _LOOKAHEAD,
    "lookahead_verification_set_size": _LOOKAHEAD,
    "runtime_top_p_min": _TOP_P,
    "runtime_top_p_reset_ids": _TOP_P,
}
"""Input -> reason; rejected whenever it is not empty."""

NEUTRAL: dict[str, tuple[float, str]] = {
    "runtime_top_p_decay": (1.0, _TOP_P),
    "beam_search_diversity_rate": (0.0, "the CPU engine's beam search has no diversity rate"),
    "prompt_table_extra_ids": (0.0, _TABLE),
}
"""Input -> (value without effect, reason); rejected if it has any other value."""


def refuse_inputs(given: Mapping[str, Array]) -> None:
    """Reject inputs that the CPU engine does not support.

    Args:
        given: tensors that are not empty, by name.

    Raises:
        UserError: naming the input and why.
    """
    for name, values in given.items():
        if name in REFUSED:
            raise UserError(f"{name} is not supported here: {REFUSED[name]}.", todo=_GPU)
        if name in NEUTRAL and (values != NEUTRAL[name][0]).any():
            raise UserError(f"{name} is not supported here: {NEUTRAL[name][1]}.", todo=_GPU)
    # preprocessing always sends one padding token, which decoder-only models of the GPU backend expect
    decoder = given.get("decoder_input_ids")
    if decoder is not None and decoder.shape[-1] > 1:
        raise UserError(f"decoder_input_ids (decoder_text_input) is not supported here: {_ENCODER}.", todo=_GPU)
