"""A process that reads large bodies, so that neither parsing nor tokenizing them delays anyone else's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.serving.openai.errors import ApiError

READ_TIMEOUT_S = 30.0
NICENESS = 12  # tokens of running answers come first
LENGTH = struct.Struct("<Q")
Answer = tuple[bool, Any]
"""What the process sends back: True and the request, or False and the arguments of an ApiError."""


@dataclass(frozen=True, slots=True)
class _Running:
    process: asyncio.subprocess.Process
    to: asyncio.StreamWriter
    back: asyncio.StreamReader


class Reader:
    """Asks the process, one body at a time; starts it when it is needed and kills it when it takes too long."""

    def __init__(self, options: Sequence[str]) -> None:
        """Remember how to start it.

        Args:
            options: of `python -m pipelines.serving.openai.reading`.
        """
        self._command = (sys.executable, "-m", "pipelines.serving.openai.reading", *options)
        self._running: _Running | None = None
        self._turn = asyncio.Lock()

    async def read(self, way: str, body: bytes) -> Any:
        """Read and check one request.

        Args:
            way: "completions", "chat", or "generate/" and the name of a Triton model.
            body: of the request.

        Returns:
            what `prepare` returns, or `prepare_generate`.

        Raises:
            ApiError: what is wrong with it, or that reading it took too long.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    good, found = await self._ask(way, body)
            except TimeoutError:
                message = f"Reading this request took longer than {READ_TIMEOUT_S:.0f} s."
                raise ApiError(400, message, code="request_too_complex") from None
        if good:
            return found
        raise ApiError(**found)

    async def close(self) -> None:
        """End the process."""
        if self._running is not None:
            running, self._running = self._running, None
            with contextlib.suppress(ProcessLookupError):
                running.process.kill()
            await running.process.wait()

    async def _ask(self, way: str, body: bytes) -> Answer:
        try:
            return await self._exchange(way, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            if await self._ended_by_itself():
                return await self._exchange(way, body)
            message = "The process that reads large requests ended while it read this one."
            raise ApiError(500, message, kind="server_error") from None

    async def _exchange(self, way: str, body: bytes) -> Answer:
        running = await self._start()
        try:
            running.to.writelines([LENGTH.pack(len(way) + 1 + len(body)), way.encode(), b"\n", body])
            await running.to.drain()
            (size,) = LENGTH.unpack(await running.back.readexactly(LENGTH.size))
            answer: Answer = pickle.loads(await running.back.readexactly(size))  # from our own process
        except asyncio.CancelledError:  # too slow, or the client left; this answer must not reach another request
            await self.close()
            raise
        return answer

    async def _ended_by_itself(self) -> bool:
        """Return whether the process had ended for want of work, just when some arrived."""
        running, self._running = self._running, None
        return running is not None and await running.process.wait() == 0

    async def _start(self) -> _Running:
        running = self._running
        if running is None or running.process.returncode is not None:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            _give_way(process.pid)
            assert process.stdin is not None
            assert process.stdout is not None
            running = self._running = _Running(process, process.stdin, process.stdout)
        return running


def _give_way(pid: int) -> None:
    """Lower the priority of a process and of its session, as each has an equal share of the processors (sched(7)).

    From outside, because its imports take longer than what it reads.
    """
    with contextlib.suppress(OSError):  # it is gone already
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    with contextlib.suppress(OSError):  # also a kernel without autogroups
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))
