"""How the OpenVINO engine runs; nothing here changes what is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.engines.openvino.blocks import Eviction
from pipelines.engines.openvino.window import eviction_of

PRECISIONS = ("auto", "f32", "bf16")
KV_PRECISIONS = ("auto", "f32", "bf16", "f16", "u8", "u4")


@dataclass(frozen=True, slots=True)
class OpenVinoOptions:
    """Run-time options.

    Attributes:
        inference_precision: type of the arithmetic between quantized products; "auto" is bf16 where the CPU has
            native bf16 (AMX or AVX512_BF16) and f32 elsewhere, where emulated bf16 is about 50 times slower.
        num_threads: threads of the CPU plugin; None is all physical cores.
        kv_cache_precision: storage of the paged KV cache; "auto" is u8 for a checkpoint with an 8-bit KV cache and
            the inference precision otherwise.
        kv_cache_bytes: size of the paged KV cache; None is room for 32 requests of max_seq_len tokens, at most 1 GiB
            and at least one request. A pool full of cached prefixes is searched for the oldest, so larger is slower.
        enable_prefix_caching: reuse KV blocks of equal prompt prefixes (TensorRT-LLM: enable_kv_cache_reuse).
        enable_chunked_context: split prompts longer than max_num_tokens over several iterations.
        attention_window: tokens of a sequence that the KV cache keeps while it generates (TensorRT-LLM:
            max_attention_window_size); None is all. See `window`.
        sink_tokens: of them, tokens of the beginning that always stay (TensorRT-LLM: sink_token_length).
        draft_dir: engine folder of a draft model, whose guesses this engine checks; None is none.
        num_draft_tokens: guesses per iteration and sequence.
    """

    inference_precision: str = "auto"
    num_threads: int | None = None
    kv_cache_precision: str = "auto"
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_context: bool = False
    attention_window: int | None = None
    sink_tokens: int = 0
    draft_dir: Path | None = None
    num_draft_tokens: int = 4

    def __post_init__(self) -> None:
        """Refuse unknown words and sizes at once.

        Raises:
            UserError: naming the option, the value and what is allowed.
        """
        for name, known in (("inference_precision", PRECISIONS), ("kv_cache_precision", KV_PRECISIONS)):
            given = getattr(self, name)
            if given not in known:
                raise UserError(
                    f"engine.{name}='{given}' is not known.",
                    allowed=f"Choose one of {', '.join(known)}.",
                    todo=did_you_mean(given, known),
                )
        for name in ("num_threads", "kv_cache_bytes", "num_draft_tokens"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UserError(f"engine.{name}={given} is not possible.", allowed="It must be at least 1.")

    def eviction(self, max_seq_len: int) -> Eviction | None:
        """Return what of a sequence leaves the KV cache while it generates, or None; see `window`.

        Raises:
            UserError: the window is not possible.
        """
        return eviction_of(
            self.attention_window,
            self.sink_tokens,
            max_seq_len,
            reuse=self.enable_prefix_caching,
            drafting=self.draft_dir is not None,
        )
