"""Convert OpenAI's parameters to inputs of the Triton model `tensorrt_llm`, which takes and returns tokens."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.schema import Sampling
from pipelines.serving.openai.tokenizer import ServedTokenizer
from pipelines.serving.repository import ModelRepository

UINT64 = 2**64
FEW_LOG_PROBS = "return_top_log_probs"
"""Input of an engine's model that can return the log probabilities of a few tokens instead of all logits."""
NO_OFFSET = -1
"""Fills the offsets of a list of words after the last word."""


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input tensor with a first dimension of 1.

    Attributes:
        values: a sequence, of strings for BYTES; or an array.
        shape: its other dimensions; empty is the number of values.
    """

    name: str
    datatype: str
    values: Any
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """The server's facts that the inputs depend on, besides the request."""

    tokenizer: ServedTokenizer
    repository: ModelRepository

    def answers_in_parts(self, sampling: Sampling) -> bool:
        """Whether an answer comes as it grows: for the client, or because what ends it is seen here alone."""
        seen_here = sampling.stops or sampling.ends_with_a_call or (sampling.min_tokens and sampling.stop_token_ids)
        return self.repository.decoupled and bool(sampling.stream or seen_here)


def engine_inputs(
    sampling: Sampling,
    prompt: Sequence[int],
    max_tokens: int,
    choice: int,
    engine: ServedEngine,
    stops: Sequence[str],
) -> list[InputTensor]:
    """Build the inputs for one choice of one prompt.

    Temperature and top_p default to 1 as OpenAI documents, which is sampling; TensorRT-LLM's own default is greedy.
    Temperature 0 and top_p 0 are greedy. TensorRT-LLM always draws the same without a seed, so it gets a random one.

    Args:
        sampling: the client's parameters.
        prompt: token ids.
        max_tokens: maximum of output tokens.
        choice: number of the answer among the `n` to this prompt; each has a seed of its own.
        engine: the served model.
        stops: stop strings that the engine sees itself.
    """
    tokenizer, repository = engine.tokenizer, engine.repository
    inputs = [
        *prompt_inputs(prompt, max_tokens),
        InputTensor("streaming", "BOOL", (engine.answers_in_parts(sampling),)),
        InputTensor("exclude_input_in_output", "BOOL", (True,)),
        *_ends(sampling, stops, tokenizer),
        *_sampling(sampling, choice, draws_anew=repository.draws_anew),
    ]
    for name, value in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
        ("repetition_penalty", sampling.repetition_penalty if sampling.repetition_penalty != 1 else None),
    ):
        if value:  # 0 is the default
            inputs.append(InputTensor(name, "FP32", (value,)))
    if sampling.min_tokens:
        inputs.append(InputTensor("min_tokens", "INT32", (sampling.min_tokens,)))
    if sampling.lora_task_id is not None:
        inputs.append(InputTensor("lora_task_id", "UINT64", (sampling.lora_task_id,)))
    if sampling.logit_bias:
        inputs.append(_bias(sampling.logit_bias, tokenizer.size))
    if sampling.scores is not None:
        inputs.append(InputTensor("return_log_probs", "BOOL", (True,)))
    if sampling.scores and repository.few_log_probs:
        inputs.append(InputTensor(FEW_LOG_PROBS, "INT32", (sampling.scores,)))
    elif sampling.scores:
        inputs.append(InputTensor("return_generation_logits", "BOOL", (True,)))
    options = sampling.stream_options
    shows_usage = not sampling.stream or (options is not None and options.include_usage)
    if (repository.tokens_per_block is not None and shows_usage) or (
        repository.perf_metrics and not engine.answers_in_parts(sampling)
    ):  # in a stream, the engine says it with every token
        inputs.append(InputTensor("return_perf_metrics", "BOOL", (True,)))
    return [*inputs, *(_guide(*sampling.guide) if sampling.guide is not None else ())]


def prompt_inputs(prompt: Sequence[int], max_tokens: int) -> list[InputTensor]:
    """Build the inputs that every request to the engine has."""
    return [
        InputTensor("input_ids", "INT32", prompt),
        InputTensor("input_lengths", "INT32", (len(prompt),)),
        InputTensor("request_output_len", "INT32", (max_tokens,)),
    ]


def text_inputs(
    prompt: str,
    max_tokens: int,
    stops: Sequence[str] = (),
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    json_schema: str | None = None,
) -> list[InputTensor]:
    """Build the inputs of the model for text (`ensemble`, `tensorrt_llm_bls`), for one answer in one response."""
    sampling = Sampling(model="", temperature=temperature, top_p=top_p, seed=seed)
    renamed = {"runtime_top_k": "top_k", "runtime_top_p": "top_p"}
    drawn = [replace(each, name=renamed.get(each.name, each.name)) for each in _sampling(sampling, 0, draws_anew=False)]
    return [
        InputTensor("text_input", "BYTES", (prompt,)),
        InputTensor("max_tokens", "INT32", (max_tokens,)),
        InputTensor("stream", "BOOL", (False,)),
        InputTensor("exclude_input_in_output", "BOOL", (True,)),
        InputTensor("return_num_input_tokens", "BOOL", (True,)),
        InputTensor("return_num_output_tokens", "BOOL", (True,)),
        *drawn,
        *([InputTensor("stop_words", "BYTES", tuple(stops))] if stops else []),
        *(_guide("json_schema", json_schema) if json_schema is not None else ()),
    ]


def _guide(kind: str, text: str) -> list[InputTensor]:
    return [
        InputTensor("guided_decoding_guide_type", "BYTES", (kind,)),
        InputTensor("guided_decoding_guide", "BYTES", (text,)),
    ]


def _ends(sampling: Sampling, strings: Sequence[str], tokenizer: ServedTokenizer) -> list[InputTensor]:
    tensors = []
    if tokenizer.end_id is not None and not sampling.ignore_eos:
        tensors.append(InputTensor("end_id", "INT32", (tokenizer.end_id,)))
    pad = tokenizer.pad_id if tokenizer.pad_id is not None else tokenizer.end_id
    if pad is not None:
        tensors.append(InputTensor("pad_id", "INT32", (pad,)))
    stops = [tokenizer.ids(stop, special=False) for stop in strings]
    stops += [[token] for token in sampling.stop_token_ids or ()]
    if not sampling.ignore_eos:
        stops += [[token] for token in tokenizer.end_ids[1:]]
    if any(stops) and not sampling.min_tokens:  # the engine applies min_tokens to its end token only
        tensors.append(word_list("stop_words_list", [word for word in stops if word]))
    return tensors


def word_list(name: str, sequences: Sequence[Sequence[int]]) -> InputTensor:
    """Return [2, n]: the tokens of all words in a row, and below where each word ends."""
    flat = [token for word in sequences for token in word]
    ends = list(accumulate(len(word) for word in sequences))
    return InputTensor(name, "INT32", (*flat, *ends, *[NO_OFFSET] * (len(flat) - len(ends))), (2, len(flat)))


def _sampling(sampling: Sampling, choice: int, *, draws_anew: bool) -> Iterable[InputTensor]:
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    top_k = max(0, sampling.top_k or 0)  # -1 is all, as 0
    if temperature == 0 or top_p == 0 or top_k == 1:
        return [InputTensor("runtime_top_k", "INT32", (1,))]
    drawn = [InputTensor("temperature", "FP32", (temperature,)), InputTensor("runtime_top_p", "FP32", (top_p,))]
    if top_k:
        drawn.append(InputTensor("runtime_top_k", "INT32", (top_k,)))
    if sampling.seed is None and draws_anew:
        return drawn
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return [*drawn, InputTensor("seed", "UINT64", ((seed + choice) % UINT64,))]


def _bias(biases: dict[str, float], size: int) -> InputTensor:
    """Return the bias of each logit.

    Raises:
        ApiError: 400, a token is not in the vocabulary.
    """
    values: Any = [0.0] * size
    for token, bias in biases.items():
        if int(token) >= size:
            raise ApiError(400, f"'logit_bias' names token {token}; the vocabulary has {size}.", param="logit_bias")
        values[int(token)] = bias
    return InputTensor("embedding_bias", "FP32", values)
