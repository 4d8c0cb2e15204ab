"""Supervise a server, so that no process and no shared memory is left behind, whatever happens to us or to it.

Run as `python -I -S keeper.py STARTER STATUS_FD SHM_PREFIX COMMAND...` in a session of its own, so that the terminal's
Ctrl-C reaches only the starter. The keeper starts COMMAND, writes its process id to STATUS_FD and then

- forwards SIGTERM, SIGINT and SIGHUP as SIGTERM (drain), under mpirun to the rank that answers, and treats SIGQUIT as
  "kill now";
- kills everything when the starter is gone, even after `kill -9`;
- kills whatever COMMAND leaves behind (stubs of the python backend outlive a killed tritonserver by four seconds),
  removes its regions in /dev/shm, and ends the way COMMAND ended: same exit code or same signal.

It uses only a few modules of the standard library: it starts in 15 ms and lives as long as the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
CHECK_S = 0.2  # how often it checks that the starter is still alive
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
SHM = Path("/dev/shm")
STACK_BYTES = 256 << 20
"""Stack size of each thread. Only address space is reserved; memory is used when touched. tritonserver's HTTP library
(libevhtp) copies the whole body of a form, curl's default content type, onto the stack twice: with the usual 8 MiB, a
prompt of 4 MB crashes the server (triton-inference-server/server issue 5840)."""


def start(command: list[str]) -> int:
    """Start the command in this session and return its process id."""
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        raise_stack_limit()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() == keeper:
            os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"error: {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(127)


def raise_stack_limit() -> None:
    """Raise the stack limit of the command's threads to `STACK_BYTES`, or as far as the system allows."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    allowed = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (allowed, hard))


def keep(pid: int, starter: int, *, ranks: bool) -> int | None:
    """Wait until the command ends and return its wait status, or None when it has to be killed.

    Args:
        pid: of the command.
        starter: process id; the command is killed when that process is gone.
        ranks: the command is mpirun.
    """
    while os.getppid() == starter:
        info = signal.sigtimedwait(SIGNALS, CHECK_S)
        got = info.si_signo if info else None
        if got == signal.SIGQUIT:
            return None
        if got in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(front_rank(pid) if ranks else pid, signal.SIGTERM)
        status = reap(pid)
        if status is not None:
            return status
    return None


def front_rank(pid: int) -> int:
    """Return the process that answers requests: mpirun's rank 0, or mpirun itself before there is one.

    Open MPI's mpirun, given SIGTERM, kills every rank after `odls_base_sigkill_timeout`, one second: too short to
    drain. When rank 0 ends by itself, the other ranks follow.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid and b"OMPI_COMM_WORLD_RANK=0" in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
    return pid


def reap(pid: int) -> int | None:
    """Reap every child that has ended, and return the wait status of `pid` if it is one of them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found = ended[1] if ended[0] == pid else found
    return found


def session_members() -> list[int]:
    """List all other processes of this session."""
    own, members = os.getpid(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != own:
            with contextlib.suppress(OSError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                if after_name[0] != "Z" and int(after_name[3]) == own:  # state, ppid, pgrp, session
                    members.append(int(entry.name))
    return members


def clear(pid: int, prefix: str) -> int | None:
    """Kill and reap the rest of the session, remove its shared memory; return the wait status of `pid` if reaped."""
    status, until = None, time.monotonic() + 5
    while time.monotonic() < until:
        members = session_members()
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        status = reap(pid) if status is None else status
        if not members:
            break
        time.sleep(0.01)
    for region in SHM.glob(f"{prefix}*") if prefix else ():
        with contextlib.suppress(OSError):
            region.unlink()
    return status


def end_like(status: int | None) -> None:
    """End this process with the same exit code, or by the same signal."""
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    """Run the keeper; see the module docstring."""
    starter, status_fd, prefix = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.set_inheritable(status_fd, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = start(sys.argv[4:])
    os.write(status_fd, f"{pid}\n".encode())
    os.close(status_fd)
    status = keep(pid, starter, ranks=Path(sys.argv[4]).name == "mpirun")
    late = clear(pid, prefix)
    end_like(status if status is not None else late)


if __name__ == "__main__":
    main()
