"""A process that reads large bodies, so that parsing and tokenizing them delays no other stream.

It starts before the first body arrives. Its limit is processor time, so a busy machine does not kill it.
"""

import asyncio
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pipelines.host.machine import trim_heap
from pipelines.serving.openai.bodies import Limits
from pipelines.serving.openai.errors import ApiError, unavailable
from pipelines.serving.openai.prepare import Request, ServedModel, prepared_pictures, read_request

CPU_SECONDS = 30.0
"""Processor time for one body, which is the client's own; 4 MB take up to 4 s."""
NICENESS = 5  # tokens of running answers come first; much more would stop it on a busy machine
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_libc = ctypes.CDLL(None)
_worker: dict[str, ServedModel] = {}
"""In the process: its model."""


class Reader:
    """Reads one body at a time in the process, and starts it again when it has ended."""

    def __init__(self, load: Callable[[], ServedModel], limits: Limits) -> None:
        """Remember how to start it.

        Args:
            load: collects the facts of the served model; it is called in the process.
            limits: of one request, whose time is also the longest wait for an answer.
        """
        self._load, self._limits = load, limits
        self._turn = asyncio.Lock()
        self._closed = False

    def open(self) -> None:
        """Start the process, without waiting until it has loaded."""
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, _begin, (self._load,))
        self._pool.submit(int)  # a pool starts its process with the first work

    def close(self) -> None:
        """End the process, for good."""
        self._closed = True
        for process in multiprocessing.active_children():
            process.kill()
        self._pool.shutdown(cancel_futures=True)  # a pool that ends beside Python may be woken after it has closed

    async def read(self, way: str, body: bytes) -> Request:
        """Read and check one request; see `prepare.read_request`.

        Raises:
            ApiError: what is wrong with it; or that it was not read in time, which is not the client's fault.
        """
        request: Request = await self._done(partial(read_request, way, body, limits=self._limits))
        return request

    async def pixels(self, pictures: Sequence[bytes], tokens: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
        """Return tiles of the contents of files, and a prompt with their rows; see `prepare.prepared_pictures`.

        Raises:
            ApiError: as `read`.
        """
        pixels: tuple[Any, tuple[int, ...]] = await self._done(partial(prepared_pictures, pictures, tokens))
        return pixels

    async def _done(self, work: Callable[..., Any]) -> Any:
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                await self._turn.acquire()  # a body waits here, where it is free to drop if its client leaves
                return await asyncio.shield(self._begun(work))  # to its end whether its client waits or not
        except TimeoutError:
            raise unavailable("The server is too busy to read this request now. Send it again.") from None
        except BrokenProcessPool:
            raise unavailable(
                "The process that reads large requests ended while it read this one. Send it again."
            ) from None

    def _begun(self, work: Callable[..., Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        try:
            reading = loop.run_in_executor(self._pool, _bounded, work)
        except BrokenProcessPool:  # it ended while it had nothing to read
            if self._closed:
                raise
            self.open()
            reading = loop.run_in_executor(self._pool, _bounded, work)
        reading.add_done_callback(self._next)
        return reading

    def _next(self, done: asyncio.Future[Any]) -> None:
        broken = not done.cancelled() and isinstance(done.exception(), BrokenProcessPool)
        if broken and not self._closed:
            self.open()
        self._turn.release()


def _begin(load: Callable[[], ServedModel]) -> None:
    """Prepare the process: its priority first, as loading takes longer than what it reads."""
    _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    os.setsid()  # each session has an equal share of the processors (sched(7))
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a kernel without autogroups
        Path("/proc/self/autogroup").write_text(str(NICENESS))
    signal.signal(signal.SIGPROF, _too_complex)
    _worker["model"] = load()
    gc.freeze()  # no later collection walks through the modules and the tokenizer


def _bounded(work: Callable[..., Any]) -> Any:
    """Do work that takes the model, within the processor time of one body."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        return work(model=_worker["model"])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        trim_heap()


def _too_complex(*_: object) -> NoReturn:
    message = f"Reading this request takes more than {CPU_SECONDS:.0f} s of processor time."
    raise ApiError(400, message, code="request_too_complex")
