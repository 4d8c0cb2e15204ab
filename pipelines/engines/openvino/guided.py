"""Guided decoding: answers that follow a JSON schema, a regular expression or a grammar, by llguidance.

The kinds of guides, and what each means, are those of TensorRT-LLM with the same backend
(`tensorrt_llm/_torch/pyexecutor/grammar_matcher.py`, `LLGuidanceMatcherFactory.create`). JSON has no white space but
one space after commas and colons: a model that prefers line breaks could otherwise produce them until max_tokens.
A schema's own `x-guidance` comes first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from pipelines.checkpoint.tokenizer import opened
from pipelines.domain.errors import UserError

Array = np.ndarray[Any, Any]

KINDS = ("json", "json_schema", "regex", "ebnf_grammar")
ANY_JSON = '{"type": "object"}'
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
BOUNDED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}
"""For schemas that want white space without saying how much."""
SPACING = {*COMPACT, *BOUNDED}
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
        found = opened(tokenizer_dir, "guided_decoding_backend=llguidance")
        try:
            text = found.tokenizer.to_str()
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=found.end_id)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"llguidance cannot read '{tokenizer_dir}': {_short(str(error))}") from error
        self._vocab_size = vocab_size

    def read(self, kind: str, text: str) -> Guide:
        """Read the guide of a request.

        Raises:
            UserError: the kind is unknown, or the guide is not valid.
        """
        if kind not in KINDS:
            raise UserError(f"guided_decoding_guide_type='{_short(kind)}' is unknown.", allowed=f"{', '.join(KINDS)}.")
        if kind != "json" and not text:
            raise UserError(f"guided_decoding_guide_type={kind} came without a guided_decoding_guide.")
        try:
            grammar = _grammar(kind, text)
            # also what llguidance warns of: it would leave that part of the guide unheeded
            _, faults = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        except ValueError as error:
            faults = [str(error)]
        if fault := next(iter(faults), ""):
            raise UserError(f"guided_decoding_guide='{_short(text)}' is not a valid {kind}: {_short(fault)}")
        return Guide(grammar, self._tokenizer, self._vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """A valid guide.

    Attributes:
        grammar: in llguidance's own form.
        tokenizer: of the model.
        vocab_size: logits of the model.
    """

    grammar: str
    tokenizer: Any
    vocab_size: int

    def follow(self, end_id: int) -> GuidedTokens:
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
            ValueError: the guide became too complex for llguidance's bounds.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ValueError(f"guided decoding: {_short(self._matcher.get_error())}")
        found = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        if 0 <= self._end_id < self._vocab_size:
            found[self._end_id] = found[self._tokenizers_end]
        return found

    def take(self, token: int) -> None:
        """Go on after a token."""
        if token != self._end_id:
            self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())


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
        given = json.loads(schema)
    except (ValueError, RecursionError):  # llguidance says what is wrong with it
        return COMPACT
    own = given.get("x-guidance") if isinstance(given, dict) else None
    if not isinstance(own, dict) or not own.keys() & SPACING:
        return COMPACT
    return {} if "whitespace_pattern" in own or own.get("whitespace_flexible") is False else BOUNDED


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
