"""Speculative decoding with a draft model: draft a few tokens, let the target model check them at once, repeat.

The target's answer is the same as without drafts, so the loop only affects speed. It behaves like TensorRT-LLM's
`triton_backend/all_models/inflight_batcher_llm/tensorrt_llm_bls/1/lib/decode.py` (one prompt, no beams; the draft is
sent as `draft_input_ids`, and one token more than the draft is requested); unlike there, answers can be streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
TensorsByName = dict[str, Array]
Infer = Callable[[TensorsByName], TensorsByName]
"""Inputs of a model -> its one response; empty when the request was stopped."""

NOT_FOR_THE_DRAFT = (
    "stop_words_list",  # only for the target: a draft must not be cut short
    "lora_task_id",
    "lora_weights",
    "lora_config",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
    "return_perf_metrics",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
FROM_THE_LAST = ("last_token_time_ns", "kv_cache_alloc_total_blocks")


@dataclass
class Speculation:
    """One request.

    Attributes:
        inputs: of the target model, batch of one.
        num_draft_tokens: how many tokens to draft at a time.
        use_draft_logits: whether the target weighs the draft's own logits instead of comparing tokens.
        made: tokens of the answer so far.
        guessed: tokens that the draft model proposed.
        accepted: tokens that the target accepted.
    """

    inputs: TensorsByName
    num_draft_tokens: int
    use_draft_logits: bool = False
    made: list[int] = field(default_factory=list)
    guessed: int = 0
    accepted: int = 0
    first: TensorsByName = field(default_factory=dict)
    last: TensorsByName = field(default_factory=dict)

    def rounds(self, draft: Infer, target: Infer, stopped: Callable[[], bool]) -> Iterator[list[int]]:
        """Yield the new tokens of each round until the answer is complete.

        Args:
            draft: calls the draft model.
            target: calls the target model.
            stopped: returns whether the client is gone.
        """
        limit = _number(self.inputs["request_output_len"])
        while len(self.made) < limit and not stopped():
            room = limit - len(self.made) - 1  # the target adds one token of its own to every draft
            guess, logits = self._guess(draft, min(self.num_draft_tokens, room))
            new = self._check(target, guess, logits)
            if not new:
                return
            self.made += new
            agreed = _agreement(guess, new)
            self.guessed += len(guess)
            self.accepted += agreed
            yield new
            # a token of the target follows the last accepted one, unless the target had reached its end
            if (guess and agreed == len(new)) or self._has_ended(new):
                return

    def _guess(self, draft: Infer, count: int) -> tuple[list[int], Array | None]:
        if count < 1:
            return [], None
        inputs = {name: values for name, values in self._so_far().items() if name not in NOT_FOR_THE_DRAFT}
        inputs["request_output_len"] = inputs["min_tokens"] = _scalar(count)
        if self.use_draft_logits:
            inputs["return_generation_logits"] = np.array([[True]])
        outputs = draft(inputs)
        guess = _tokens(outputs)
        if not guess or "generation_logits" not in outputs or not self.use_draft_logits:
            return guess, None
        return guess, outputs["generation_logits"][:, 0, -len(guess) :]  # [1, beams, n, vocab] -> [1, n, vocab]

    def _check(self, target: Infer, guess: list[int], logits: Array | None) -> list[int]:
        inputs = self._so_far()
        inputs["request_output_len"] = _scalar(len(guess) + 1)
        if "min_tokens" in inputs:
            left = _number(inputs["min_tokens"]) - len(self.made)
            inputs["min_tokens"] = _scalar(max(0, min(left, len(guess) + 1)))
        if guess:
            inputs["draft_input_ids"] = np.array([guess], dtype=np.int32)
        if logits is not None:
            inputs["draft_logits"] = logits
        self.last = target(inputs)
        self.first = self.first or self.last
        return _tokens(self.last)

    def _so_far(self) -> TensorsByName:
        """Return the inputs with the answer so far appended to the prompt, which is not returned."""
        ids = np.concatenate([self.inputs["input_ids"][0], np.array(self.made, dtype=np.int32)])
        return {
            **{name: values for name, values in self.inputs.items() if name != "streaming"},
            "input_ids": ids[None].astype(np.int32),
            "input_lengths": _scalar(len(ids)),
            "exclude_input_in_output": np.array([[True]]),
        }

    def _has_ended(self, new: list[int]) -> bool:
        """Return whether the end token is among the new tokens, or a stop word ends the answer."""
        if "end_id" in self.inputs and _number(self.inputs["end_id"]) in new:
            return True
        return any(self.made[-len(word) :] == word for word in _words(self.inputs.get("stop_words_list")))

    def statistics(self) -> TensorsByName:
        """Return the outputs besides tokens, of the first round or the last as each is defined, and our counts."""
        found = {name: values for name, values in self.first.items() if name not in ("output_ids", "sequence_length")}
        found |= {name: self.last[name] for name in FROM_THE_LAST if name in self.last}
        if "num_output_tokens" in found:
            found["num_output_tokens"] = _scalar(len(self.made))
        if "return_perf_metrics" in self.inputs and self.inputs["return_perf_metrics"].any():
            rate = self.accepted / self.guessed if self.guessed else 0.0
            found["acceptance_rate"] = np.array([[rate]], dtype=np.float32)
            found["total_accepted_draft_tokens"] = _scalar(self.accepted)
            found["total_draft_tokens"] = _scalar(self.guessed)
        return found


def as_output(tokens: list[int]) -> TensorsByName:
    """Return tokens in the shape of the engine's model: ids [1, 1, n], lengths [1, 1]."""
    return {"output_ids": np.array([[tokens]], dtype=np.int32), "sequence_length": _scalar(len(tokens))}


def _tokens(outputs: TensorsByName) -> list[int]:
    if "output_ids" not in outputs:
        return []
    tokens: list[int] = outputs["output_ids"][0, 0, : _number(outputs["sequence_length"])].tolist()
    return tokens


def _agreement(guess: list[int], new: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    for count, (theirs, ours) in enumerate(zip(guess, new, strict=False)):
        if theirs != ours:
            return count
    return min(len(guess), len(new))


def _words(given: Array | None) -> Iterator[list[int]]:
    """Stop words in TensorRT-LLM's layout: [1, 2, n], row 0 the tokens, row 1 where each word ends, then -1."""
    if given is None:
        return
    begin = 0
    for end in given[0, 1].tolist():
        if end > begin:
            yield given[0, 0, begin:end].tolist()
            begin = end


def _scalar(value: int) -> Array:
    return np.array([[value]], dtype=np.int32)


def _number(values: Array) -> int:
    return int(values.reshape(-1)[0])
