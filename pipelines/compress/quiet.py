"""Redirect the console output of ModelOpt and Transformers to `logging`.

Both print, warn and draw progress bars of their own, which would garble ours. The output of our own progress
display must still reach the screen, also from its refresh thread, so the streams are muted for one thread
only and unmuted around every call into the progress display.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from pipelines.domain.progress import Advance, Progress

log = logging.getLogger("pipelines.compress.tools")


class _MutedStream(io.TextIOBase):
    """A stream that sends one thread's output to the log, and that of all other threads to the real stream."""

    def __init__(self, real: TextIO) -> None:
        self._real = real
        self._owner: int | None = threading.get_ident()
        self._line = ""

    def write(self, text: str) -> int:
        if self._owner != threading.get_ident():
            return self._real.write(text)
        *lines, self._line = (self._line + text).replace("\r", "\n").split("\n")
        owner, self._owner = self._owner, None  # a log handler may write to this same stream
        try:
            for line in filter(str.strip, lines):
                log.debug("%s", line.rstrip())
        finally:
            self._owner = owner
        return len(text)

    def flush(self) -> None:
        self._real.flush()

    def open_up(self) -> None:
        """Let the owner thread's output through as well."""
        self._owner = None

    def mute(self) -> None:
        self._owner = threading.get_ident()

    # Terminal libraries query these before they draw; the base class would not answer for the real stream.
    def isatty(self) -> bool:
        return self._real.isatty()

    def fileno(self) -> int:
        return self._real.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._real.encoding


class Muted:
    """The active mute; code that runs under it must use the display returned by its `progress`."""

    def __init__(self, streams: list[_MutedStream]) -> None:
        self._streams = streams

    @contextmanager
    def aloud(self) -> Iterator[None]:
        """Let this thread's output through within the context."""
        for stream in self._streams:
            stream.open_up()
        try:
            yield
        finally:
            for stream in self._streams:
                stream.mute()

    def progress(self, progress: Progress) -> Progress:
        """Return the same progress display, visible despite the mute."""
        return _AloudProgress(progress, self)


class _AloudProgress:
    def __init__(self, progress: Progress, muted: Muted) -> None:
        self._progress, self._muted = progress, muted

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        with self._muted.aloud():
            task = self._progress.task(title, total, unit)
            advance = task.__enter__()

        def advance_aloud(amount: float) -> None:
            with self._muted.aloud():
                advance(amount)

        try:
            yield advance_aloud
        except BaseException:
            with self._muted.aloud():
                task.__exit__(*sys.exc_info())
            raise
        with self._muted.aloud():
            task.__exit__(None, None, None)

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        with self._muted.aloud():
            self._progress.note(text)


@contextmanager
def muted() -> Iterator[Muted]:
    """Send this thread's stdout and stderr, including warnings, to the log."""
    out, err = _MutedStream(sys.stdout), _MutedStream(sys.stderr)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        # a logging handler created in the meantime keeps the stream, so the stream must not stay muted
        stack.callback(out.open_up)
        stack.callback(err.open_up)
        yield Muted([out, err])


@contextmanager
def transformers_to_log() -> Iterator[None]:
    """Make Transformers log through the handlers of `logging` instead of writing to stderr itself."""
    from pipelines.compress.transformers_door import logging as hf_logging

    hf_logging.disable_default_handler()
    hf_logging.enable_propagation()
    try:
        yield
    finally:
        hf_logging.disable_propagation()
        hf_logging.enable_default_handler()
