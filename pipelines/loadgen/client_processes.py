"""The client processes of a benchmark. They live as long as it does and end with the process that started them."""

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic_ns
from types import ModuleType, TracebackType
from typing import Any, Self

from pipelines.domain.errors import UserError
from pipelines.loadgen.config import BenchmarkSettings, WorkloadSettings
from pipelines.loadgen.request_stream import ClientJob, ClientReport, SharedCounters

_START_NS = 100_000_000
_PREPARE_S = 60.0
_USERS_EACH = 64
_RATE_EACH = 500.0


def processes_for(workload: WorkloadSettings, settings: BenchmarkSettings, cpus: int) -> int:
    """Return the number of client processes: one per 64 users or 500 requests/s, at most a quarter of the CPUs."""
    if settings.processes is not None:
        return settings.processes
    users = max(settings.concurrency or (1,)) / _USERS_EACH
    rate = max(settings.request_rate or (1.0,)) / _RATE_EACH
    needed = users if workload.arrival == "closed" else rate
    return max(1, min(-int(-needed // 1), cpus // 4))


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep a started process from importing the main module: a script that calls `pipelines.api` would run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class ClientProcesses:
    """The processes and the pipes to them."""

    def __init__(self, processes: int) -> None:
        from pipelines.loadgen.worker import main

        context = multiprocessing.get_context("spawn")
        self.board = SharedCounters(processes)
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(theirs, self.board.cells, number), daemon=True)
            with _without_main():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        self._expect("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # each process ends when its pipe closes
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self._processes)

    def start(self, jobs: Sequence[ClientJob]) -> int:
        """Distribute a level over the processes and start them together.

        Returns:
            the start time, ns on CLOCK_MONOTONIC, slightly in the future.
        """
        self.board.clear()
        self._send([("job", job) for job in jobs])
        self._expect("ready")
        start = monotonic_ns() + _START_NS
        self._send([("go", start)] * self.size)
        return start

    def finished(self, seconds: float) -> bool:
        """Wait up to a timeout and return whether every process has something to report.

        Raises:
            UserError: a process died; without its part, the load is another one.
        """
        silent = [pipe for pipe in self._pipes if not pipe.poll()]
        if silent:
            wait(silent, seconds)
        for process in self._processes:
            if process.exitcode is not None:
                raise _died(process)
        return all(pipe.poll() for pipe in silent)

    def abort(self) -> None:
        """Cancel the running requests."""
        self._send([("abort",)] * self.size)

    def collect(self) -> list[ClientReport]:
        """Collect the reports of all processes.

        Raises:
            UserError: a process died.
        """
        return [message[1] for message in self._expect("report")]

    def _send(self, messages: Sequence[tuple[Any, ...]]) -> None:
        for pipe, process, message in zip(self._pipes, self._processes, messages, strict=True):
            try:
                pipe.send(message)
            except (BrokenPipeError, ConnectionResetError):
                raise _died(process) from None

    def _expect(self, word: str) -> list[tuple[str, ClientReport]]:
        messages = []
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            try:
                if not pipe.poll(_PREPARE_S):
                    raise UserError(
                        f"A client process of the load generator did not send '{word}' within {_PREPARE_S:g} s."
                    )
                messages.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                raise _died(process) from None
        return messages


def _died(process: BaseProcess) -> UserError:
    process.join(1)
    return UserError(
        f"A client process of the load generator ended with code {process.exitcode}.",
        todo="Its last output is above; memory may have run out.",
    )
