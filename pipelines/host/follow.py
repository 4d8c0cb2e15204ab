"""End with another process: what started this one may be killed without a chance to say so."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from threading import Thread


def end_with(pid: int) -> None:
    """Send this process SIGTERM as soon as another one has ended, however it ended; needs Linux 5.3.

    Unlike PR_SET_PDEATHSIG, it does not end this process with a mere thread of the other, and reaches grandparents.
    """
    handle = None
    with suppress(AttributeError, PermissionError):  # another system, or an old container that forbids the call
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGTERM)
    if handle is not None:
        Thread(target=_wait_for, args=(handle,), name="follow", daemon=True).start()


def _wait_for(handle: int) -> None:
    select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
