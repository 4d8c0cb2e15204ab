"""A child process that cannot outlive this one; see keeper.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

KEEPER = Path(__file__).with_name("keeper.py")


class KeptProcess:
    """A running command, together with everything it starts.

    Attributes:
        pid: process id of the command itself, not of its keeper.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_file: Path, shm_prefix: str = ""
    ) -> None:
        read_fd, write_fd = os.pipe()
        keeper = [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid()), str(write_fd), shm_prefix, *command]
        try:
            with log_file.open("ab") as log:
                self._keeper = subprocess.Popen(
                    keeper,
                    env=dict(env),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[write_fd],
                )
        finally:
            os.close(write_fd)
        with os.fdopen(read_fd) as answer:
            self.pid = int(answer.readline() or 0)

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None while the command runs."""
        return self._keeper.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end and return the exit code, or None after `timeout_s`."""
        try:
            return self._keeper.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask the command to shut down gracefully."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command and everything it started; return when all of it is gone."""
        self._send(signal.SIGQUIT)
        if self.wait(10) is None:
            self._keeper.kill()  # the kernel then kills the command (PR_SET_PDEATHSIG)
            self._keeper.wait()

    def stop(self, timeout_s: float) -> int:
        """Ask the command to end, wait up to `timeout_s`, then kill it; a second Ctrl-C kills at once.

        Returns:
            The exit code, negative for a signal.
        """
        try:
            self.terminate()
            self.wait(timeout_s)
        finally:
            if self.poll() is None:
                self.kill()
        return int(self._keeper.returncode)

    def _send(self, number: signal.Signals) -> None:
        if self._keeper.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._keeper.send_signal(number)


def describe_exit(code: int) -> str:
    """Describe an exit code: 1 -> "exit code 1", -9 -> "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (" (by hand, or by the kernel when memory ran out)" if code == -signal.SIGKILL else "")
