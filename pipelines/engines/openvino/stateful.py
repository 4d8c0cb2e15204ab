"""Run the engine's graph statefully, one sequence at a time: slower than the paged pipeline, but with logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openvino as ov

from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.precision import inference_precision
from pipelines.engines.openvino.runtime import FIRST_TOKENS, EngineFolder, properties
from pipelines.engines.openvino.scoring import MAX_LOGITS, with_chosen_logits

Array = np.ndarray[Any, Any]


class StatefulModel:
    """The compiled graph; sequences share its weights."""

    def __init__(self, folder: EngineFolder, options: OpenVinoOptions) -> None:
        """Load and compile."""
        core = ov.Core()
        self.piece = min(folder.limits.max_num_tokens, max(1, MAX_LOGITS // folder.config.vocab_size))
        with folder.loading():
            model = with_chosen_logits(folder.read_model())
            self.compiled = core.compile_model(
                model, "CPU", properties(folder.config, options, inference_precision(options))
            )
            first = StatefulSequence(self)
            for tokens in (FIRST_TOKENS, 1):  # as a prompt, and as each token after it
                first.feed([0] * tokens)


class StatefulSequence:
    """One sequence with its own KV state."""

    def __init__(self, model: StatefulModel) -> None:
        self._request = model.compiled.create_infer_request()
        self._piece = model.piece
        self._length = 0

    def feed(self, tokens: Sequence[int] | Array) -> Array:
        """Append tokens to the sequence; return the logits after the last one, float32 [V]."""
        *_, last = self.pieces(tokens, all_logits=False)
        return np.array(last[-1])

    def pieces(self, tokens: Sequence[int] | Array, *, all_logits: bool) -> Iterator[Array]:
        """Append tokens to the sequence.

        Yields:
            of each piece of them, the logits after every token, or only after the last one of all; float32 [N, V].
        """
        for start in range(0, len(tokens), self._piece):
            piece = np.asarray(tokens[start : start + self._piece], dtype=np.int64)
            last = start + len(piece) == len(tokens)
            rows = np.arange(len(piece))
            if not all_logits:
                rows = rows[-1:] if last else rows[:0]
            yield self._infer(piece, rows)

    def _infer(self, piece: Array, rows: Array) -> Array:
        past, self._length = self._length, self._length + len(piece)
        inputs = {
            "input_ids": piece[None],
            "attention_mask": np.ones((1, self._length), dtype=np.int64),
            "position_ids": np.arange(past, self._length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
            "logit_rows": rows.astype(np.int64),
        }
        return np.array(self._request.infer(inputs)["logits"][0], dtype=np.float32)
