"""Triton's gRPC: the interface of a model, its request messages, and the streams that carry them."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns as now
from typing import Any

# Without it each read takes one more hop between threads: 0.06 ms of every stamp, measured. Read when gRPC makes its
# first channel; versions without such a thing would say so, hence the silence (failures come as statuses).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pipelines.loadgen.plan import PlannedRequest
from pipelines.loadgen.prompts import IMAGE, picture
from pipelines.loadgen.request_stream import RequestStream, classify

TEXT, OUTPUT_TOKENS, INPUT_TOKENS = "text_output", "num_output_tokens", "num_input_tokens"
NO_END = "end_id"
IMAGES = "image_bytes_input"
_STOP_INPUTS = ("min_tokens", "min_length", NO_END)
"""Inputs that enforce the output length even if the model would stop earlier, best first: forbid the end token until
then (the ensemble's name, then genai-perf's), or have no end token."""


_END = grpc.aio.EOF
_CHANNEL = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_GRACE_S = 1.0
_ENGINE = "tensorrt_llm"
_STOPPED = (_ENGINE, "ensemble")
"""Models whose requests the engine stops by their id; Triton tells others of a cancellation."""
_STOP_S, _CANCEL_S = (0.02, 0.5), 5.0
"""Seconds before each stop, since the first may come before the request, and after which the stream is cancelled."""


@dataclass(frozen=True, slots=True)
class TritonInterface:
    """A model as the Triton server describes it.

    Attributes:
        batched: whether it takes a batch dimension (max_batch_size > 0).
        decoupled: whether it can send several responses per request, which streaming needs.
        added_tokens: input tokens of a request's pictures beside one for the place of each.
    """

    model_name: str
    batched: bool
    decoupled: bool
    inputs: frozenset[str]
    outputs: frozenset[str]
    add_special_tokens: bool = True
    added_tokens: int = 0

    @property
    def stop_input(self) -> str | None:
        """The input that makes output lengths exact, or None."""
        return next((name for name in _STOP_INPUTS if name in self.inputs), None)

    @property
    def counts_output(self) -> bool:
        """Whether the server counts output tokens itself."""
        return OUTPUT_TOKENS in self.outputs and "return_num_output_tokens" in self.inputs

    @property
    def counts_input(self) -> bool:
        """Whether the server counts input tokens itself."""
        return INPUT_TOKENS in self.outputs and "return_num_input_tokens" in self.inputs

    @property
    def turn_tokens(self) -> None:
        """None: a conversation is one text."""

    @property
    def counted_by(self) -> tuple[str, str]:
        """See `Interface`."""
        return (
            "server" if self.counts_input else "tokenizer",
            "server" if self.counts_output else "responses with text",
        )

    @property
    def connection(self) -> str:
        """See `Interface`."""
        return "one request at a time on each of several long-lived gRPC streams"

    @asynccontextmanager
    async def transport(self, url: str) -> AsyncIterator[Callable[[], RequestStream]]:
        """See `Interface`."""
        async with grpc.aio.insecure_channel(url, options=_CHANNEL) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            yield lambda: TritonStream(stub)

    def build(self, request: PlannedRequest, *, streaming: bool, ignore_eos: bool) -> Any:
        """Build the protobuf message (`ModelInferRequest`), which asks only for outputs that are read."""
        message = service_pb2.ModelInferRequest(model_name=self.model_name)
        text = (IMAGE * len(request.images) + request.text).encode()
        add = partial(_add, message, shape=(1, 1) if self.batched else (1,))
        add("text_input", "BYTES", struct.pack("<I", len(text)) + text)
        add("max_tokens", "INT32", struct.pack("<i", request.osl))
        if request.images:
            side, pixels = request.image_side, [picture(seed, request.image_side) for seed in request.images]
            shape = [1] * self.batched + [len(pixels), side, side, 3]
            _add(message, IMAGES, "UINT8", b"".join(each.tobytes() for each in pixels), shape)
        if "stream" in self.inputs:
            add("stream", "BOOL", struct.pack("?", streaming))
        if ignore_eos and self.stop_input:
            if self.stop_input != NO_END:
                add(self.stop_input, "INT32", struct.pack("<i", request.osl))
            if NO_END in self.inputs:  # a model may have several ends, of which the other input forbids one
                add(NO_END, "INT32", struct.pack("<i", -1))
        counted = {OUTPUT_TOKENS: self.counts_output, INPUT_TOKENS: self.counts_input}
        for name in ("exclude_input_in_output", *(f"return_{output}" for output, counts in counted.items() if counts)):
            if name in self.inputs:
                add(name, "BOOL", b"\x01")
        for name in (TEXT, *(output for output, counts in counted.items() if counts)):
            message.outputs.add(name=name)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return message


def _add(message: Any, name: str, datatype: str, raw: bytes, shape: Sequence[int] = (1, 1)) -> None:
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(raw)


class TritonStream(RequestStream):
    """A `ModelStreamInfer` stream."""

    __slots__ = ("_call", "_leaving", "_places", "_request", "_stopped", "_stub")

    def __init__(self, stub: Any) -> None:
        super().__init__()
        self._stub = stub
        self._call: Any = None
        self._request: Any = None
        self._leaving: asyncio.Task[None] | None = None
        self._stopped = False
        self._places: tuple[int, dict[str, int]] = (-1, {})

    async def open(self) -> None:
        """See `RequestStream`."""
        self._call = self._stub.ModelStreamInfer()
        try:
            await self._call.wait_for_connection()
        except grpc.aio.AioRpcError:
            self._call = None

    def _cancel(self) -> None:
        if self._call is not None and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(self._call, self._request))

    async def _leave(self, call: Any, request: Any) -> None:
        """Stop a request in the engine, which ends its stream; cancelling can end tritonserver 2.51 (decision 19)."""
        if request.model_name in _STOPPED:
            with suppress(grpc.aio.AioRpcError, TimeoutError):  # the server has ended, or does not respond
                async with asyncio.timeout(_CANCEL_S):
                    for wait_s in (*_STOP_S, _CANCEL_S):
                        await asyncio.sleep(wait_s)
                        await self._stop(request.id)
        call.cancel()

    async def _stop(self, request_id: str) -> None:
        self._stopped = True
        message = service_pb2.ModelInferRequest(model_name=_ENGINE, id=request_id)
        for name in ("input_ids", "input_lengths", "request_output_len"):
            _add(message, name, "INT32", struct.pack("<i", 1))
        _add(message, "stop", "BOOL", b"\x01")
        message.outputs.add(name="output_ids")
        stream = self._stub.ModelStreamInfer()
        await stream.write(message)
        await stream.done_writing()
        async for _ in stream:
            pass

    async def close(self) -> None:
        """End the stream; cancel it only if it does not end on its own."""
        call, self._call = self._call, None
        if self._leaving is not None:
            self._leaving.cancel()
        self._leaving, self._stopped = None, False
        if call is None:
            return
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError, TimeoutError):
            await call.done_writing()
            await asyncio.wait_for(call.code(), _GRACE_S)
        call.cancel()

    async def _exchange(self, request: Any, chunks: list[int], counts: list[int]) -> tuple[int, str | None]:
        try:
            if self._call is None:
                self._call = self._stub.ModelStreamInfer()
            self._request = request
            await self._call.write(request)
            return await self._follow(chunks, counts)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as failure:
            return now(), self._broken(failure)

    async def _follow(self, chunks: list[int], counts: list[int]) -> tuple[int, str | None]:
        assert self._call is not None
        read, end = self._call.read, 0
        while True:
            response = await read()
            stamp = now()
            if response is _END:
                self.error_text = "the server closed the stream"
                return stamp, "connection"
            if response.error_message:
                self.error_text = response.error_message
                return stamp, classify(response.error_message, accepted=bool(chunks))
            answer = response.infer_response
            if answer.raw_output_contents and self._take(answer, counts):
                end = stamp
                chunks.append(stamp)
            if answer.parameters["triton_final_response"].bool_param:
                return end or stamp, self.given_up if self._stopped else None

    def _take(self, answer: Any, counts: list[int]) -> bool:
        """Read the counts of one response, and return whether it had content."""
        contents, places = answer.raw_output_contents, self._places
        if places[0] != len(answer.outputs):
            self._places = places = (len(answer.outputs), {o.name: i for i, o in enumerate(answer.outputs)})
        where = places[1]
        text = len(contents[where[TEXT]]) > 4 if TEXT in where else False
        if INPUT_TOKENS in where:
            counts[0] = int.from_bytes(contents[where[INPUT_TOKENS]][:4], "little")
        if OUTPUT_TOKENS not in where:
            return text
        count = int.from_bytes(contents[where[OUTPUT_TOKENS]][:4], "little")
        counts.append(count)
        return text or count > 0

    def _broken(self, failure: Exception) -> str:
        if isinstance(failure, grpc.aio.AioRpcError):
            self.error_text = failure.details() or failure.code().name
            if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "timeout"
            if failure.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
                return "invalid"
            return "rejected" if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else "connection"
        self.error_text = str(failure) or type(failure).__name__
        return "connection"
