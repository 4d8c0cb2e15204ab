"""Run a command so that nothing it started outlives it.

    python -m tests.contained COMMAND...

A supervisor in a session of its own starts the command and adopts every process whose parent dies
(PR_SET_CHILD_SUBREAPER). Once the command has ended, or this process has, by whatever signal, the supervisor ends all
descendants by their ids. A command that succeeded but left something running fails.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

import psutil

from pipelines.host.supervisor import CHECK_S, PR_SET_CHILD_SUBREAPER, reap

GRACE_S = 5
"""Time for helpers of multiprocessing and others to end by themselves, and then again after SIGTERM."""


def main(command: list[str]) -> int:
    """Run the command and return its exit code; 1 if it succeeded but left processes running."""
    if not command:
        sys.stderr.write("usage: python -m tests.contained COMMAND...\n")
        return 2
    reads, writes = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(writes)
        os._exit(_keep(command, reads))
    os.close(reads)  # the other end is open as long as this process lives
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.write(writes, bytes([number])) and None)
    return os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])


def _keep(command: list[str], told: int) -> int:
    """Run the command, end what is left of it, and return the exit code.

    Args:
        command: program and arguments.
        told: pipe with the numbers of signals for the command; its end means that whoever waited is gone.
    """
    os.setsid()  # a signal for the whole group of `make` does not end the supervisor
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # a shell without job control lets what it starts in the background ignore SIGINT, and tests send it
        started = os.posix_spawnp(command[0], command, os.environ, setsigdef=[signal.SIGINT])
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}.\n")
        return 127
    while (status := reap(started)) is None:  # whoever lost its parent is reaped too, as init would
        if select.select([told], [], [], CHECK_S)[0]:
            number = os.read(told, 1)
            if not number:
                _end(_descendants())
                return 1
            os.kill(started, number[0])
    code, left = os.waitstatus_to_exitcode(status), _wait(_descendants())
    names = [_name(process) for process in left]
    _end(left)
    for name in names:
        sys.stderr.write(f"left running by {command[0]}: {name}\n")
    return code if code > 0 else 128 - code if code < 0 else int(bool(names))


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _wait(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait until the processes and whatever they start have ended; return those that have not."""
    end = time.monotonic() + GRACE_S
    while processes and time.monotonic() < end:
        psutil.wait_procs(processes, timeout=0.2)
        processes = _descendants()
    return processes


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    while rest := _wait(_descendants()):
        for process in rest:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline()) or process.name()}"
    except psutil.NoSuchProcess:
        return str(process.pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
