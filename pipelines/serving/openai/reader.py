"""A process that reads large bodies, so that neither parsing nor tokenizing them delays anyone else's tokens.

It is there before the first body comes, and is not ended because the machine is busy: only processor time counts
against a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.serving.openai.errors import ApiError

CPU_SECONDS = 30.0
"""Processor time for one body, which is the client's own; 4 MB take up to 4 s."""
NICENESS = 5  # tokens of running answers come first; much more would stop it on a busy machine
LENGTH = struct.Struct("<Q")
Answer = tuple[bool, Any]
"""What the process sends back: True and the request, or False and the arguments of an ApiError."""


@dataclass(frozen=True, slots=True)
class _Running:
    process: asyncio.subprocess.Process
    to: asyncio.StreamWriter
    back: asyncio.StreamReader


class Reader:
    """Asks the process, one body at a time, and starts it again when it has ended."""

    def __init__(self, options: Sequence[str], patience_s: float) -> None:
        """Remember how to start it.

        Args:
            options: of `python -m pipelines.serving.openai.reading`.
            patience_s: longest wait for an answer, which is what the whole request may take.
        """
        self._command = (sys.executable, "-m", "pipelines.serving.openai.reading", *options)
        self._patience_s = patience_s
        self._running: _Running | None = None
        self._turn = asyncio.Lock()
        self._work: asyncio.Task[Answer] | None = None

    async def open(self) -> None:
        """Start the process, without waiting until it has loaded."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        _give_way(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        self._running = _Running(process, process.stdin, process.stdout)

    async def close(self) -> None:
        """End the process."""
        if self._work is not None:
            self._work.cancel()  # it would start the process again
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                self._running.process.kill()
            await self._running.process.wait()

    async def read(self, way: str, body: bytes) -> Any:
        """Read and check one request.

        Args:
            way: "completions", "chat", or "generate/" and the name of a Triton model.
            body: of the request.

        Returns:
            what `prepare` returns, or `prepare_generate`.

        Raises:
            ApiError: what is wrong with it; or that it was not read in time, which is not the client's fault.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                await self._turn.acquire()
                # to its end whether we wait or not: a process that was ended would have to be loaded anew
                self._work = asyncio.create_task(self._ask(way, body))
                self._work.add_done_callback(self._next)
                good, found = await asyncio.shield(self._work)
        except TimeoutError:
            raise _ours("The server is too busy to read this request now. Send it again.") from None
        if good:
            return found
        raise ApiError(**found)

    def _next(self, done: asyncio.Task[Answer]) -> None:
        self._turn.release()
        if not done.cancelled():
            done.exception()  # it has been seen, even where nobody waits any more

    async def _ask(self, way: str, body: bytes) -> Answer:
        if self._running is None or self._running.process.returncode is not None:
            await self.open()
        running = self._running
        assert running is not None
        try:
            running.to.writelines([LENGTH.pack(len(way) + 1 + len(body)), way.encode(), b"\n", body])
            await running.to.drain()
            (size,) = LENGTH.unpack(await running.back.readexactly(LENGTH.size))
            answer: Answer = pickle.loads(await running.back.readexactly(size))  # from our own process
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await running.process.wait()
            await self.open()
            if code == -signal.SIGPROF:
                message = f"Reading this request takes more than {CPU_SECONDS:.0f} s of processor time."
                raise ApiError(400, message, code="request_too_complex") from None
            raise _ours("The process that reads large requests ended while it read this one. Send it again.") from None
        return answer


def _ours(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="unavailable")


def _give_way(pid: int) -> None:
    """Lower the priority of a process and of its session, as each has an equal share of the processors (sched(7)).

    From outside, because its imports take longer than what it reads.
    """
    with contextlib.suppress(OSError):  # it is gone already
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    with contextlib.suppress(OSError):  # also a kernel without autogroups
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))
