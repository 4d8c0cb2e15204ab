"""Programs on a terminal of their own."""

import fcntl
import os
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


def start_on_terminal(
    command: Sequence[str], environment: Mapping[str, str], *, folder: Path | None = None, columns: int = 80
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a program that controls a new terminal of 40 lines.

    `pty.fork` would run Python code in a copy of the test process, which crashes once that has loaded libraries with
    threads of their own.

    Returns:
        the process, and the descriptor of the other side of its terminal.
    """
    screen, terminal = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command],
        stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=dict(environment),
    )  # fmt: skip
    os.close(terminal)
    return process, screen
