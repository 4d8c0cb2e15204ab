"""Of requests that come at the same moment, none waits until something else wakes the server."""

import asyncio
import time

import pytest

from pipelines.serving.openai.backend import ENGINE, Backend
from pipelines.serving.openai.inputs import InputTensor
from pipelines.serving.process import TritonServer

PAIRS = 150
ASLEEP_S = 0.4
"""Triton's dynamic batcher sleeps for 0.5 s unless it is woken."""
REQUEST = (
    InputTensor("input_ids", "INT32", [5, 6, 7, 8]),
    InputTensor("input_lengths", "INT32", [4]),
    InputTensor("request_output_len", "INT32", [3]),
    InputTensor("streaming", "BOOL", [True]),
)


@pytest.mark.parametrize("apart_s", [0.0, 0.001])
def test_two_requests_within_a_millisecond_are_both_answered_at_once(served: TritonServer, apart_s: float) -> None:
    async def first_token(backend: Backend, wait_s: float) -> float:
        await asyncio.sleep(wait_s)
        begun, seconds = time.monotonic(), 0.0
        async for _ in backend.stream(ENGINE, REQUEST):
            seconds = seconds or time.monotonic() - begun
        return seconds

    async def pairs() -> list[tuple[float, float]]:
        async with Backend(served.grpc_url) as backend:
            return [
                await asyncio.gather(first_token(backend, 0.0), first_token(backend, apart_s)) for _ in range(PAIRS)
            ]

    # the other of the pair is answered at once, whereas a busy machine stops both
    later = sorted(abs(one - other) for one, other in asyncio.run(pairs()))
    assert sum(each > ASLEEP_S for each in later) <= 1, later[-10:]
