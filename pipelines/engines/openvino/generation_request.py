"""A generation request for one prompt, and the model's limits on it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from pipelines.checkpoint.tokenizer import opened
from pipelines.domain.errors import UserError
from pipelines.engines.openvino.prompt_table import PromptTable

# Guided decoding: answers that follow a JSON schema, a regular expression or a grammar, by llguidance.
#
# The kinds of guides, and what each means, are those of TensorRT-LLM with the same backend
# (`tensorrt_llm/_torch/pyexecutor/grammar_matcher.py`, `LLGuidanceMatcherFactory.create`). JSON has no white space but
# one space after commas and colons: a model that prefers line breaks could otherwise produce them until max_tokens.
# A schema's own `x-guidance` comes first.

Array = np.ndarray[Any, Any]

KINDS = ("json", "json_schema", "regex", "ebnf_grammar")
ANY_JSON = '{"type": "object"}'
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
BOUNDED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}
"""For schemas that want white space without saying how much."""
SPACING = {*COMPACT, *BOUNDED}
NO_TOKEN = "the guide allows no next token"
SHOWN = 200
"""Characters of a guide and of a parser's complaint that an error shows."""


class Guides:
    """Reads guides for one tokenizer."""

    def __init__(self, tokenizer_dir: Path, vocab_size: int) -> None:
        """Read tokenizer.json and the end token.

        Args:
            tokenizer_dir: a Hugging Face tokenizer.
            vocab_size: of the model, which may be larger than the tokenizer's.

        Raises:
            UserError: there is no tokenizer.json, or llguidance cannot read it.
        """
        folder = opened(tokenizer_dir, "guided_decoding_backend=llguidance")
        try:
            text = folder.tokenizer.to_str()
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=folder.end_id)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"llguidance cannot read '{tokenizer_dir}': {_short(str(error))}") from error
        self._vocab_size = vocab_size

    def read(self, kind: str, text: str) -> "Guide":
        """Read the guide of a request.

        Raises:
            UserError: the kind is unknown, or the guide is not valid.
        """
        if kind not in KINDS:
            raise UserError(
                f"guided_decoding_guide_type='{_short(kind)}' is unknown.", allowed=f"It is one of {', '.join(KINDS)}."
            )
        if kind != "json" and not text:
            raise UserError(f"guided_decoding_guide_type={kind} came without a guided_decoding_guide.")
        try:
            grammar = _grammar(kind, text)
            # also what llguidance warns of: it would leave that part of the guide unheeded
            _, faults = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
            guide = Guide(grammar, self._tokenizer, self._vocab_size)
            if not faults:
                guide.follow(guide.tokenizer.eos_token).allowed()  # a regex that no text matches is valid until then
        except ValueError as error:
            faults = [str(error)]
        if fault := next(iter(faults), ""):
            raise UserError(f"guided_decoding_guide='{_short(text)}' is not a valid {kind}: {_short(fault)}")
        return guide


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """A valid guide.

    Attributes:
        grammar: in llguidance's own form.
        vocab_size: logits of the model.
    """

    grammar: str
    tokenizer: Any
    vocab_size: int

    def follow(self, end_id: int) -> "GuidedTokens":
        """Start an answer that `end_id` may end where the guide allows it."""
        return GuidedTokens(self, end_id)


class GuidedTokens:
    """Which tokens may come next in one answer."""

    def __init__(self, guide: Guide, end_id: int) -> None:
        self._matcher = llguidance.LLMatcher(guide.tokenizer, guide.grammar)
        self._vocab_size = guide.vocab_size
        self._tokenizers_end, self._end_id = guide.tokenizer.eos_token, end_id

    def allowed(self) -> Array:
        """Return which tokens may come next, bool [V].

        Raises:
            ValueError: no token may come next, or the guide became too complex for llguidance's bounds.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            fault = self._matcher.get_error().partition("\n<state>")[0]
            raise ValueError(f"guided decoding: {NO_TOKEN if fault == 'NoExtensionBias' else _short(fault)}")
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        if 0 <= self._end_id < self._vocab_size:
            allowed[self._end_id] = allowed[self._tokenizers_end]
        return allowed

    def take(self, token: int) -> None:
        """Go on after a token."""
        if token != self._end_id:
            self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether nothing may follow. A matcher that failed has stopped too; `allowed` says why."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())


def _grammar(kind: str, text: str) -> str:
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(text))
    if kind == "ebnf_grammar":  # Lark, as in TensorRT-LLM with this backend, or GBNF
        return str(llguidance.grammar_from("ebnf", text))
    schema = ANY_JSON if kind == "json" else text
    return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_spacing(schema)))


def _spacing(schema: str) -> Any:
    """Return how JSON is spaced, as far as the schema itself does not say it."""
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):  # llguidance says what is wrong with it
        return COMPACT
    own = parsed.get("x-guidance") if isinstance(parsed, dict) else None
    if not isinstance(own, dict) or not own.keys() & SPACING:
        return COMPACT
    return {} if "whitespace_pattern" in own or own.get("whitespace_flexible") is False else BOUNDED


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."


TokenSequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    Attributes:
        prompt: token ids, int64 [T]; from the vocabulary's size on they name rows of the table.
        min_tokens: output tokens before which `end_id` cannot be chosen.
        end_id: token that ends the generation and is not returned; -1 means none.
        pad_id: fills the shorter beams of a response.
        stop_words: token sequences that end the generation; they are returned.
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
        table: embeddings that the prompt names; None means none.
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
    table: PromptTable | None = None
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
        """Whether tokens are sampled; otherwise the likeliest one is chosen, as a temperature of 1e-6 would."""
        return self.temperature > 1e-6 and self.top_k != 1 and (self.top_k > 1 or self.top_p > 0)

    @property
    def needs_logits(self) -> bool:
        """Whether the pipeline cannot serve it, which neither exposes nor changes logits.

        Its logits also depend in the last bits on what is computed together, so that now and then a seed would give
        another answer beside other requests.
        """
        seeded = self.seed is not None and self.samples and self.beam_width == 1
        changed = self.bias is not None or bool(self.bad_words) or self.guide is not None
        few = self.top_log_probs > 0 or self.context_log_probs > 0
        # the pipeline's penalty takes every id of the prompt for a token
        changed = changed or (self.table is not None and self.repetition_penalty != 1)
        return changed or seeded or few or self.context_logits or self.generation_logits


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a model and its configuration on requests.

    Attributes:
        vocab_size: token ids are below this.
        exclude_input: default for requests that do not specify it.
        decoupled: whether several responses to one request are possible.
        lora_tasks: ids of the LoRA adapters.
        draft_model: whether a draft model serves requests without an adapter.
        guides: reads guides of requests; None means that the model was loaded without guided decoding.
        table_rows: most rows of a request's prompt table; 0 means that the engine has none.
        hidden_size: values of a row.
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
    table_rows: int = 0
    hidden_size: int = 0
    fold_ids: bool = False
