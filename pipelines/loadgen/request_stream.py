"""One long-lived gRPC stream that carries one request at a time.

Opening a stream costs about as much as a request, so streams are reused. With one request at a time, closing a stream
cancels that request and no other, and responses need not be matched. A failed stream is replaced.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns as now
from typing import Any

import grpc

from pipelines.loadgen.interface import INPUT_TOKENS, OUTPUT_TOKENS, TEXT

Row = tuple[int, int, int, int | None, int, int, int, tuple[int, ...], str | None]
"""The fields of RequestTiming, with stamps on CLOCK_MONOTONIC."""
_END = grpc.aio.EOF
_REJECTED = ("exceeds maximum queue size", "maximum queue size", "exceeds max queue", "queue is full")


class RequestStream:
    """A stream and its current request."""

    __slots__ = ("_call", "_places", "_stub", "deadline_ns", "error_text", "given_up")

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._call: Any = None
        self._places: tuple[int, dict[str, int]] = (-1, {})
        self.deadline_ns: int | None = None
        """When the current request is given up, ns; None while idle."""
        self.given_up: str | None = None
        """Why we closed it: "timeout" or "cancelled"."""
        self.error_text = ""
        """The server's message about the last failure."""

    async def open(self) -> None:
        """Connect early, so that the first request does not include connection time. Failures show up with it."""
        self._call = self._stub.ModelStreamInfer()
        try:
            await self._call.wait_for_connection()
        except grpc.aio.AioRpcError:
            self._call = None

    def give_up(self, kind: str) -> None:
        """Cancel the current request."""
        if self.deadline_ns is not None and self._call is not None:
            self.given_up = kind
            self._call.cancel()

    async def close(self) -> None:
        """Close the stream gracefully."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def ask(self, request: Any, index: int, due_ns: int | None, wait_ns: int, streamed: bool, isl: int) -> Row:
        """Send one request and follow it to its end.

        Args:
            request: the message, its id set.
            index: position in the load.
            due_ns: when it should have been sent; None means now.
            wait_ns: how long it may take.
            streamed: whether to stamp every response, or only the end.
            isl: input tokens, used if the server does not count them.
        """
        chunks: list[int] = []
        counts = [isl]  # input tokens, then num_output_tokens, which TensorRT-LLM counts per response
        sent = now()
        due = sent if due_ns is None else due_ns
        self.deadline_ns = sent + wait_ns
        try:
            if self._call is None:
                self._call = self._stub.ModelStreamInfer()
            await self._call.write(request)
            end, error = await self._follow(chunks, counts)
        except asyncio.CancelledError:
            if self.given_up is None:
                raise
            end, error = now(), "cancelled"
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as failure:
            end, error = now(), self._broken(failure)
        if self.given_up is not None:
            # whatever the cancelled stream reported, even nothing; a request that finished first stays finished
            error = error and self.given_up
            waited = f"not finished within {wait_ns / 1e9:g} s (benchmark.timeout_s)"
            self.error_text = waited if self.given_up == "timeout" else "cancelled by the load generator"
        if error is not None or self.given_up is not None:
            await self.close()
        self.deadline_ns = self.given_up = None
        osl = sum(counts[1:]) or len(chunks)
        first = chunks[0] if streamed and chunks else None
        stamps = tuple(chunks) if streamed else ()
        return index, due, sent, first, end, counts[0], osl, stamps, error

    async def _follow(self, chunks: list[int], counts: list[int]) -> tuple[int, str | None]:
        """Read until the final response.

        Returns:
            when the last response with content arrived, ns, and the kind of error.
        """
        assert self._call is not None
        read, end = self._call.read, 0
        while True:
            response = await read()
            stamp = now()
            if response is _END:
                return stamp, self._ended()
            if response.error_message:
                self.error_text = response.error_message
                return stamp, classify(response.error_message)
            answer = response.infer_response
            if answer.raw_output_contents and self._take(answer, counts):
                end = stamp
                chunks.append(stamp)
            if answer.parameters["triton_final_response"].bool_param:
                return end or stamp, None

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

    def _ended(self) -> str:
        self.error_text = "the server closed the stream"
        return "connection"

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


def classify(text: str) -> str:
    """Classify an error message of the server."""
    low = text.lower()
    if any(part in low for part in _REJECTED):
        return "rejected"
    if "timeout" in low or "timed out" in low:
        return "timeout"
    if "cancel" in low:
        return "cancelled"
    if "unavailable" in low or "not ready" in low or "unloaded" in low:
        return "connection"
    return "invalid"
