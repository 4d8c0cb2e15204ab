"""The tensors of every model in the repository, once: name, type, shape, whether a request may leave them out.

Source: the templates of `triton_backend/all_models/{inflight_batcher_llm,llmapi}` (TensorRT-LLM 1.2); clients work
because these are the same. Shapes exclude the batch dimension; -1 is any length. Two remarks on the source: its
ensemble declares `kv_cache_alloc_total_blocks` twice, here it is declared once; `min_length`, which genai-perf sends
for a fixed output length, is not an input there nor here (`--extra-inputs min_tokens:N` does the same).
"""

from __future__ import annotations

from dataclasses import dataclass

BOOL, UINT8, UINT64, INT32, INT64 = "BOOL", "UINT8", "UINT64", "INT32", "INT64"
FP16, FP32, STRING = "FP16", "FP32", "STRING"
LOGITS = "LOGITS"
"""Stands for the engine's own type of logits."""

PREPROCESSING, TENSORRT_LLM, POSTPROCESSING = "preprocessing", "tensorrt_llm", "postprocessing"
ENSEMBLE, BLS = "ensemble", "tensorrt_llm_bls"
DRAFT = "tensorrt_llm_draft"
"""A second `tensorrt_llm` with an engine of its own."""
ENCODERS = "multimodal_encoders"
"""The vision model before a language model."""
LLMAPI = "llmapi"
"""Not a model's name: the tensors of `tensorrt_llm` in the llmapi flavour."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output.

    Attributes:
        name: as clients spell it.
        dtype: Triton's type without "TYPE_", or LOGITS.
        dims: shape without the batch dimension.
        optional: a request may leave it out.
        ragged: requests of one batch may differ in it; Triton then hands them over side by side, never padded.
        scalar: clients send [1], the model sees no dimension.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class ModelInterface:
    """Inputs and outputs of one model."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def tensor(name: str, dtype: str, *dims: int) -> Tensor:
    """An output, or an input that every request brings."""
    return Tensor(name, dtype, dims)


def optional(name: str, dtype: str, *dims: int) -> Tensor:
    """An input that a request may leave out."""
    return Tensor(name, dtype, dims, optional=True)


def ragged(name: str, dtype: str, *dims: int) -> Tensor:
    """An optional input whose shape differs between requests."""
    return Tensor(name, dtype, dims, optional=True, ragged=True)


def scalar(name: str, dtype: str) -> Tensor:
    """An optional input of one value."""
    return Tensor(name, dtype, (1,), optional=True, scalar=True)


def needed_scalar(name: str, dtype: str) -> Tensor:
    """One value that every request brings."""
    return Tensor(name, dtype, (1,), scalar=True)


PROBABILITIES = (
    tensor("cum_log_probs", FP32, -1),
    tensor("output_log_probs", FP32, -1, -1),
    tensor("context_logits", LOGITS, -1, -1),
    tensor("generation_logits", LOGITS, -1, -1, -1),
)
INDEXES = (tensor("batch_index", INT32, 1), tensor("sequence_index", INT32, 1))
TIMES_AND_DRAFTS = (
    tensor("arrival_time_ns", INT64, 1),
    tensor("first_scheduled_time_ns", INT64, 1),
    tensor("first_token_time_ns", INT64, 1),
    tensor("last_token_time_ns", INT64, 1),
    tensor("acceptance_rate", FP32, 1),
    tensor("total_accepted_draft_tokens", INT32, 1),
    tensor("total_draft_tokens", INT32, 1),
)
STATISTICS = (
    tensor("kv_cache_alloc_new_blocks", INT32, 1),
    tensor("kv_cache_reused_blocks", INT32, 1),
    tensor("kv_cache_alloc_total_blocks", INT32, 1),
    *TIMES_AND_DRAFTS,
    tensor("num_input_tokens", INT32, 1),
    tensor("num_output_tokens", INT32, 1),
)
TEXT_OUTPUTS = (tensor("text_output", STRING, -1), *PROBABILITIES, *INDEXES, *STATISTICS)
SAMPLING = (
    optional("bad_words", STRING, -1),
    optional("stop_words", STRING, -1),
    optional("exclude_input_in_output", BOOL, 1),
    optional("end_id", INT32, 1),
    optional("pad_id", INT32, 1),
    optional("top_k", INT32, 1),
    optional("top_p", FP32, 1),
    optional("temperature", FP32, 1),
    optional("length_penalty", FP32, 1),
    optional("repetition_penalty", FP32, 1),
    optional("min_tokens", INT32, 1),
    optional("presence_penalty", FP32, 1),
    optional("frequency_penalty", FP32, 1),
    optional("seed", UINT64, 1),
)
"""Parameters of sampling as ensemble and BLS take them, in this order."""

PREPROCESSING_INTERFACE = ModelInterface(
    inputs=(
        tensor("QUERY", STRING, 1),
        optional("DECODER_QUERY", STRING, 1),
        optional("IMAGE_BYTES", UINT8, -1, -1, -1, -1),
        optional("IMAGE_URL", STRING, -1),
        optional("IMAGE_SIZES", INT64, -1, 2),
        optional("VIDEO_BYTES", UINT8, -1, -1, -1, -1),
        tensor("REQUEST_OUTPUT_LEN", INT32, 1),
        optional("BAD_WORDS_DICT", STRING, -1),
        optional("STOP_WORDS_DICT", STRING, -1),
        optional("EMBEDDING_BIAS_WORDS", STRING, -1),
        optional("EMBEDDING_BIAS_WEIGHTS", FP32, -1),
        optional("END_ID", INT32, 1),
        optional("PAD_ID", INT32, 1),
        optional("PROMPT_TABLE_EXTRA_ID", UINT64, 1),
    ),
    outputs=(
        tensor("INPUT_ID", INT32, -1),
        tensor("REQUEST_INPUT_LEN", INT32, 1),
        tensor("DECODER_INPUT_ID", INT32, -1),
        tensor("REQUEST_DECODER_INPUT_LEN", INT32, 1),
        tensor("BAD_WORDS_IDS", INT32, 2, -1),
        tensor("STOP_WORDS_IDS", INT32, 2, -1),
        tensor("EMBEDDING_BIAS", FP32, -1),
        tensor("REQUEST_OUTPUT_LEN", INT32, -1),
        tensor("OUT_END_ID", INT32, 1),
        tensor("OUT_PAD_ID", INT32, 1),
        tensor("OUT_PROMPT_TABLE_EXTRA_IDS", UINT64, -1),
        tensor("PIXEL_VALUES", FP16, -1, -1, -1, -1),
        tensor("ASPECT_RATIO_IDS", INT64, -1),
        tensor("ASPECT_RATIO_MASK", INT64, -1, -1),
        tensor("CROSS_ATTENTION_MASK", INT64, -1, -1, -1),
        tensor("IMAGE_SIZES", INT64, -1, 2),
        tensor("IS_VIDEO_INPUT", BOOL, 1),
        tensor("ATTENTION_MASK", INT64, -1),
        tensor("IMAGE_GRID_THW", INT64, 3),
        tensor("VISION_INPUT_ID", INT32, -1),
    ),
)

TENSORRT_LLM_INTERFACE = ModelInterface(
    inputs=(
        ragged("input_ids", INT32, -1),
        ragged("encoder_input_features", FP16, -1, -1),
        scalar("encoder_output_lengths", INT32),
        needed_scalar("input_lengths", INT32),
        needed_scalar("request_output_len", INT32),
        scalar("num_return_sequences", INT32),
        ragged("draft_input_ids", INT32, -1),
        ragged("decoder_input_ids", INT32, -1),
        scalar("decoder_input_lengths", INT32),
        ragged("draft_logits", LOGITS, -1, -1),
        scalar("draft_acceptance_threshold", FP32),
        scalar("end_id", INT32),
        scalar("pad_id", INT32),
        ragged("stop_words_list", INT32, 2, -1),
        ragged("bad_words_list", INT32, 2, -1),
        ragged("embedding_bias", FP32, -1),
        scalar("beam_width", INT32),
        scalar("temperature", FP32),
        scalar("runtime_top_k", INT32),
        scalar("runtime_top_p", FP32),
        scalar("runtime_top_p_min", FP32),
        scalar("runtime_top_p_decay", FP32),
        scalar("runtime_top_p_reset_ids", INT32),
        scalar("len_penalty", FP32),
        scalar("early_stopping", BOOL),
        scalar("repetition_penalty", FP32),
        scalar("min_tokens", INT32),
        scalar("beam_search_diversity_rate", FP32),
        scalar("presence_penalty", FP32),
        scalar("frequency_penalty", FP32),
        scalar("seed", UINT64),
        scalar("return_log_probs", BOOL),
        scalar("return_context_logits", BOOL),
        scalar("return_generation_logits", BOOL),
        scalar("return_perf_metrics", BOOL),
        scalar("return_num_input_tokens", BOOL),
        scalar("return_num_output_tokens", BOOL),
        scalar("exclude_input_in_output", BOOL),
        scalar("stop", BOOL),
        scalar("streaming", BOOL),
        ragged("prompt_embedding_table", FP16, -1, -1),
        ragged("prompt_table_extra_ids", UINT64, -1),
        scalar("prompt_vocab_size", INT32),
        ragged("cross_attention_mask", BOOL, -1, -1),
        optional("mrope_rotary_cos_sin", FP32, -1),
        optional("mrope_position_deltas", INT64, 1),
        scalar("lora_task_id", UINT64),
        ragged("lora_weights", FP16, -1, -1),
        ragged("lora_config", INT32, -1, 3),
        ragged("context_phase_params", UINT8, -1),
        ragged("skip_cross_attn_blocks", BOOL, 1),
        ragged("retention_token_range_starts", INT32, -1),
        ragged("retention_token_range_ends", INT32, -1),
        ragged("retention_token_range_priorities", INT32, -1),
        ragged("retention_token_range_durations_ms", INT32, -1),
        ragged("retention_decode_priority", INT32, 1),
        ragged("retention_decode_duration_ms", INT32, 1),
        ragged("guided_decoding_guide_type", STRING, 1),
        ragged("guided_decoding_guide", STRING, 1),
        ragged("lookahead_window_size", INT32, 1),
        ragged("lookahead_ngram_size", INT32, 1),
        ragged("lookahead_verification_set_size", INT32, 1),
    ),
    outputs=(
        tensor("output_ids", INT32, -1, -1),
        tensor("sequence_length", INT32, -1),
        *PROBABILITIES,
        *INDEXES,
        tensor("context_phase_params", UINT8, -1),
        *STATISTICS,
    ),
)

POSTPROCESSING_INTERFACE = ModelInterface(
    inputs=(
        tensor("TOKENS_BATCH", INT32, -1, -1),
        tensor("SEQUENCE_LENGTH", INT32, -1),
    ),
    outputs=(tensor("OUTPUT", STRING, -1),),
)

ENSEMBLE_INTERFACE = ModelInterface(
    inputs=(
        tensor("text_input", STRING, 1),
        optional("decoder_text_input", STRING, 1),
        tensor("max_tokens", INT32, 1),
        optional("num_return_sequences", INT32, 1),
        *SAMPLING,
        optional("return_log_probs", BOOL, 1),
        optional("return_context_logits", BOOL, 1),
        optional("return_generation_logits", BOOL, 1),
        optional("return_perf_metrics", BOOL, 1),
        optional("return_num_input_tokens", BOOL, 1),
        optional("return_num_output_tokens", BOOL, 1),
        optional("beam_width", INT32, 1),
        optional("stream", BOOL, 1),
        optional("prompt_embedding_table", FP16, -1, -1),
        optional("prompt_table_extra_id", UINT64, 1),
        optional("prompt_vocab_size", INT32, 1),
        optional("embedding_bias_words", STRING, -1),
        optional("embedding_bias_weights", FP32, -1),
        optional("lora_task_id", UINT64, 1),
        ragged("lora_weights", FP16, -1, -1),
        ragged("lora_config", INT32, -1, 3),
        ragged("guided_decoding_guide_type", STRING, 1),
        ragged("guided_decoding_guide", STRING, 1),
    ),
    outputs=TEXT_OUTPUTS,
)

BLS_INTERFACE = ModelInterface(
    inputs=(
        tensor("text_input", STRING, 1),
        optional("decoder_text_input", STRING, 1),
        optional("image_input", FP16, -1, 3, -1, -1),
        optional("image_bytes_input", UINT8, -1, -1, -1, -1),
        optional("image_url_input", STRING, 1),
        optional("image_sizes_input", INT64, -1, 2),
        optional("video_bytes_input", UINT8, -1, -1, -1, -1),
        tensor("max_tokens", INT32, 1),
        *SAMPLING,
        scalar("return_log_probs", BOOL),
        scalar("return_context_logits", BOOL),
        scalar("return_generation_logits", BOOL),
        scalar("num_return_sequences", INT32),
        optional("beam_width", INT32, 1),
        optional("stream", BOOL, 1),
        optional("prompt_embedding_table", FP16, -1, -1),
        optional("prompt_vocab_size", INT32, 1),
        optional("prompt_table_extra_id", UINT64, 1),
        optional("embedding_bias_words", STRING, -1),
        optional("embedding_bias_weights", FP32, -1),
        optional("num_draft_tokens", INT32, 1),
        scalar("use_draft_logits", BOOL),
        scalar("lora_task_id", UINT64),
        ragged("lora_weights", FP16, -1, -1),
        ragged("lora_config", INT32, -1, 3),
        scalar("return_perf_metrics", BOOL),
        scalar("return_num_input_tokens", BOOL),
        scalar("return_num_output_tokens", BOOL),
        optional("guided_decoding_guide_type", STRING, 1),
        optional("guided_decoding_guide", STRING, 1),
    ),
    outputs=TEXT_OUTPUTS,
)

LLMAPI_INTERFACE = ModelInterface(
    inputs=(
        tensor("text_input", STRING, -1),
        optional("streaming", BOOL, 1),
        optional("sampling_param_best_of", INT32, 1),
        optional("sampling_param_temperature", FP32, 1),
        optional("sampling_param_top_k", INT32, 1),
        optional("sampling_param_top_p", FP32, 1),
        optional("sampling_param_frequency_penalty", FP32, 1),
        optional("sampling_param_presence_penalty", FP32, 1),
        optional("sampling_param_max_tokens", INT32, 1),
        optional("sampling_param_stop", STRING, -1),
        optional("sampling_param_seed", UINT64, 1),
        optional("sampling_param_exclude_input_from_output", BOOL, 1),
        optional("sampling_param_return_perf_metrics", BOOL, 1),
        optional("return_finish_reason", BOOL, 1),
        optional("return_stop_reason", BOOL, 1),
        optional("return_cumulative_logprob", BOOL, 1),
        optional("stop", BOOL, 1),
    ),
    outputs=(
        tensor("text_output", STRING, -1),
        tensor("finish_reason", STRING, -1),
        tensor("stop_reason", STRING, -1),
        tensor("cumulative_logprob", FP32, -1),
        tensor("kv_cache_reused_block", INT32, -1),
        tensor("kv_cache_missed_block", INT32, -1),
        tensor("kv_cache_alloc_new_blocks", INT32, -1),
        tensor("kv_cache_alloc_total_blocks", INT32, -1),
        tensor("kv_cache_hit_rate", FP32, -1),
        *TIMES_AND_DRAFTS,
    ),
)

MULTIMODAL_INTERFACE = ModelInterface(
    inputs=(
        optional("IMAGE", FP16, -1, -1, -1, -1),
        optional("pixel_values", FP16, -1, -1, -1, -1),
        optional("aspect_ratio_ids", INT64, -1),
        optional("aspect_ratio_mask", INT64, -1, -1),
        optional("cross_attention_mask", INT64, -1, -1, -1),
        optional("max_tokens", INT32, 1),
        optional("image_sizes", INT64, 2),
        optional("is_video_input", BOOL, 1),
        optional("attention_mask", INT64, -1),
        optional("image_grid_thw", INT64, 3),
        optional("vision_input_id", INT32, -1),
    ),
    outputs=(
        tensor("OUT_PROMPT_EMBEDDING_TABLE", FP16, -1, -1),
        tensor("OUT_PROMPT_VOCAB_SIZE", INT32, 1),
        tensor("ENCODER_INPUT_FEATURES", FP16, -1, -1),
        needed_scalar("ENCODER_OUTPUT_LENGTHS", INT32),
        tensor("CROSS_ATTENTION_MASK", BOOL, -1, -1),
        tensor("SKIP_CROSS_ATTN_BLOCKS", BOOL, 1),
        tensor("MROPE_ROTARY_COS_SIN", FP32, -1),
        tensor("MROPE_POSITION_DELTAS", INT64, 1),
    ),
)

INTERFACES = {
    PREPROCESSING: PREPROCESSING_INTERFACE,
    TENSORRT_LLM: TENSORRT_LLM_INTERFACE,
    POSTPROCESSING: POSTPROCESSING_INTERFACE,
    ENSEMBLE: ENSEMBLE_INTERFACE,
    BLS: BLS_INTERFACE,
    LLMAPI: LLMAPI_INTERFACE,
    ENCODERS: MULTIMODAL_INTERFACE,
}

OWN = {
    PREPROCESSING: ModelInterface(inputs=(), outputs=(tensor("CANCELLATION_KEY", UINT64, 1),)),
    TENSORRT_LLM: ModelInterface(
        inputs=(
            optional("cancellation_key", UINT64, 1),
            optional("return_top_log_probs", INT32, 1),
            optional("return_context_log_probs", INT32, 1),
        ),
        outputs=(
            tensor("cancellation_key", UINT64, 2),
            tensor("top_token_ids", INT32, -1, -1),
            tensor("top_log_probs", FP32, -1, -1),
            tensor("context_log_probs", FP32, -1),
            tensor("context_top_token_ids", INT32, -1, -1),
            tensor("context_top_log_probs", FP32, -1, -1),
        ),
    ),
    POSTPROCESSING: ModelInterface(inputs=(optional("CANCELLATION_KEY", UINT64, 2),), outputs=()),
}
"""What the models have beside the template's tensors where `tensorrt_llm` is ours.

The keys are described at `generate.CANCELLATION`. The log probabilities are those of the prompt's own tokens after the
first, and of as many likeliest tokens as the input says: after each token of the prompt, or at the place of each new
one. The template has the logits of the whole vocabulary alone, 608 KB a token where that has 152,000 entries.
"""


def interface(name: str, *, ours: bool = False) -> ModelInterface:
    """Return the tensors of a model.

    Args:
        name: of the model, or LLMAPI.
        ours: whether the repository's `tensorrt_llm` is this project's own Python model.

    Raises:
        KeyError: there is no such model.
    """
    theirs, more = INTERFACES[name], OWN.get(name) if ours else None
    if more is None:
        return theirs
    return ModelInterface(theirs.inputs + more.inputs, theirs.outputs + more.outputs)
