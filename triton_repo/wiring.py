"""How the ensemble feeds its three models: tensors whose names begin with "_" never leave the server.

Source: `triton_backend/all_models/inflight_batcher_llm/ensemble/config.pbtxt` (TensorRT-LLM 1.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triton_repo.tensors import POSTPROCESSING, PREPROCESSING, TENSORRT_LLM


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of the ensemble.

    Attributes:
        model: its name.
        inputs: the model's input -> the ensemble's tensor.
        outputs: the model's output -> the ensemble's tensor.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def same(*names: str) -> dict[str, str]:
    """Tensors that go through under their own name."""
    return {name: name for name in names}


STEPS = (
    EnsembleStep(
        PREPROCESSING,
        inputs={
            "QUERY": "text_input",
            "DECODER_QUERY": "decoder_text_input",
            "REQUEST_OUTPUT_LEN": "max_tokens",
            "BAD_WORDS_DICT": "bad_words",
            "STOP_WORDS_DICT": "stop_words",
            "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
            "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
            "END_ID": "end_id",
            "PAD_ID": "pad_id",
            "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
        },
        outputs={
            "REQUEST_INPUT_LEN": "_REQUEST_INPUT_LEN",
            "INPUT_ID": "_INPUT_ID",
            "REQUEST_DECODER_INPUT_LEN": "_REQUEST_DECODER_INPUT_LEN",
            "DECODER_INPUT_ID": "_DECODER_INPUT_ID",
            "REQUEST_OUTPUT_LEN": "_REQUEST_OUTPUT_LEN",
            "STOP_WORDS_IDS": "_STOP_WORDS_IDS",
            "BAD_WORDS_IDS": "_BAD_WORDS_IDS",
            "EMBEDDING_BIAS": "_EMBEDDING_BIAS",
            "OUT_END_ID": "_PREPROCESSOR_END_ID",
            "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID",
            "OUT_PROMPT_TABLE_EXTRA_IDS": "_OUT_PROMPT_TABLE_EXTRA_IDS",
        },
    ),
    EnsembleStep(
        TENSORRT_LLM,
        inputs={
            "input_ids": "_INPUT_ID",
            "decoder_input_ids": "_DECODER_INPUT_ID",
            "input_lengths": "_REQUEST_INPUT_LEN",
            "decoder_input_lengths": "_REQUEST_DECODER_INPUT_LEN",
            "exclude_input_in_output": "exclude_input_in_output",
            "request_output_len": "_REQUEST_OUTPUT_LEN",
            "end_id": "_PREPROCESSOR_END_ID",
            "pad_id": "_PREPROCESSOR_PAD_ID",
            "embedding_bias": "_EMBEDDING_BIAS",
            "runtime_top_k": "top_k",
            "runtime_top_p": "top_p",
            "temperature": "temperature",
            "len_penalty": "length_penalty",
            **same(
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
            ),
            "streaming": "stream",
            **same(
                "prompt_embedding_table",
                "prompt_vocab_size",
            ),
            "stop_words_list": "_STOP_WORDS_IDS",
            "bad_words_list": "_BAD_WORDS_IDS",
            "prompt_table_extra_ids": "_OUT_PROMPT_TABLE_EXTRA_IDS",
            **same(
                "lora_task_id",
                "lora_weights",
                "lora_config",
                "guided_decoding_guide_type",
                "guided_decoding_guide",
            ),
        },
        outputs={
            "output_ids": "_TOKENS_BATCH",
            "sequence_length": "_SEQUENCE_LENGTH",
            **same(
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
            ),
        },
    ),
    EnsembleStep(
        POSTPROCESSING,
        inputs={
            "TOKENS_BATCH": "_TOKENS_BATCH",
            "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH",
        },
        outputs={
            "OUTPUT": "text_output",
        },
    ),
)

CANCELLATION = (
    EnsembleStep(PREPROCESSING, {}, {"CANCELLATION_KEY": "_CANCELLATION_KEY"}),
    EnsembleStep(
        TENSORRT_LLM, {"cancellation_key": "_CANCELLATION_KEY"}, {"cancellation_key": "_CANCELLATION_KEY_OF_RESPONSE"}
    ),
    EnsembleStep(POSTPROCESSING, {"CANCELLATION_KEY": "_CANCELLATION_KEY_OF_RESPONSE"}, {}),
)
"""Added where `tensorrt_llm` is ours, so that a client of the ensemble that leaves frees its slot.

Triton tells a step of a cancellation only when the step begins. While an answer streams, postprocessing begins again
with every response and is told; the key says which request of `tensorrt_llm` it must stop. A request id would not do:
clients may leave it out or use the same one twice.
"""
