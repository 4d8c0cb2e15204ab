"""Convert OpenAI's sampling parameters to inputs of the Triton model."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from pipelines.serving.openai.schema import Sampling

UINT64 = 2**64


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input tensor of shape [1, number of values].

    Attributes:
        name: the ensemble's.
        datatype: Triton's.
        values: strings for BYTES.
    """

    name: str
    datatype: str
    values: tuple[int | float | bool | str, ...]


def triton_inputs(
    asked: Sampling, prompt: str, max_tokens: int, choice: int, *, draws_anew: bool = False
) -> list[InputTensor]:
    """Build the inputs for one choice of one prompt.

    Temperature and top_p default to 1 as OpenAI documents, which is sampling; TensorRT-LLM's own default is greedy.
    Temperature 0 and top_p 0 are greedy. TensorRT-LLM always draws the same without a seed, so it gets a
    random one.

    Args:
        asked: the client's parameters.
        prompt: the whole text.
        max_tokens: maximum of output tokens.
        choice: number of the answer among the `n` to this prompt; each has a seed of its own.
        draws_anew: whether the engine draws anew by itself; a seed would only make it slower.
    """
    inputs = [
        InputTensor("text_input", "BYTES", (prompt,)),
        InputTensor("max_tokens", "INT32", (max_tokens,)),
        InputTensor("stream", "BOOL", (bool(asked.stream),)),
        InputTensor("exclude_input_in_output", "BOOL", (True,)),
        InputTensor("return_num_input_tokens", "BOOL", (True,)),
        InputTensor("return_num_output_tokens", "BOOL", (True,)),
    ]
    inputs += _sampling(asked, choice, draws_anew=draws_anew)
    if asked.stops:
        inputs.append(InputTensor("stop_words", "BYTES", asked.stops))
    for name, given in (("presence_penalty", asked.presence_penalty), ("frequency_penalty", asked.frequency_penalty)):
        if given:  # 0 is the default
            inputs.append(InputTensor(name, "FP32", (given,)))
    return inputs


def _sampling(asked: Sampling, choice: int, *, draws_anew: bool) -> list[InputTensor]:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    if temperature == 0 or top_p == 0:
        return [InputTensor("top_k", "INT32", (1,))]
    drawn = [InputTensor("temperature", "FP32", (temperature,)), InputTensor("top_p", "FP32", (top_p,))]
    if asked.seed is None and draws_anew:
        return drawn
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    return [*drawn, InputTensor("seed", "UINT64", ((seed + choice) % UINT64,))]
