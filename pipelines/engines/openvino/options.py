"""Run-time options of the OpenVINO engine; none of them affects what is built."""

from __future__ import annotations

from pathlib import Path

from pipelines.engines.openvino.blocks import Eviction
from pipelines.engines.openvino.window import eviction_of
from pipelines.settings.base import Positive
from pipelines.settings.engine import OpenVinoSettings


class OpenVinoOptions(OpenVinoSettings):
    """The settings under `engine.openvino`, and settings of other groups that affect how the engine runs.

    Attributes:
        enable_prefix_caching: reuse KV blocks of equal prompt prefixes (TensorRT-LLM: enable_kv_cache_reuse).
        enable_chunked_context: split prompts longer than max_num_tokens over several iterations.
        attention_window: tokens of a sequence that the KV cache keeps while it generates (TensorRT-LLM:
            max_attention_window_size); None means all. See `window`.
        sink_tokens: how many of these are the first tokens, which always stay (TensorRT-LLM: sink_token_length).
        draft_dir: engine folder of a draft model, whose tokens this engine verifies; None means none.
        num_draft_tokens: draft tokens per iteration and sequence.
    """

    enable_prefix_caching: bool = True
    enable_chunked_context: bool = False
    attention_window: int | None = None
    sink_tokens: int = 0
    draft_dir: Path | None = None
    num_draft_tokens: Positive = 4

    def eviction(self, max_seq_len: int) -> Eviction | None:
        """Return which tokens of a sequence the KV cache keeps while it generates, or None for all; see `window`.

        Raises:
            UserError: the engine does not support the window.
        """
        return eviction_of(
            self.attention_window,
            self.sink_tokens,
            max_seq_len,
            reuse=self.enable_prefix_caching,
            drafting=self.draft_dir is not None,
        )
