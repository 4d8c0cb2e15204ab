"""Read the parameters of the Triton model `tensorrt_llm` for the CPU engine.

The keys are those of TensorRT-LLM's backend, plus `openvino_*`. Keys about GPUs, MPI and LoRA caches have no effect
here and are not read; values that would change the output and are not supported are rejected when the model loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.engines.config import OpenVinoSettings
from pipelines.engines.openvino.memory import blocks_of
from pipelines.engines.openvino.runtime import (
    EngineFolder,
    OpenVinoOptions,
    kv_block_bytes,
    kv_blocks,
    kv_precision,
)

PREFIX = "openvino_"
FALLBACK_TOKENIZER = "preprocessing/1/tokenizer"
DECODING_MODES = ("top_k", "top_p", "top_k_top_p", "beam_search")
BATCHING = ("inflight_fused_batching", "inflight_batching")
GUIDED = "llguidance"
POLICIES = ("guaranteed_no_evict", "max_utilization")
NOT_HERE = ("encoder_model_path",)


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Options with which a server runs an engine.

    Attributes:
        engine_dir: the engine folder.
        engine: run-time options of the engine.
        lora_dir: folder with an adapter in each <task id>/, or None.
        tokenizer_dir: tokenizer of the model, for characters that span tokens and for guides; or None.
        guided: whether requests may have guides.
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
        parameters = _Parameters(config.get("parameters", {}))
        parameters.word("gpt_model_type", BATCHING[0], BATCHING)
        parameters.word("decoding_mode", DECODING_MODES[0], DECODING_MODES)
        for name in (name for name in NOT_HERE if name in parameters):
            raise UserError(
                f"Parameter {name}='{parameters.text(name, '')}' is not supported by the CPU engine.",
                todo="Leave it out.",
            )
        tokenizer = repository / parameters.text("tokenizer_dir", FALLBACK_TOKENIZER)
        return cls(
            engine_dir=repository / parameters.text("gpt_model_path", "tensorrt_llm/1/engine"),
            engine=_engine_options(parameters, repository),
            lora_dir=parameters.place("lora_prefetch_dir", repository),
            tokenizer_dir=tokenizer if tokenizer.is_dir() else None,
            guided=parameters.word("guided_decoding_backend", "", ("", GUIDED)) == GUIDED,
            max_tokens_in_cache=parameters.whole("max_tokens_in_paged_kv_cache", None),
            max_beam_width=parameters.whole("max_beam_width", None),
            max_queue_size=parameters.whole("openvino_max_queue_size", 0) or 0,
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            exclude_input=parameters.flag("exclude_input_in_output", default=False),
            guaranteed_no_evict=parameters.word("batch_scheduler_policy", POLICIES[0], POLICIES) == POLICIES[0],
            fold_token_ids=parameters.flag("openvino_fold_token_ids", default=False),
            cancellation_check_period_ms=parameters.whole("cancellation_check_period_ms", 100) or 100,
            stats_check_period_ms=parameters.whole("stats_check_period_ms", 100) or 100,
        )

    def fitted(self, folder: EngineFolder) -> ServingOptions:
        """Return these options with the KV cache reduced to `max_tokens_in_cache`."""
        if self.max_tokens_in_cache is None:
            return self
        blocks = min(blocks_of(self.max_tokens_in_cache), kv_blocks(folder, self.engine))
        size = blocks * kv_block_bytes(folder.config, kv_precision(folder.config, self.engine))
        return replace(self, engine=self.engine.model_copy(update={"kv_cache_bytes": size}), max_tokens_in_cache=None)


class _Parameters:
    """String parameters; an empty one or an unfilled `${placeholder}` counts as not given."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        texts = {name: str(value.get("string_value", "")).strip() for name, value in raw.items()}
        self._given = {name: text for name, text in texts.items() if text and not text.startswith("${")}

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str, default: str) -> str:
        return self._given.get(name, default)

    def word(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        word = self.text(name, default)
        if word not in choices:
            allowed = f"Choose one of {', '.join(filter(None, choices))}."
            raise UserError(f"Parameter {name}='{word}' is not supported by the CPU engine.", allowed=allowed)
        return word

    def flag(self, name: str, *, default: bool) -> bool:
        word = self.text(name, str(default)).lower()
        if word not in ("true", "1", "false", "0"):
            raise UserError(f"Parameter {name}='{word}' is not a boolean.", allowed="Choose true or false.")
        return word in ("true", "1")

    def whole(self, name: str, default: int | None, *, least: int = 1) -> int | None:
        if name not in self._given:
            return default
        return _number(name, self._given[name], least)

    def place(self, name: str, repository: Path) -> Path | None:
        """Return a path, resolved from the repository if it is relative."""
        return repository / self._given[name] if name in self._given else None


def _engine_options(parameters: _Parameters, repository: Path) -> OpenVinoOptions:
    """Read the engine's own settings, `openvino_*`, and the parameters of TensorRT-LLM's backend that it supports."""
    names = (*(OpenVinoSettings.model_fields.keys() - set(OpenVinoSettings.DECIDE_BYTES)), "num_draft_tokens")
    own = {name: parameters.text(PREFIX + name, "") for name in names if PREFIX + name in parameters}
    if draft_dir := parameters.place(f"{PREFIX}draft_dir", repository):
        own["draft_dir"] = str(draft_dir)
    others = {
        "enable_prefix_caching": parameters.flag("enable_kv_cache_reuse", default=True),
        "enable_chunked_context": parameters.flag("enable_chunked_context", default=False),
        "attention_window": _window(parameters),
        "sink_tokens": parameters.whole("sink_token_length", 0, least=0) or 0,
    }
    return OpenVinoOptions.judged({**own, **others}, f"Parameter {PREFIX}")


def _number(name: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise UserError(f"Parameter {name}='{text}' is not an integer.") from error
    if value < least:
        raise UserError(f"Parameter {name}={value} is not valid.", allowed=f"It must be at least {least}.")
    return value


def _window(parameters: _Parameters) -> int | None:
    """Read a list of windows, one per layer and repeated over the layers; here all must be equal."""
    name = "max_attention_window_size"
    if name not in parameters:
        return None
    windows = {_number(name, part.strip(), 1) for part in parameters.text(name, "").split(",")}
    if len(windows) > 1:
        raise UserError(
            f"Parameter {name}='{parameters.text(name, '')}' is not supported by the CPU engine.",
            allowed="All of its layers share one window.",
            todo=f"Set one number, e.g. {max(windows)}.",
        )
    return windows.pop()
