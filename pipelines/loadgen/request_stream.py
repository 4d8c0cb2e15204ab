"""One long-lived connection to a server that carries one request at a time, over gRPC or HTTP.

Opening one costs about as much as a request, so connections are reused. With one request at a time, closing one cancels
that request and no other, and responses need not be matched. A failed one is replaced.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from time import monotonic_ns as now
from typing import Any, ClassVar, Protocol

from pipelines.loadgen.plan import Conversation, PlannedRequest

Row = tuple[int, int, int, int | None, int, int, int, Sequence[int], str | None]
"""The values of `pipelines.domain.summary.RECORD_FIELDS`, with stamps on CLOCK_MONOTONIC."""


@dataclass(slots=True)
class PackedRows:
    """Many rows without an object for each: as many take a fifth of the memory.

    Attributes:
        numbers: `WIDE` of each row: its first seven fields, -1 for None, and how many stamps it has.
        stamps: of all rows, one after the other.
        errors: of the rows that have one, by place.
    """

    WIDE: ClassVar[int] = 8
    numbers: array[int] = field(default_factory=partial(array, "q"))
    stamps: array[int] = field(default_factory=partial(array, "q"))
    errors: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers) // self.WIDE

    def append(self, row: Row) -> None:
        """Add a row."""
        index, due, sent, first, end, isl, osl, stamps, error = row
        if error is not None:
            self.errors[len(self)] = error
        self.numbers.extend((index, due, sent, -1 if first is None else first, end, isl, osl, len(stamps)))
        self.stamps.extend(stamps)

    def clear(self) -> None:
        """Forget all rows."""
        self.numbers, self.stamps, self.errors = array("q"), array("q"), {}

    def count(self, place: int, osl: int) -> None:
        """Replace the number of output tokens of a row."""
        self.numbers[place * self.WIDE + 6] = osl


_REJECTED = ("exceeds maximum queue size", "maximum queue size", "exceeds max queue", "queue is full")


class Interface(Protocol):
    """How one model of a server is asked. Pickled to the client processes."""

    @property
    def model_name(self) -> str:
        """Its name on the server."""

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer's special tokens count as input tokens."""

    @property
    def added_tokens(self) -> int | None:
        """Input tokens that the server adds besides; None if unknown."""

    @property
    def turn_tokens(self) -> int | None:
        """Those that it adds for an answer and the next message of a chat; None if a conversation is one text."""

    @property
    def stop_input(self) -> str | None:
        """The parameters that make output lengths exact; None if the model may stop earlier."""

    @property
    def counted_by(self) -> tuple[str, str]:
        """Source of the counts of input and output tokens."""

    @property
    def connection(self) -> str:
        """Transport of the requests, for the result."""

    def build(self, request: PlannedRequest, *, streaming: bool, ignore_eos: bool) -> Any:
        """Build the message of one request; its `id` is set before it is sent."""

    def transport(self, url: str) -> AbstractAsyncContextManager[Callable[[], RequestStream]]:
        """Return a context in which a function opens connections to the server."""


class RequestStream(ABC):
    """A connection and its current request."""

    __slots__ = ("cached_tokens", "deadline_ns", "error_text", "given_up")

    def __init__(self) -> None:
        self.deadline_ns: int | None = None
        """When the current request is given up, ns; None while idle."""
        self.given_up: str | None = None
        """Why we closed it: "timeout" or "cancelled"."""
        self.error_text = ""
        """The server's message about the last failure."""
        self.cached_tokens: int | None = None
        """Input tokens of all requests that came from the server's KV cache; None if it does not say."""

    @abstractmethod
    async def open(self) -> None:
        """Connect early, so that the first request does not include connection time. Failures show up with it."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection; a running request is cancelled."""

    @abstractmethod
    def _cancel(self) -> None:
        """End the current request, so that `_exchange` returns or raises."""

    @abstractmethod
    async def _exchange(self, request: Any, chunks: list[int], counts: list[int]) -> tuple[int, str | None]:
        """Send a request and read until its end.

        Args:
            request: the message.
            chunks: receives the stamp of each response with content, ns.
            counts: input tokens, replaced if the server counts them; then output tokens of each response.

        Returns:
            when the last response with content arrived, ns, and the kind of error.
        """

    def give_up(self, kind: str) -> None:
        """Cancel the current request."""
        if self.deadline_ns is not None:
            self.given_up = kind
            self._cancel()

    def take_text(self) -> str | None:
        """Return the last answer's text if its tokens are still to be counted."""
        return None

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
        counts = [isl]
        sent = now()
        due = sent if due_ns is None else due_ns
        self.deadline_ns = sent + wait_ns
        try:
            end, error = await self._exchange(request, chunks, counts)
        except asyncio.CancelledError:
            if self.given_up is None:
                raise
            end, error = now(), "cancelled"
        if self.given_up is not None:
            # regardless of the cancelled stream's report; a request that finished first stays finished
            error = error and self.given_up
            waited = f"not finished within {wait_ns / 1e9:g} s (benchmark.timeout_s)"
            self.error_text = waited if self.given_up == "timeout" else "cancelled by the load generator"
        if error is not None or self.given_up is not None:
            await self.close()
        self.deadline_ns = self.given_up = None
        osl = sum(counts[1:]) or len(chunks)
        first = chunks[0] if streamed and chunks else None
        stamps = chunks if streamed else ()
        return index, due, sent, first, end, counts[0], osl, stamps, error


def classify(text: str, *, accepted: bool) -> str:
    """Classify an error message of the server; of a request that it accepted, the fault is not in the request."""
    low = text.lower()
    if any(part in low for part in _REJECTED):
        return "rejected"
    if "timeout" in low or "timed out" in low:
        return "timeout"
    if "cancel" in low:
        return "cancelled"
    if "unavailable" in low or "not ready" in low or "unloaded" in low:
        return "connection"
    return "server_error" if accepted else "invalid"


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
        tokenizer_dir: folder of the tokenizer, for answers whose tokens the server does not count.
        streaming: whether to stamp every response.
        ignore_eos: whether output lengths are exact.
        timeout_ns: per request.
        id_base: request ids are this plus index + 1, so that no two clients of a server use the same ids.
        first_index: index of its first request; the next ones follow in steps of `step`.
        step: number of processes.
        users: closed loop: requests kept in flight.
        think_ns: closed loop: pause between a response and the next request.
        limit: closed loop: maximum number of requests; None means until told to stop.
        pool: closed loop: conversations to draw from; when all were sent, with another word each.
        words: those words, and their places.
        schedule: open loop: due times from the start of the level, and the requests.
        mean_gap_ns: open loop: expected between two of them.
    """

    url: str
    tokenizer_dir: Path
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
    words: dict[str, int] = field(default_factory=dict)
    schedule: list[tuple[int, PlannedRequest]] = field(default_factory=list)
    mean_gap_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class ClientReport:
    """Report of one process on its job.

    Attributes:
        rows: one per request, stamps on CLOCK_MONOTONIC; empty when they were taken.
        messages: of the server, one example per kind of error.
        loop_lag_ns: how late the event loop came back from short sleeps.
        cpu_share: CPU seconds / seconds, without the pacer's deliberate spinning.
        cpu: number of the CPU it last ran on.
        distinct: whether no request was repeated.
        cached_tokens: input tokens that came from the server's KV cache, by its answers; None if they do not say.
        nice: its scheduling priority; -10 if the system let it run ahead of a server on the same CPUs.
        off: answers whose input tokens the server counts otherwise than the tokenizer.
        unsent: turns of sessions that were not sent, because the one before failed.
        short: answers with fewer output tokens than asked for, by the server's count.
    """

    rows: PackedRows
    messages: dict[str, str]
    loop_lag_ns: list[int]
    cpu_share: float
    cpu: int
    distinct: bool
    nice: int = 0
    cached_tokens: int | None = None
    off: int = 0
    unsent: int = 0
    short: int = 0
