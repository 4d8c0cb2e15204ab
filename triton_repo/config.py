"""Settings of a Triton repository, under the names of TensorRT-LLM's own templates.

Source: the template parameters of `triton_backend/all_models/inflight_batcher_llm` (TensorRT-LLM 1.2), with their
defaults. Parameters that are missing here follow from the engine, other groups or the layout of the repository. None
leaves a parameter out, so that the backend's own default holds.
"""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.settings.base import ChoosingGroup, Positive, Ranks

Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Numbers = Annotated[tuple[Count, ...], Field(min_length=1)]
DeviceIds = Annotated[tuple[Numbers, ...], Field(min_length=1)]

CHOICES = re.compile(r"mc_sim_7b_63|\{\d+(, *\d+)*\}(, *\{\d+(, *\d+)*\})*")


class TritonSettings(ChoosingGroup):
    """Parameters of preprocessing, tensorrt_llm, postprocessing and tensorrt_llm_bls.

    Attributes:
        triton_max_batch_size: requests that Triton may hand over at once; None is the engine's max_batch_size.
        decoupled_mode: several responses per request, which streaming and batches of prompts need.
        max_queue_size: waiting requests before new ones are refused; 0 has no limit.
        max_queue_delay_microseconds: how long Triton waits for more requests to batch.
        preprocessing_instance_count: processes that tokenize.
        postprocessing_instance_count: processes that detokenize.
        bls_instance_count: processes of tensorrt_llm_bls, each of which answers one request at a time; further ones
            wait. For full concurrency, as many as the engine takes requests (19 MiB each).
        add_special_tokens: add the tokenizer's special tokens to a prompt.
        skip_special_tokens: leave special tokens out of the text.
        accumulate_tokens: tensorrt_llm_bls: every streamed response holds all text so far.
        batching_strategy: in-flight batching, by either name. No engine has static batching; `make simulate` does.
        batch_scheduler_policy: guaranteed_no_evict starts a request when all its KV blocks are free;
            max_utilization packs more and may pause one.
        max_beam_width: None is the engine's.
        exclude_input_in_output: leave the prompt out of output_ids; OpenAI-compatible access needs true.
        normalize_log_probs: divide log probabilities by the length of the answer.
        cancellation_check_period_ms: milliseconds between two checks for cancelled requests.
        stats_check_period_ms: milliseconds between two reads of the engine's statistics.
        iter_stats_max_iterations: iterations whose statistics are kept.
        request_stats_max_iterations: iterations whose statistics per request are kept.
        kv_cache_free_gpu_mem_fraction: share of the GPU memory left after the weights that the KV cache takes; null is
            chosen by the tuning, and otherwise TensorRT-LLM's 0.9.
        max_tokens_in_paged_kv_cache: tokens of the KV cache; with the fraction, the smaller bound holds.
        max_attention_window_size: tokens that attention looks back, per layer, repeated over the layers:
            [4096,8192].
        sink_token_length: tokens at the start that a window keeps.
        kv_cache_host_memory_bytes: host memory for KV blocks that leave the GPU.
        kv_cache_onboard_blocks: bring blocks back from host memory before they are used.
        retention_tokens: tokens at the start of every prompt whose KV blocks tensorrt_llm_bls asks to keep; None:
            off.
        retention_priority: of these blocks, 0 to 100; other blocks have TensorRT-LLM's default of 35.
        retention_duration_ms: how long the priority holds; None is forever.
        gpu_device_ids: GPUs of each instance of the model, in rank order: `[[0,1]]`.
        draft_gpu_device_ids: GPUs of the draft model; None shares those of the model.
        participant_ids: MPI ranks of each instance; needed in orchestrator mode without spawning.
        num_nodes: machines that one instance of the engine spans.
        executor_worker_path: what orchestrator mode spawns, inside NVIDIA's container.
        gpu_weights_percent: share of the weights on the GPU; below 1 needs an engine with weight streaming.
        enable_context_fmha_fp32_acc: 32-bit accumulation in the fused attention over the prompt.
        multi_block_mode: split attention of one sequence over several blocks of threads.
        cuda_graph_mode: run iterations as CUDA graphs.
        cuda_graph_cache_size: CUDA graphs that are kept.
        lora_cache_optimal_adapter_size: size of an adapter that the cache is laid out for.
        lora_cache_max_adapter_size: size of the largest adapter that the cache takes.
        lora_cache_gpu_memory_fraction: share of the GPU memory that the engine leaves, for adapters; the KV cache takes
            its share of the rest.
        lora_cache_host_memory_bytes: host memory for adapters.
        lora_prefetch_dir: folder of adapters that are loaded at the start.
        decoding_mode: how tokens are chosen; null is top_k_top_p, or beam_search with beams.
        lookahead_window_size: lookahead: width of the window.
        lookahead_ngram_size: lookahead: length of the n-grams.
        lookahead_verification_set_size: lookahead: n-grams that are checked in a step.
        medusa_choices: medusa: the tree of guesses, {0}, {0, 0}, {1}, or mc_sim_7b_63.
        eagle_choices: eagle: the tree of guesses, likewise.
        speculative_decoding_fast_logits: pass logits from the draft model's GPU to the model's directly; needs ranks of
            the draft model's own, which are not written, so it is always false.
        guided_decoding_backend: restricts answers to a schema or grammar: xgrammar (TensorRT-LLM), llguidance (CPU
            engine, LLM API); null turns it off.
        xgrammar_tokenizer_info_path: vocabulary file for xgrammar.
        fold_token_ids: take token ids beyond the vocabulary modulo its size, for load generators that send any numbers
            (NVIDIA's benchmark_core_model.py with token-norm-dist); on the CPU only.
    """

    CHOSEN: ClassVar[tuple[str, ...]] = ("kv_cache_free_gpu_mem_fraction",)

    triton_max_batch_size: Positive | None = None
    decoupled_mode: bool = True
    max_queue_size: Count = 0
    max_queue_delay_microseconds: Count = 0

    preprocessing_instance_count: Ranks = 1
    postprocessing_instance_count: Ranks = 1
    bls_instance_count: Ranks = 4
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    accumulate_tokens: bool = False

    batching_strategy: Literal["inflight_fused_batching", "inflight_batching"] = "inflight_fused_batching"
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    max_beam_width: Positive | None = None
    exclude_input_in_output: bool = False
    normalize_log_probs: bool = True
    cancellation_check_period_ms: Positive = 100
    stats_check_period_ms: Positive = 100
    iter_stats_max_iterations: Count = 1000
    request_stats_max_iterations: Count = 0

    kv_cache_free_gpu_mem_fraction: Fraction = 0.9
    max_tokens_in_paged_kv_cache: Positive | None = None
    max_attention_window_size: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    sink_token_length: Count | None = None
    kv_cache_host_memory_bytes: Count = 0
    kv_cache_onboard_blocks: bool = True
    retention_tokens: Positive | None = None
    retention_priority: Annotated[int, Field(ge=0, le=100)] = 100
    retention_duration_ms: Positive | None = None

    gpu_device_ids: DeviceIds | None = None
    draft_gpu_device_ids: DeviceIds | None = None
    participant_ids: DeviceIds | None = None
    num_nodes: Ranks = 1
    executor_worker_path: str = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
    gpu_weights_percent: Annotated[float, Field(ge=0, le=1)] = 1.0
    enable_context_fmha_fp32_acc: bool = False
    multi_block_mode: bool = True
    cuda_graph_mode: bool = False
    cuda_graph_cache_size: Count = 0

    lora_cache_optimal_adapter_size: Positive = 8
    lora_cache_max_adapter_size: Positive = 64
    lora_cache_gpu_memory_fraction: Fraction = 0.05
    lora_cache_host_memory_bytes: Count = 1073741824
    lora_prefetch_dir: str | None = None

    decoding_mode: (
        Literal["top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"] | None
    ) = None
    lookahead_window_size: Positive | None = None
    lookahead_ngram_size: Positive | None = None
    lookahead_verification_set_size: Positive | None = None
    medusa_choices: str = "mc_sim_7b_63"
    eagle_choices: str = "mc_sim_7b_63"
    speculative_decoding_fast_logits: bool = False

    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    xgrammar_tokenizer_info_path: str | None = None
    fold_token_ids: bool = False

    @field_validator("medusa_choices", "eagle_choices")
    @classmethod
    def _is_a_tree(cls, choices: str) -> str:
        if not CHOICES.fullmatch(choices):
            raise ValueError(f"'{choices}' is not a tree: write it as {{0}}, {{0, 0}}, {{1}} or take mc_sim_7b_63")
        return choices

    @field_validator("executor_worker_path", "lora_prefetch_dir", "xgrammar_tokenizer_info_path")
    @classmethod
    def _is_filled_in(cls, text: str | None) -> str | None:
        """Refuse unfilled placeholders of NVIDIA's templates, which would reach the server as a path."""
        if text is not None and (not text.strip() or "${" in text):
            raise ValueError(f"'{text}' is not filled in: give a value, or null to leave it out")
        return text

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        sizes = (self.lookahead_window_size, self.lookahead_ngram_size, self.lookahead_verification_set_size)
        if self.decoding_mode == "lookahead" and None in sizes:
            raise ValueError(
                f"decoding_mode 'lookahead' needs lookahead_window_size, lookahead_ngram_size and "
                f"lookahead_verification_set_size, given: {sizes}"
            )
        if self.speculative_decoding_fast_logits:
            raise ValueError(
                "speculative_decoding_fast_logits 'true' needs ranks of the draft model's own (participant_ids of two"
                " models), which repositories made here do not name"
            )
        return self
