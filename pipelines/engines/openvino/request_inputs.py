"""Read a client's request: tensors named as TensorRT-LLM's backend names them -> `GenerationRequest`.

Nothing is ignored silently: an input that the engine does not support, or an invalid value, is rejected by name.
Defaults are those of TensorRT-LLM's sampling configuration; notably temperature alone does not sample, because neither
top_k nor top_p then leaves a choice.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.engines.openvino.generation_request import GenerationRequest, Guide, Guides, ModelLimits, TokenSequences
from pipelines.engines.openvino.prompt_table import PromptTable

# Inputs of TensorRT-LLM's backend that the CPU engine does not support, with the reasons.

Array = np.ndarray[Any, Any]

_GPU = "Use the GPU repository for it, or leave it out."
_ENCODER = "the model has no encoder"
_LORA = "the CPU engine loads its LoRA adapters from lora_prefetch_dir when it starts; send lora_task_id alone"
_DRAFT = "the CPU engine has no speculative decoding with draft tokens from the client"
_RETENTION = "the CPU engine evicts its KV blocks by age only"
_LOOKAHEAD = "the CPU engine has no lookahead decoding"
_MROPE = "the model has no multimodal positions"
_TOP_P = "the CPU engine keeps top_p constant"

REFUSED: dict[str, str] = {
    "encoder_input_features": _ENCODER,
    "encoder_output_lengths": _ENCODER,
    "cross_attention_mask": _ENCODER,
    "skip_cross_attn_blocks": _ENCODER,
    "lora_weights": _LORA,
    "lora_config": _LORA,
    "draft_input_ids": _DRAFT,
    "draft_logits": _DRAFT,
    "draft_acceptance_threshold": _DRAFT,
    "mrope_rotary_cos_sin": _MROPE,
    "mrope_position_deltas": _MROPE,
    "context_phase_params": "the CPU engine runs prefill and decode in one place",
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
    "lookahead_window_size": _LOOKAHEAD,
    "lookahead_ngram_size": _LOOKAHEAD,
    "lookahead_verification_set_size": _LOOKAHEAD,
    "runtime_top_p_min": _TOP_P,
    "runtime_top_p_reset_ids": _TOP_P,
}
"""Input -> reason; rejected whenever it is not empty."""

NEUTRAL: dict[str, tuple[float, str]] = {
    "runtime_top_p_decay": (1.0, _TOP_P),
    "beam_search_diversity_rate": (0.0, "the CPU engine's beam search has no diversity rate"),
}
"""Input -> (value without effect, reason); rejected if it has any other value."""


def refuse_inputs(inputs: Mapping[str, Array]) -> None:
    """Reject inputs that the CPU engine does not support.

    Raises:
        UserError: naming the input and why.
    """
    for name, values in inputs.items():
        if name in REFUSED:
            raise UserError(f"{name} is not supported here: {REFUSED[name]}.", todo=_GPU)
        if name in NEUTRAL and (values != NEUTRAL[name][0]).any():
            raise UserError(f"{name} is not supported here: {NEUTRAL[name][1]}.", todo=_GPU)
    # preprocessing always sends one padding token, which decoder-only models of the GPU backend expect
    decoder = inputs.get("decoder_input_ids")
    if decoder is not None and decoder.shape[-1] > 1:
        raise UserError(f"decoder_input_ids (decoder_text_input) is not supported here: {_ENCODER}.", todo=_GPU)


MAX_RETURN_SEQUENCES = 64
MAX_LENGTH_PENALTY = 1000
MAX_TOP_LOG_PROBS = 1000
LEAST_REPETITION_PENALTY = 1e-30
"""Logits divided by much less are infinite in float32, and the tokens then arbitrary."""


def read_requests(inputs: Mapping[str, Array], limits: ModelLimits) -> list[GenerationRequest]:
    """Read the prompts of one request.

    Returns:
        one `GenerationRequest` per prompt.

    Raises:
        UserError: naming the input, the value and what is allowed.
    """
    filled = {name: values for name, values in inputs.items() if values.size}
    refuse_inputs(filled)
    ids = filled.get("input_ids")
    if ids is None:
        raise UserError("input_ids is missing or empty.", allowed="A prompt needs at least one token.")
    ids = ids.reshape(1, -1) if ids.ndim == 1 else ids
    if not limits.decoupled and len(ids) > 1:
        raise UserError(
            f"A batch of {len(ids)} prompts was sent to a model that sends one response per request.",
            todo="Send one prompt per request, or create the repository with decoupled_mode=true.",
        )
    if "request_output_len" not in filled:
        raise UserError("request_output_len (max_tokens) is missing.")
    rows = [_Row(filled, row, len(ids)) for row in range(len(ids))]
    return [_request(row, ids[row.index], limits) for row in rows]


class _Row:
    def __init__(self, inputs: Mapping[str, Array], index: int, batch: int) -> None:
        self._inputs, self.index, self._batch = inputs, index, batch

    def value(self, name: str, default: Any) -> Any:
        """Return the scalar of an input as a Python value."""
        values = self._inputs.get(name)
        if values is None:
            return default
        return values.reshape(-1).tolist()[self.index if values.size >= self._batch else 0]

    def vector(self, name: str) -> Array | None:
        """Return the row of an input as a vector."""
        values = self._inputs.get(name)
        return None if values is None else values.reshape(self._batch, -1)[self.index]

    def matrix(self, name: str) -> Array | None:
        """Return the matrix of an input; one for each prompt, or the same for all."""
        values = self._inputs.get(name)
        if values is None:
            return None
        return values if values.ndim == 2 else values[self.index if len(values) == self._batch else 0]

    def number(self, name: str, default: Any, allowed: str, fits: Callable[[Any], bool]) -> Any:
        """Return the scalar of an input if it is valid."""
        if name not in self._inputs:
            return default
        number = self.value(name, default)
        if not math.isfinite(number) or not fits(number):
            raise UserError(f"{name}={number} is not valid.", allowed=f"It must be {allowed}.")
        return number


def _request(row: _Row, ids: Array, limits: ModelLimits) -> GenerationRequest:
    table = _table(row, limits)
    request = GenerationRequest(
        prompt=_prompt(row, ids, limits, table),
        max_tokens=row.number(
            "request_output_len", 0, "at least 1 (it is max_tokens of the ensemble)", lambda n: n > 0
        ),
        min_tokens=row.number("min_tokens", 0, "at least 0", lambda n: n >= 0),
        end_id=row.value("end_id", -1),
        pad_id=row.value("pad_id", 0),
        stop_words=_words(row, "stop_words_list"),
        bad_words=_words(row, "bad_words_list"),
        temperature=row.number("temperature", 1.0, "a number of at least 0", lambda t: t >= 0),
        top_k=row.number("runtime_top_k", 0, "at least 0 (0 means all)", lambda k: k >= 0),
        top_p=row.number("runtime_top_p", 0.0, "from 0 (off) to 1", lambda p: 0 <= p <= 1),
        seed=row.value("seed", None),
        repetition_penalty=row.number(
            "repetition_penalty",
            1.0,
            f"at least {LEAST_REPETITION_PENALTY:g} (1 means none)",
            lambda p: p >= LEAST_REPETITION_PENALTY,
        ),
        presence_penalty=row.number("presence_penalty", 0.0, "from -2 to 2", lambda p: -2 <= p <= 2),
        frequency_penalty=row.number("frequency_penalty", 0.0, "from -2 to 2", lambda p: -2 <= p <= 2),
        beam_width=_beam_width(row, limits),
        length_penalty=row.number("len_penalty", 0.0, "between -1000 and 1000", lambda p: abs(p) < MAX_LENGTH_PENALTY),
        early_stopping=bool(row.value("early_stopping", True)),
        num_return_sequences=row.number(
            "num_return_sequences", 0, f"from 1 to {MAX_RETURN_SEQUENCES}", lambda n: 1 <= n <= MAX_RETURN_SEQUENCES
        ),
        bias=_bias(row, limits.vocab_size),
        guide=_guide(row, limits.guides),
        streaming=bool(row.value("streaming", False)),
        exclude_input=bool(row.value("exclude_input_in_output", limits.exclude_input)),
        lora_task_id=_lora_task(row, limits),
        table=table,
        top_log_probs=_likeliest(row, "return_top_log_probs"),
        context_log_probs=_likeliest(row, "return_context_log_probs"),
        log_probs=bool(row.value("return_log_probs", False)),
        context_logits=bool(row.value("return_context_logits", False)),
        generation_logits=bool(row.value("return_generation_logits", False)),
        perf_metrics=bool(row.value("return_perf_metrics", False)),
        num_input_tokens=bool(row.value("return_num_input_tokens", False)),
        num_output_tokens=bool(row.value("return_num_output_tokens", False)),
    )
    _check_together(request, limits)
    return request


def _likeliest(row: _Row, name: str) -> int:
    return int(row.number(name, 0, f"from 1 to {MAX_TOP_LOG_PROBS}", lambda n: 1 <= n <= MAX_TOP_LOG_PROBS))


def _check_together(request: GenerationRequest, limits: ModelLimits) -> None:
    if not limits.decoupled and (request.streaming or (request.num_return_sequences > 1 and request.beam_width == 1)):
        what = "streaming" if request.streaming else f"num_return_sequences={request.num_return_sequences}"
        raise UserError(
            f"{what} needs several responses to one request; this model sends one.",
            todo="Create the repository with decoupled_mode=true.",
        )
    if request.table is not None and request.context_log_probs:
        raise UserError(
            "return_context_log_probs together with prompt_embedding_table is not possible: rows of the table are no"
            " tokens, so they have no log probabilities.",
            todo="Leave one of the two out.",
        )
    if limits.draft_model and request.lora_task_id is None and not request.needs_logits:
        # it would stop openvino_genai 2026.4 for every client
        what, instead = f"beam_width={request.beam_width}" if request.beam_width > 1 else "", "Leave it out,"
        if request.samples and not what:
            what = f"sampling (runtime_top_k={request.top_k}, runtime_top_p={request.top_p})"
            instead = (
                "Ask for the likeliest tokens (runtime_top_k=1, or temperature=0 of OpenAI's clients, whose default"
                " samples), set a seed (the request is then served without the draft model),"
            )
        if what:
            raise UserError(
                f"{what} is not supported here: this model runs with a draft model, whose tokens are verified"
                " greedily.",
                todo=f"{instead} or create the repository without a draft model.",
            )
    if request.beam_width > 1 and request.needs_logits:
        raise UserError(
            f"beam_width={request.beam_width} together with guided decoding, embedding_bias, bad_words_list, returned"
            " logits or log probabilities of the likeliest tokens is not supported by the CPU engine.",
            todo="Leave one of the two out.",
        )
    if request.beam_width > 1 and request.num_return_sequences > request.beam_width:
        raise UserError(
            f"num_return_sequences={request.num_return_sequences} is more than beam_width={request.beam_width}.",
        )
    if request.min_tokens > request.max_tokens:
        raise UserError(f"min_tokens={request.min_tokens} is more than request_output_len={request.max_tokens}.")


def _guide(row: _Row, guides: Guides | None) -> Guide | None:
    kind, text = (_text(row, f"guided_decoding_guide{name}") for name in ("_type", ""))
    if not kind and not text:
        return None
    if guides is None:
        raise UserError(
            f"guided_decoding_guide_type='{kind}' was sent to a model without guided decoding.",
            todo="Make the repository with guided=llguidance.",
        )
    return guides.read(kind, text)


def _text(row: _Row, name: str) -> str:
    text = row.value(name, b"")
    if isinstance(text, str):
        return text
    try:
        return bytes(text).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {error}") from error


def _lora_task(row: _Row, limits: ModelLimits) -> int | None:
    """Read the adapter's id; the first sentence of the error is TensorRT-LLM's own (peftCacheManager.cpp)."""
    task = row.value("lora_task_id", None)
    if task is not None and task not in limits.lora_tasks:
        adapters = ", ".join(map(str, sorted(limits.lora_tasks)))
        raise UserError(
            f"LoRA task {task} not found in cache.",
            allowed=f"This server has {adapters}." if adapters else "This server has no LoRA adapters.",
            todo="Send the lora_task_id of an adapter that was in lora_prefetch_dir when the model started.",
        )
    return None if task is None else int(task)


def _table(row: _Row, limits: ModelLimits) -> PromptTable | None:
    """Read [rows, hidden] of a prompt; its ids name the rows from the vocabulary's size on."""
    rows, stated = row.matrix("prompt_embedding_table"), row.value("prompt_vocab_size", 0)
    if rows is None:
        sent = {name: row.vector(name) for name in ("prompt_vocab_size", "prompt_table_extra_ids")}
        others = [name for name, values in sent.items() if values is not None and values.any()]
        if others:
            raise UserError(f"{others[0]} came without a prompt_embedding_table.", todo="Send both or neither.")
        return None
    if not limits.table_rows:
        raise UserError(
            "prompt_embedding_table was sent to an engine that was built without one: it takes text alone.",
            todo="Build it with build.max_prompt_embedding_table_size of at least the rows of all running requests.",
        )
    if rows.shape[1] != limits.hidden_size:
        raise UserError(
            f"prompt_embedding_table has rows of {count(rows.shape[1], 'value')}.",
            allowed=f"This model's hidden size is {limits.hidden_size}.",
        )
    if len(rows) > limits.table_rows:
        raise UserError(
            f"prompt_embedding_table has {count(len(rows), 'row')}; the engine was built with"
            f" max_prompt_embedding_table_size (max_multimodal_len) {limits.table_rows}.",
            todo="Send fewer pictures or a shorter tuned prompt, or build with a larger table.",
        )
    if stated and stated != len(rows):
        raise UserError(f"prompt_vocab_size={stated}, but prompt_embedding_table has {count(len(rows), 'row')}.")
    if not np.isfinite(rows).all():
        raise UserError("prompt_embedding_table holds a value that is NaN or infinite.")
    return PromptTable(np.ascontiguousarray(rows, dtype=np.float32))


def _prompt(row: _Row, ids: Array, limits: ModelLimits, table: PromptTable | None) -> Array:
    length = row.value("input_lengths", len(ids))
    if not 1 <= length <= len(ids):
        raise UserError(f"input_lengths={length} does not match input_ids of {count(len(ids), 'token')}.")
    prompt = np.ascontiguousarray(ids[:length], dtype=np.int64)
    if limits.fold_ids and table is None:
        return np.asarray(prompt % limits.vocab_size)
    low, high, rows = int(prompt.min()), int(prompt.max()), 0 if table is None else len(table.rows)
    if low < 0 or high >= limits.vocab_size + rows:
        named = f", and up to {limits.vocab_size + rows - 1} for the {count(rows, 'row')} of the table" if rows else ""
        raise UserError(
            f"input_ids holds the token id {low if low < 0 else high}.",
            allowed=f"Valid ids of this model are 0 to {limits.vocab_size - 1}{named}.",
            todo="Was another model's tokenizer used?",
        )
    if rows and high < limits.vocab_size:
        raise UserError(
            "prompt_embedding_table was sent, but no id in input_ids names one of its rows.",
            allowed=f"Row r has the id {limits.vocab_size} + r.",
        )
    return prompt


def _words(row: _Row, name: str) -> TokenSequences:
    """Read [2, L]: the concatenated ids of all words, and where each word ends, padded with -1."""
    flat = row.vector(name)
    if flat is None:
        return ()
    if len(flat) % 2:
        raise UserError(
            f"{name} has {len(flat)} numbers.", allowed="It must be [2, n]: token ids, and where each word ends."
        )
    ids, ends = flat.reshape(2, -1).tolist()
    sequences, start = [], 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(ids):
            raise UserError(
                f"{name} has the offset {end} after {start}.",
                allowed=f"Offsets must increase, up to at most {len(ids)}.",
            )
        sequences.append(tuple(ids[start:end]))
        start = end
    return tuple(sequences)


def _beam_width(row: _Row, limits: ModelLimits) -> int:
    width = int(row.value("beam_width", 1))
    if not 1 <= width <= limits.max_beam_width:
        raise UserError(
            f"beam_width={width} is not valid.",
            allowed=f"This engine was built with max_beam_width={limits.max_beam_width}.",
            todo="" if width < 1 else f"Build with max_beam_width={width} or more.",
        )
    return width


def _bias(row: _Row, vocab_size: int) -> Array | None:
    values = row.vector("embedding_bias")
    if values is None or not values.any():
        return None
    if len(values) > vocab_size:
        raise UserError(
            f"embedding_bias has {len(values)} values.", allowed=f"It must have at most {vocab_size}, one per token id."
        )
    if not np.isfinite(values).all():
        token = int(np.flatnonzero(~np.isfinite(values))[0])
        raise UserError(
            f"embedding_bias (embedding_bias_weights) is {values[token]} for token id {token}.",
            allowed="It must be a finite number.",
        )
    bias = np.zeros(vocab_size, dtype=np.float32)  # engines pad the vocabulary, so the tokenizer's may be shorter
    bias[: len(values)] = values
    return bias
