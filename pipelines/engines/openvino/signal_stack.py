"""Take back the signal stack that OpenVINO's CPU plugin gives the thread that loads it.

With AMX, the plugin gives it an alternate stack, which it frees when it is unloaded. If nobody took it back, the next
signal is written to freed memory: Ctrl-C then ends the process with SIGSEGV. The ordinary stack is large enough.
"""

from __future__ import annotations

import ctypes

SS_DISABLE = 2
"""From <signal.h> of Linux."""


class SignalStack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def signal_stack() -> SignalStack:
    """Return this thread's alternate stack."""
    found = SignalStack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(found))
    return found


def take_back_signal_stack() -> None:
    """Let signals to this thread use its ordinary stack."""
    ctypes.CDLL(None).sigaltstack(ctypes.byref(SignalStack(None, SS_DISABLE, 0)), None)
