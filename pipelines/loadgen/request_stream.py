"""One long-lived gRPC stream that carries one request at a time.

Opening a stream costs about as much as a request, so streams are reused. With one request at a time, closing a stream
cancels that request and no other, and responses need not be matched. A failed stream is replaced.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from time import monotonic_ns as now
from typing import Any

import grpc

from pipelines.loadgen.plan import Conversation, PlannedRequest
from pipelines.loadgen.server import INPUT_TOKENS, OUTPUT_TOKENS, TEXT, Interface

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


# State shared by the client processes and the process that directs them: a block of counters, and the jobs.

_FIELDS = ("sent", "ok", "errors", "connection", "ttft_us", "ttft_n", "itl_us", "itl_n", "last_ok_ns")
SENT, OK, ERRORS, CONNECTION, TTFT_US, TTFT_N, ITL_US, ITL_N, LAST_OK = range(len(_FIELDS))
WIDTH = len(_FIELDS)


class SharedCounters:
    """Counters of all client processes, each writing its own row without locks, and the time to stop."""

    def __init__(self, processes: int) -> None:
        self.cells: Any = RawArray("q", 1 + processes * WIDTH)

    def clear(self) -> None:
        """Reset the counters before a level."""
        for index in range(len(self.cells)):
            self.cells[index] = 0

    def stop_at(self, stamp_ns: int) -> None:
        """Set the time after which no request is sent, ns on CLOCK_MONOTONIC."""
        self.cells[0] = stamp_ns

    def total(self, column: int) -> int:
        """Return the sum over the processes."""
        return int(sum(self.cells[1 + column :: WIDTH]))

    def latest(self, column: int) -> int:
        """Return the maximum over the processes."""
        return int(max(self.cells[1 + column :: WIDTH]))


@dataclass(frozen=True, slots=True)
class ClientJob:
    """One process's share of a level.

    Attributes:
        url: host:port of the server.
        interface: of the model.
        streaming: whether to stamp every response.
        ignore_eos: whether output lengths are exact.
        timeout_ns: per request.
        id_base: request ids are this plus index + 1, so that no two clients of a server use the same ids.
        first_index: index of its first request; the next ones follow in steps of `step`.
        step: number of processes.
        users: closed loop: requests kept in flight.
        think_ns: closed loop: pause between a response and the next request.
        limit: closed loop: maximum number of requests; None means until told to stop.
        pool: closed loop: conversations to draw from.
        schedule: open loop: due times from the start of the level, and the requests.
        mean_gap_ns: open loop: expected between two of them.
    """

    url: str
    interface: Interface
    streaming: bool
    ignore_eos: bool
    timeout_ns: int
    id_base: int
    first_index: int
    step: int
    users: int = 0
    think_ns: int = 0
    limit: int | None = None
    pool: list[Conversation] = field(default_factory=list)
    schedule: list[tuple[int, PlannedRequest]] = field(default_factory=list)
    mean_gap_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class ClientReport:
    """Report of one process on its job.

    Attributes:
        rows: one per request, stamps on CLOCK_MONOTONIC.
        messages: of the server, one example per kind of error.
        loop_lag_ns: how late the event loop came back from short sleeps.
        cpu_share: CPU seconds / seconds, without the pacer's deliberate spinning.
        cpu: number of the CPU it last ran on.
        distinct: whether no request was repeated.
        nice: its scheduling priority; -10 if the system let it run ahead of a server on the same CPUs.
    """

    rows: list[Row]
    messages: dict[str, str]
    loop_lag_ns: list[int]
    cpu_share: float
    cpu: int
    distinct: bool
    nice: int = 0
