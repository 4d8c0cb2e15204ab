"""Read the parameters of the Triton model `tensorrt_llm` for the CPU engine.

The keys are those of TensorRT-LLM's backend, plus `openvino_*`. Keys about GPUs, MPI and LoRA caches have no effect
here and are not read; values that would change the output and are not supported are rejected when the model loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from pipelines.domain.errors import UserError
from pipelines.engines.config import OpenVinoSettings
from pipelines.engines.openvino.memory import blocks_of
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions, kv_block_bytes, kv_blocks, kv_precision
from pipelines.settings.base import Group, Positive

PREFIX = "openvino_"


class _Parameters(Group):
    """Parameters of TensorRT-LLM's backend, and of the server alone, by their names."""

    gpt_model_type: Literal["inflight_fused_batching", "inflight_batching"] = "inflight_fused_batching"
    decoding_mode: Literal["top_k", "top_p", "top_k_top_p", "beam_search"] = "top_k"
    gpt_model_path: Path = Path("tensorrt_llm/1/engine")
    tokenizer_dir: Path = Path("preprocessing/1/tokenizer")
    lora_prefetch_dir: Path | None = None
    guided_decoding_backend: Literal["llguidance"] | None = None
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    max_tokens_in_paged_kv_cache: Positive | None = None
    max_beam_width: Positive | None = None
    max_attention_window_size: Annotated[tuple[Positive, ...], BeforeValidator(lambda text: text.split(","))] = ()
    sink_token_length: Annotated[int, Field(ge=0)] = 0
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = False
    exclude_input_in_output: bool = False
    cancellation_check_period_ms: Positive = 100
    stats_check_period_ms: Positive = 100
    openvino_draft_dir: Path | None = None
    openvino_max_queue_size: Positive | None = None
    openvino_fold_token_ids: bool = False

    @field_validator("max_attention_window_size")
    @classmethod
    def _all_layers_alike(cls, windows: tuple[int, ...]) -> tuple[int, ...]:
        """The list is repeated over the layers."""
        if len(set(windows)) > 1:
            raise ValueError(f"has {','.join(map(str, windows))}: all layers of the CPU engine share one window")
        return windows


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Options with which a server runs an engine.

    Attributes:
        lora_dir: folder with an adapter in each <task id>/, or None.
        tokenizer_dir: tokenizer of the model, for characters that span tokens and for guides; or None.
        max_tokens_in_cache: limit on the KV cache in tokens, or None.
        max_beam_width: limit for requests, or None for the engine's.
        max_queue_size: most requests that may wait; 0 means no limit.
        decoupled: whether several responses to one request are possible.
        exclude_input: whether to leave the prompt out of the output if a request does not specify it.
        guaranteed_no_evict: whether to start a request only when all KV blocks it may need are free.
        fold_token_ids: whether to take token ids beyond the vocabulary modulo its size instead of rejecting them.
        cancellation_check_period_ms: interval between checks for disconnected clients.
        stats_check_period_ms: interval between updates of metrics.
    """

    engine_dir: Path
    engine: OpenVinoOptions = OpenVinoOptions()  # noqa: RUF009 - frozen
    lora_dir: Path | None = None
    tokenizer_dir: Path | None = None
    guided: bool = False
    max_tokens_in_cache: int | None = None
    max_beam_width: int | None = None
    max_queue_size: int = 0
    decoupled: bool = True
    exclude_input: bool = False
    guaranteed_no_evict: bool = True
    fold_token_ids: bool = False
    cancellation_check_period_ms: int = 100
    stats_check_period_ms: int = 100

    @classmethod
    def from_model_config(cls, config: Mapping[str, Any], repository: Path) -> ServingOptions:
        """Read a model configuration as Triton passes it to the backend.

        Raises:
            UserError: naming the parameter, its value and what is allowed.
        """
        given = _given(config.get("parameters", {}))
        if encoder := given.get("encoder_model_path"):
            raise UserError(
                f"Parameter encoder_model_path='{encoder}' is not supported by the CPU engine.", todo="Leave it out."
            )
        known = {name: text for name, text in given.items() if name in _Parameters.model_fields}
        read = _Parameters.judged(known, "Parameter ")
        return cls(
            engine_dir=repository / read.gpt_model_path,
            engine=_engine_options(given, read, repository),
            lora_dir=read.lora_prefetch_dir and repository / read.lora_prefetch_dir,
            tokenizer_dir=tokenizer if (tokenizer := repository / read.tokenizer_dir).is_dir() else None,
            guided=read.guided_decoding_backend is not None,
            max_tokens_in_cache=read.max_tokens_in_paged_kv_cache,
            max_beam_width=read.max_beam_width,
            max_queue_size=read.openvino_max_queue_size or 0,
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            exclude_input=read.exclude_input_in_output,
            guaranteed_no_evict=read.batch_scheduler_policy == "guaranteed_no_evict",
            fold_token_ids=read.openvino_fold_token_ids,
            cancellation_check_period_ms=read.cancellation_check_period_ms,
            stats_check_period_ms=read.stats_check_period_ms,
        )

    def fitted(self, folder: EngineFolder) -> ServingOptions:
        """Return these options with the KV cache reduced to `max_tokens_in_cache`."""
        if self.max_tokens_in_cache is None:
            return self
        blocks = min(blocks_of(self.max_tokens_in_cache), kv_blocks(folder, self.engine))
        size = blocks * kv_block_bytes(folder.config, kv_precision(folder.config, self.engine))
        return replace(self, engine=self.engine.model_copy(update={"kv_cache_bytes": size}), max_tokens_in_cache=None)


def _given(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of parameters; an empty one or an unfilled `${placeholder}` counts as not given."""
    texts = {name: str(value.get("string_value", "")).strip() for name, value in raw.items()}
    return {name: text for name, text in texts.items() if text and not text.startswith("${")}


def _engine_options(given: Mapping[str, str], read: _Parameters, repository: Path) -> OpenVinoOptions:
    """Read the engine's own settings, `openvino_*`, beside what it has from TensorRT-LLM's parameters."""
    names = (*(OpenVinoSettings.model_fields.keys() - set(OpenVinoSettings.DECIDE_BYTES)), "num_draft_tokens")
    own = {name: given[PREFIX + name] for name in names if PREFIX + name in given}
    others = {
        "draft_dir": read.openvino_draft_dir and repository / read.openvino_draft_dir,
        "enable_prefix_caching": read.enable_kv_cache_reuse,
        "enable_chunked_context": read.enable_chunked_context,
        "attention_window": next(iter(read.max_attention_window_size), None),
        "sink_tokens": read.sink_token_length,
    }
    return OpenVinoOptions.judged({**own, **others}, f"Parameter {PREFIX}")
