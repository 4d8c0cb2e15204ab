"""A generation request for one prompt, and the model's limits on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.engines.openvino.guided import Guide, Guides

Array = np.ndarray[Any, Any]
TokenSequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    Attributes:
        prompt: token ids, int64 [T].
        max_tokens: most output tokens.
        min_tokens: output tokens before which `end_id` cannot be chosen.
        end_id: token that ends the generation and is not returned; -1 means none.
        pad_id: fills the shorter beams of a response.
        stop_words: token sequences that end the generation; they are returned.
        bad_words: token sequences that are never generated.
        temperature: divides the logits.
        top_k: sample from this many likeliest tokens; 0 means all.
        top_p: sample from tokens up to this cumulative probability; 0 means off.
        seed: seed of the sampler; None draws anew every time.
        repetition_penalty: penalty on tokens of prompt and output; 1 means none.
        presence_penalty: penalty applied once to every token of the output; 0 means none.
        frequency_penalty: penalty for every occurrence in the output; 0 means none.
        beam_width: number of beams; 1 means no beam search.
        length_penalty: beams are ranked by log probability / length ** length_penalty.
        early_stopping: whether beam search ends once there are beam_width finished candidates.
        num_return_sequences: outputs for the prompt; 0 means not given: one, or all beams.
        bias: added to the logits, float32 [V]; None means none.
        guide: what the output must follow; None means nothing.
        streaming: whether to send a response for every new part of the output.
        exclude_input: whether to leave the prompt out of the output.
        lora_task_id: id of the LoRA adapter to use; None means none.
        top_log_probs: likeliest tokens of each place of the output whose log probabilities are returned; 0 means none.
        context_log_probs: likewise for the places after each token of the prompt, besides the log probabilities of its
            own tokens.
        log_probs, context_logits, generation_logits, perf_metrics, num_input_tokens, num_output_tokens: extra outputs.
    """

    prompt: Array
    max_tokens: int
    min_tokens: int = 0
    end_id: int = -1
    pad_id: int = 0
    stop_words: TokenSequences = ()
    bad_words: TokenSequences = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    beam_width: int = 1
    length_penalty: float = 0.0
    early_stopping: bool = True
    num_return_sequences: int = 0
    bias: Array | None = None
    guide: Guide | None = None
    streaming: bool = False
    exclude_input: bool = False
    lora_task_id: int | None = None
    top_log_probs: int = 0
    context_log_probs: int = 0
    log_probs: bool = False
    context_logits: bool = False
    generation_logits: bool = False
    perf_metrics: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled; otherwise the likeliest one is chosen."""
        return self.temperature > 0 and self.top_k != 1 and (self.top_k > 1 or self.top_p > 0)

    @property
    def needs_logits(self) -> bool:
        """Whether the pipeline cannot serve it, which neither exposes nor changes logits.

        Its logits also depend in the last bits on what is computed together, so that now and then a seed would give
        another answer beside other requests.
        """
        seeded = self.seed is not None and self.samples and self.beam_width == 1
        changed = self.bias is not None or bool(self.bad_words) or self.guide is not None
        few = self.top_log_probs > 0 or self.context_log_probs > 0
        return changed or seeded or few or self.context_logits or self.generation_logits


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a model and its configuration on requests.

    Attributes:
        vocab_size: token ids are below this.
        max_beam_width: largest beam width of the engine.
        exclude_input: default for requests that do not specify it.
        decoupled: whether several responses to one request are possible.
        lora_tasks: ids of the LoRA adapters.
        draft_model: whether a draft model serves requests without an adapter.
        guides: reads guides of requests; None means that the model was loaded without guided decoding.
        fold_ids: whether to take token ids beyond the vocabulary modulo its size, for load generators that send random
            numbers.
    """

    vocab_size: int
    max_beam_width: int = 1
    exclude_input: bool = False
    decoupled: bool = True
    lora_tasks: frozenset[int] = frozenset()
    draft_model: bool = False
    guides: Guides | None = None
    fold_ids: bool = False
