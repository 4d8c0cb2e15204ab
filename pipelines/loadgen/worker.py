"""A client process: keeps streams to the server open, sends requests when they are due, and stamps the responses."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection
from time import monotonic_ns as now
from typing import Any

from pipelines.checkpoint.tokenizer import opened
from pipelines.loadgen import request_stream
from pipelines.loadgen.plan import PlannedRequest
from pipelines.loadgen.request_stream import WIDTH, ClientJob, ClientReport, PackedRows, RequestStream, Row

# Wait for an exact moment inside an event loop.
#
# Timers of event loops are accurate to a millisecond. So the loop sleeps until shortly before the moment and then
# spins, still reading responses, until it has come.

_SPIN_NS = 1_500_000
_SPIN_SHARE = 0.15
_POLL_S = 0.25


class Pacer:
    """Waits for absolute times, and counts the CPU time spent on waiting."""

    def __init__(self, mean_gap_ns: float) -> None:
        """Prepare.

        Args:
            mean_gap_ns: expected between two waits; spinning takes at most a seventh of it.
        """
        self._spin_ns = min(_SPIN_NS, int(_SPIN_SHARE * mean_gap_ns))
        self._spinning, self._since = 0, 0
        self.spun_ns = 0

    async def until(self, due_ns: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return at `due_ns` on CLOCK_MONOTONIC, at once if it has passed, or soon after `stopped()` becomes true."""
        while (left := due_ns - now() - self._spin_ns) > 0 and not stopped():
            await asyncio.sleep(min(left / 1e9, _POLL_S))
        start = now()
        if start >= due_ns:
            return
        self._since = self._since if self._spinning else start
        self._spinning += 1
        while now() < due_ns and not stopped():
            await asyncio.sleep(0)
        self._spinning -= 1
        if not self._spinning:  # those who spin together share the time
            self.spun_ns += now() - self._since


_LAG_PERIOD_S = 0.02
_SWEEP_S = 0.05
_RETRY_S = 0.2
"""Pause of a user after an error, so that a struggling server is not hammered."""
_OPEN_STREAMS = 8
_NICE = -10
_SWITCH_S = 5e-4


def main(pipe: Connection, cells: Any, number: int) -> None:
    """Serve jobs until the pipe closes; entry point of the process.

    Args:
        pipe: jobs in, reports out. The process ends when the other end is gone.
        cells: the shared counters.
        number: of this process, from 0.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and a closed terminal are handled by the directing process
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _prefer()
    sys.setswitchinterval(_SWITCH_S)  # gRPC's thread must not wait 5 ms for ours
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _runner()(_Worker(pipe, cells, number).serve())


def _prefer() -> None:
    """Raise our priority over a server that fills the same CPUs, as if on a separate machine, if permitted.

    Call this before starting any thread: Linux keeps niceness per thread, and new threads inherit it.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def _runner() -> Any:
    try:
        import uvloop
    except ImportError:  # not available everywhere; asyncio's own loop is slower, which the health check reveals
        return asyncio.run
    return uvloop.run


class _Worker:
    def __init__(self, pipe: Connection, cells: Any, number: int) -> None:
        self._pipe, self._cells, self._base = pipe, cells, 1 + number * WIDTH
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._streams: list[RequestStream] = []
        self._rows = PackedRows()
        self._texts: list[tuple[int, str]] = []
        self._messages: dict[str, str] = {}
        self._off = self._short = 0
        self._aborted = asyncio.Event()

    async def serve(self) -> None:
        """Receive ("job", Job), say ("ready",), receive ("go", t0), say ("report", Report); ("abort",) any time."""
        threading.Thread(target=self._listen, args=(asyncio.get_running_loop(),), daemon=True).start()
        self._pipe.send(("ready",))
        while True:
            word, *rest = await self._inbox.get()
            if word == "job":
                self._pipe.send(("report", await self._run(rest[0])))
                self._rows = PackedRows()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for messages in a thread: they are pickled objects, which an event loop cannot await."""
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(0)  # the directing process is gone, so nothing here is worth keeping
            loop.call_soon_threadsafe(self._receive, message)

    def _receive(self, message: tuple[Any, ...]) -> None:
        if message[0] == "abort":
            self._aborted.set()
            for stream in self._streams:
                stream.give_up("cancelled")
        else:
            self._inbox.put_nowait(message)

    async def _run(self, job: ClientJob) -> ClientReport:
        self._rows, self._messages, self._streams, self._texts = PackedRows(), {}, [], []
        self._off = self._short = 0
        self._aborted.clear()
        self._tokenizer_dir = job.tokenizer_dir
        async with job.interface.transport(job.url) as self._connect:
            load: _Closed | _Open = _Closed(self, job) if job.users else _Open(self, job)
            await load.prepare()
            self._pipe.send(("ready",))
            _, start = await self._inbox.get()
            gc.collect()
            gc.freeze()
            gc.disable()  # a collection pauses everything for milliseconds, and its garbage fits in memory
            try:
                return await self._measured(load, start)
            finally:
                gc.enable()
                gc.unfreeze()

    async def _measured(self, load: "_Closed | _Open", start: int) -> ClientReport:
        lag: list[int] = []
        helpers = [asyncio.create_task(_watch_lag(lag)), asyncio.create_task(self._sweep())]
        cpu, wall = time.process_time_ns(), now()
        await load.drive(start)
        share = (time.process_time_ns() - cpu - load.spun_ns) / max(now() - wall, 1)
        for task in helpers:
            task.cancel()
        for stream in self._streams:
            await stream.close()
        self._count_texts()
        stated = [stream.cached_tokens for stream in self._streams if stream.cached_tokens is not None]
        cached = sum(stated) if stated else None
        share, cpu_number, nice = max(share, 0.0), _cpu_number(), os.nice(0)
        report = self._rows, self._messages, lag, share, cpu_number, load.distinct, nice, cached, self._off
        return ClientReport(*report, unsent=load.unsent, short=self._short)

    def _count_texts(self) -> None:
        """Count the output tokens of answers that the server did not count, now that nothing is timed."""
        if not self._texts:
            return
        tokenizer = opened(self._tokenizer_dir).tokenizer  # not loaded while stamps are taken
        counted = tokenizer.encode_batch([text for _, text in self._texts], add_special_tokens=False)
        for (place, _), item in zip(self._texts, counted, strict=True):
            self._rows.count(place, len(item.ids))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            stamp = now()
            for stream in self._streams:
                if stream.deadline_ns is not None and stream.deadline_ns < stamp:
                    stream.give_up("timeout")

    def stream(self) -> RequestStream:
        self._streams.append(stream := self._connect())
        return stream

    def stopped(self) -> bool:
        stop = self._cells[0]
        return self._aborted.is_set() or (stop != 0 and now() >= stop)

    async def ask(
        self, job: ClientJob, stream: RequestStream, request: Any, place: int, due: int | None, planned: PlannedRequest
    ) -> Row:
        """Send one of a job's requests, count it, and keep its record."""
        index = job.first_index + place * job.step
        request.id = str(job.id_base + index + 1)
        self._cells[self._base + request_stream.SENT] += 1
        row = await stream.ask(request, index, due, job.timeout_ns, job.streaming, planned.isl)
        self.keep(row, stream, planned)
        return row

    def keep(self, row: Row, stream: RequestStream, planned: PlannedRequest) -> None:
        """Keep the record of a planned request, and count it for the live view."""
        if (text := stream.take_text()) is not None and row[-1] is None:
            self._texts.append((len(self._rows), text))
        self._rows.append(row)
        cells, base = self._cells, self._base
        _, due, _, first, end, counted, osl, _, error = row
        if error is not None:
            cells[base + request_stream.ERRORS] += 1
            cells[base + request_stream.CONNECTION] += error == "connection"
            self._messages.setdefault(error, stream.error_text)
            return
        self._off += counted != planned.isl
        self._short += osl < planned.osl
        cells[base + request_stream.OK] += 1
        cells[base + request_stream.LAST_OK] = end
        if first is not None:
            cells[base + request_stream.TTFT_US] += (first - due) // 1000
            cells[base + request_stream.TTFT_N] += 1
            if osl > 1:
                cells[base + request_stream.ITL_US] += (end - first) // (osl - 1) // 1000
                cells[base + request_stream.ITL_N] += 1


class _Closed:
    """Closed loop: users who send the next request after receiving a response."""

    spun_ns = unsent = 0

    def __init__(self, worker: _Worker, job: ClientJob) -> None:
        self._worker, self._job = worker, job
        self._pool = [[(build(job, ask), ask) for ask in conversation] for conversation in job.pool]
        self._given, self._sent, self._repeats = 0, 0, False
        self._users = [worker.stream() for _ in range(job.users)]

    @property
    def distinct(self) -> bool:
        return not self._repeats and self._given <= len(self._pool) * max(len(self._job.words), 1)

    async def prepare(self) -> None:
        await asyncio.gather(*(stream.open() for stream in self._users))

    async def drive(self, start: int) -> None:
        turns = self._conversations()
        await asyncio.gather(*(self._user(stream, turns, start) for stream in self._users))

    def _conversations(self) -> Iterator[tuple[int, list[tuple[Any, PlannedRequest]]]]:
        """Yield the pool's conversations, and from its second round on with another word each."""
        job = self._job
        for taken in count(1):
            times, place = divmod(taken - 1, len(self._pool))
            if times == 0 or not job.words:
                yield taken, self._pool[place]
            else:
                again = [request.renewed(job.words, times) for request in job.pool[place]]
                self._repeats = self._repeats or again[0] is job.pool[place][0]
                yield taken, [(build(job, request), request) for request in again]

    async def _user(
        self, stream: RequestStream, conversations: Iterator[tuple[int, list[tuple[Any, PlannedRequest]]]], start: int
    ) -> None:
        await Pacer(1e9).until(start)
        for taken, conversation in conversations:
            for request, planned in conversation:
                if self._worker.stopped() or self._sent == self._job.limit:
                    return
                self._given = max(self._given, taken)
                place, self._sent = self._sent, self._sent + 1
                row = await self._worker.ask(self._job, stream, request, place, None, planned)
                if row[-1] is not None:
                    await asyncio.sleep(_RETRY_S)
                if self._job.think_ns:
                    await asyncio.sleep(self._job.think_ns / 1e9)


class _Open:
    """Open loop: requests sent when due, whatever the server does; turns of a session when its answer before is old."""

    distinct = True

    def __init__(self, worker: _Worker, job: ClientJob) -> None:
        self._worker, self._job = worker, job
        self._pacer = Pacer(job.mean_gap_ns)
        self._schedule = [
            [(offset, build(job, ask), ask) for offset, ask in ((due, first), *first.then)]
            for due, first in job.schedule
        ]
        self._free: list[RequestStream] = []
        self.unsent = 0

    @property
    def spun_ns(self) -> int:
        return self._pacer.spun_ns

    async def prepare(self) -> None:
        self._free = [self._worker.stream() for _ in range(min(_OPEN_STREAMS, len(self._schedule)))]
        await asyncio.gather(*(stream.open() for stream in self._free))

    async def drive(self, start: int) -> None:
        loop, tasks, place = asyncio.get_running_loop(), set(), 0
        for turns in self._schedule:
            due = start + turns[0][0]
            await self._pacer.until(due, self._worker.stopped)
            if self._worker.stopped():
                break
            task = loop.create_task(self._session(turns, place, due))
            place += len(turns)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)

    async def _session(self, turns: list[tuple[int, Any, PlannedRequest]], place: int, due: int) -> None:
        """Send one request when it is due, and each later turn a delay after the end of the answer before."""
        row = await self._ask(turns[0], place, due)
        for number, turn in enumerate(turns[1:], 1):
            if row[-1] is not None:
                self.unsent += len(turns) - number
                return
            due = row[4] + turn[0]
            await self._pacer.until(due, self._worker.stopped)
            if self._worker.stopped():
                return
            row = await self._ask(turn, place + number, due)

    async def _ask(self, turn: tuple[int, Any, PlannedRequest], place: int, due: int) -> Row:
        _, request, planned = turn
        stream = self._free.pop() if self._free else self._worker.stream()
        row = await self._worker.ask(self._job, stream, request, place, due, planned)
        self._free.append(stream)
        return row


def build(job: ClientJob, ask: Any) -> Any:
    """Build the message of one request of a job."""
    return job.interface.build(ask, streaming=job.streaming, ignore_eos=job.ignore_eos)


async def _watch_lag(lag: list[int]) -> None:
    """Record how late the loop returns from short sleeps: stamps may be late by as much."""
    while True:
        before = now()
        await asyncio.sleep(_LAG_PERIOD_S)
        lag.append(max(now() - before - int(_LAG_PERIOD_S * 1e9), 0))


def _cpu_number() -> int:
    """Return the CPU this process last ran on; -1 if unknown."""
    try:
        with open("/proc/self/stat") as file:  # noqa: PTH123 - a path object brings nothing here
            return int(file.read().rpartition(")")[2].split()[36])
    except (OSError, ValueError, IndexError):
        return -1
