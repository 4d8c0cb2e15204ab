"""A stream that the load generator gives up: whatever gRPC says on the way out, the record says why."""

import asyncio
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from pipelines.loadgen.request_stream import Row
from pipelines.loadgen.triton_stream import TritonStream


class Call:
    """A stream that answers nothing until it is cancelled, and then `last`."""

    def __init__(self, last: Any) -> None:
        self.last, self.cancelled = last, asyncio.Event()

    async def write(self, request: Any) -> None:
        """Accept anything."""

    async def done_writing(self) -> None:
        """Accept it."""

    async def code(self) -> None:
        """Wait for the end."""
        await self.cancelled.wait()

    def cancel(self) -> None:
        """What gRPC calls it."""
        self.cancelled.set()

    async def read(self) -> Any:
        """Wait for the end."""
        await self.cancelled.wait()
        if isinstance(self.last, BaseException):
            raise self.last
        return self.last


class Stub:
    """Opens such streams."""

    def __init__(self, last: Any) -> None:
        self.last, self.opened = last, 0

    def ModelStreamInfer(self) -> Call:  # noqa: N802 - gRPC's name
        """Open one."""
        self.opened += 1
        return Call(self.last)


async def given_up(last: Any) -> tuple[Row, Row, int]:
    """Two requests on one stream, both given up; the rows and how many streams they took."""
    stub = Stub(last)
    stream = TritonStream(stub)
    rows = []
    for index in range(2):
        asking = asyncio.create_task(stream.ask(service_pb2.ModelInferRequest(), index, None, 10**9, True, 4))
        await asyncio.sleep(0)
        stream.give_up("timeout")
        rows.append(await asking)
    return rows[0], rows[1], stub.opened


def final() -> Any:
    """The response that ends a request."""
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = True
    return response


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (grpc.aio.EOF, "timeout"),
        (asyncio.CancelledError(), "timeout"),
        (grpc.aio.UsageError("cancelled"), "timeout"),
        (service_pb2.ModelStreamInferResponse(error_message="the client is gone"), "timeout"),
        (final(), None),
    ],
    ids=["end", "cancelled", "usage", "words", "done_first"],
)
def test_what_is_given_up_is_recorded_as_that_and_its_stream_is_replaced(last: Any, error: str | None) -> None:
    first, second, opened = asyncio.run(given_up(last))
    assert (first[-1], second[-1]) == (error, error)
    assert opened == 2
