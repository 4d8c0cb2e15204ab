"""State shared by the client processes and the process that directs them: a block of counters, and the jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from typing import Any

from pipelines.loadgen.interface import Interface
from pipelines.loadgen.plan import Conversation, PlannedRequest
from pipelines.loadgen.request_stream import Row

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
