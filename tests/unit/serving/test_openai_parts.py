"""Responses of the engine as the OpenAI service reads them."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2

from pipelines.serving.openai.backend import _part
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.generate import only_answer
from pipelines.serving.openai.generation import TokenPart

PLAIN = {"output_ids": np.array([[[7, 9, 4]]], np.int32), "sequence_length": np.array([[3]], np.int32)}


def result(**outputs: np.ndarray) -> InferResult:
    """A response with these outputs, as Triton sends them."""
    response = service_pb2.ModelInferResponse()
    kinds = {"int32": "INT32", "float32": "FP32", "float16": "FP16", "int64": "INT64"}
    for name, array in outputs.items():
        response.outputs.add(name=name, datatype=kinds[array.dtype.name], shape=array.shape)
        response.raw_output_contents.append(array.tobytes())
    return InferResult(response)


@pytest.mark.parametrize(
    ("outputs", "part"),
    [
        (PLAIN, TokenPart((7, 9, 4))),
        (PLAIN | {"sequence_length": np.array([[2]], np.int32)}, TokenPart((7, 9))),
        (dict(reversed(PLAIN.items())), TokenPart((7, 9, 4))),
        (PLAIN | {"kv_cache_reused_blocks": np.array([[5]], np.int32)}, TokenPart((7, 9, 4), reused_blocks=5)),
        (
            PLAIN | {"output_log_probs": np.array([[[-4, -3, -2, -1, -0.5]]], np.float32)},
            TokenPart((7, 9, 4), (-2.0, -1.0, -0.5)),
        ),
        (
            PLAIN | {"arrival_time_ns": np.array([[5]], np.int64), "first_scheduled_time_ns": np.array([[5 + 2**30]])},
            TokenPart((7, 9, 4), queued_s=2**30 / 1e9),
        ),
        ({}, TokenPart(())),
        ({"output_ids": np.zeros((1, 1, 0), np.int32), "sequence_length": np.zeros((1, 1), np.int32)}, TokenPart(())),
    ],
)
def test_what_a_response_brings(outputs: dict[str, np.ndarray], part: TokenPart) -> None:
    """Padding is left out, outputs come in any order, and log probabilities are those of all tokens so far."""
    assert _part(result(**outputs)) == part


def test_logits_of_new_tokens_come_with_them() -> None:
    """[1, 1, N, V], as many as there are tokens."""
    logits = np.arange(12, dtype=np.float32).reshape(1, 1, 4, 3)
    found = _part(result(**PLAIN, generation_logits=logits))
    assert found.tokens == (7, 9, 4)
    np.testing.assert_array_equal(found.logits, logits[0, 0, -3:])


def test_several_answers_where_one_fits_name_both_inputs_that_make_them() -> None:
    async def two() -> AsyncIterator[dict[str, str]]:
        yield {"text_output": "a"}
        yield {"text_output": "b"}

    with pytest.raises(ApiError, match=r"several responses; .* stream=true or num_return_sequences above 1"):
        asyncio.run(only_answer(two()))
