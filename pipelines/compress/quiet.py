"""Redirect the console output of ModelOpt and Transformers to `logging`.

Both print, warn and draw progress bars of their own, which would garble ours. Our own progress display writes to the
streams that were there when it was made.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

log = logging.getLogger("pipelines.compress.tools")


class _ToLog(io.TextIOBase):
    """A stream whose lines go to the log; what a log handler writes to it goes to the real stream."""

    def __init__(self, real: TextIO) -> None:
        self._real, self._line, self._is_logging = real, "", False

    def write(self, text: str) -> int:
        if self._is_logging:
            return self._real.write(text)
        *lines, self._line = (self._line + text).replace("\r", "\n").split("\n")
        self._is_logging = True
        try:
            for line in filter(str.strip, lines):
                log.debug("%s", line.rstrip())
        finally:
            self._is_logging = False
        return len(text)


@contextmanager
def muted() -> Iterator[None]:
    """Send stdout and stderr, including warnings, to the log."""
    with redirect_stdout(_ToLog(sys.stdout)), redirect_stderr(_ToLog(sys.stderr)):
        yield


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
