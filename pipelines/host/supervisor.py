"""Supervise a server, so that no process and no shared memory is left behind, whatever happens to us or to it.

Run as `python -I -S supervisor.py STARTER STATUS_FD SHM_PREFIX COMMAND...` in a session of its own, so that the
terminal's Ctrl-C reaches only the starter. The supervisor starts COMMAND, writes its process id to STATUS_FD and then

- forwards SIGTERM, SIGINT and SIGHUP as SIGTERM (drain), under mpirun to the rank that answers, and treats SIGQUIT as
  "kill now" and SIGUSR1 as "the work is done: kill what is left of it", which is an orderly end with exit code 0;
- kills everything when the starter is gone, even after `kill -9`;
- kills everything when a stub of the python backend has died after SIGUSR2, which means that all models are loaded:
  tritonserver 2.51 still says that it is ready, but leaves requests to that model without an answer. It answers SIGUSR2
  with an empty line on STATUS_FD once no loaded model has named shared memory;
- kills whatever COMMAND leaves behind (stubs outlive a killed tritonserver by four seconds, or for good), removes its
  regions in /dev/shm, writes its wait status to STATUS_FD, or the model and status of the stub that died, and ends in
  the same way: same exit code or same signal.

Two things hold even when the supervisor itself is killed, because the kernel does them: everything in COMMAND's process
group is killed (see `tie_to`), and shared memory that both its users have opened has no name any more, so that it is
freed with the last of them (see `unname_regions`).

It uses only a few modules of the standard library: it starts in 15 ms and lives as long as the server.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
CHECK_S = 0.2  # how often it checks that the starter is still alive
DRAIN = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
KILL, FINISHED, LOADED = signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2
SIGNALS = {*DRAIN, KILL, FINISHED, LOADED, signal.SIGCHLD}
SHM = Path("/dev/shm")
STACK_BYTES = 256 << 20
"""Stack size of each thread. Only address space is reserved; memory is used when touched. tritonserver's HTTP library
(libevhtp) may copy a whole body onto the stack, for which the usual 8 MiB are too few (triton-inference-server/server
issue 5840)."""


def start(command: list[str]) -> int:
    """Start the command in this session and return its process id."""
    supervisor = os.getpid()
    lifeline, held = os.pipe()  # the supervisor alone holds the writing end, for as long as it lives
    pid = os.fork()
    if pid:
        os.close(lifeline)
        return pid
    try:
        os.close(held)
        os.setpgid(0, 0)
        tie_to(lifeline)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        stack = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() == supervisor:
            os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"error: {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(127)


def tie_to(lifeline: int) -> None:
    """Let the kernel kill this process group when the other end of the pipe `lifeline` is closed.

    The command and its children inherit the descriptor, and the kernel sends the pipe's signal of readiness, chosen to
    be SIGKILL, to the whole group for as long as one process has it open. No process needs to watch anything, so a
    stub that hangs ends as well. PR_SET_PDEATHSIG would not do for the stubs: it fires when the *thread* that started
    a process ends, and tritonserver loads models in threads that do.
    """
    os.set_inheritable(lifeline, True)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)


def supervise(pid: int, starter: int, status_fd: int, prefix: str, *, ranks: bool) -> tuple[int | None, str]:
    """Wait until the command, or one of its stubs, ends.

    Args:
        pid: of the command.
        starter: process id; the command is killed when that process is gone.
        status_fd: open pipe to the starter.
        prefix: of the names of its shared memory.
        ranks: the command is mpirun.

    Returns:
        the wait status, None when the command has to be killed, and the model of the stub that ended, or "".
    """
    stubs: dict[int, str] = {}
    watching = False
    while os.getppid() == starter:
        stubs |= unname_regions(prefix)
        info = signal.sigtimedwait(SIGNALS, CHECK_S)
        got = info.si_signo if info else None
        if got == KILL:
            return None, ""
        if got == FINISHED:
            return 0, ""
        if got == LOADED:
            watching = True
            stubs |= unname_regions(prefix)
            with contextlib.suppress(BrokenPipeError):
                os.write(status_fd, b"\n")
        if got in DRAIN:
            watching = False  # stubs end now
            os.kill(front_rank(pid) if ranks else pid, signal.SIGTERM)
        status = reap(pid)
        if status is not None:
            return status, ""
        for stub, model in stubs.items() if watching else ():
            # tritonserver waits for those of its children that it ended itself and leaves others as zombies
            with contextlib.suppress(OSError):
                state, *rest = stat_of(stub)
                if state == "Z" and (status := int(rest[48])):  # field 52, exit_code
                    return status, model
    return None, ""


def front_rank(pid: int) -> int:
    """Return the process that answers requests: mpirun's rank 0, or mpirun itself before there is one.

    Open MPI's mpirun, given SIGTERM, kills every rank after `odls_base_sigkill_timeout`, one second: too short to
    drain. When rank 0 exits, the other ranks follow.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int(stat_of(entry.name)[1]) == pid and b"OMPI_COMM_WORLD_RANK=0" in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    return int(entry.name)
    return pid


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, the state; the second, a name, may contain anything.

    Raises:
        OSError: there is no such process.
    """
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()


def reap(pid: int) -> int | None:
    """Reap every child that has ended, and return the wait status of `pid` if it is one of them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == pid else status
    return status


def regions(prefix: str) -> list[Path]:
    """List the shared memory whose name begins with `prefix`."""
    return list(SHM.glob(f"{prefix}*")) if prefix else []


def unname_regions(prefix: str) -> dict[int, str]:
    """Remove the name of each region that both its users have opened, and return the stubs that have: pid -> model.

    tritonserver makes one per instance of a python model and gives its name to the stub as an argument; once the stub
    has mapped it, the name is no longer needed (`SharedMemoryManager` of python_backend grows it by its descriptor).
    """
    stubs = {}
    for region in regions(prefix):
        for pid in session_members():
            model = model_of_stub(pid, region)
            if model is not None:
                stubs[pid] = model
                with contextlib.suppress(OSError):
                    region.unlink()
    return stubs


def model_of_stub(pid: int, region: Path) -> str | None:
    """Return the model whose stub a process is, None if it has not mapped the region of which it was given the name.

    Its arguments are `triton_python_backend_stub .../MODEL/VERSION/model.py REGION ...`.
    """
    folder = Path("/proc", str(pid))
    with contextlib.suppress(OSError):
        arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        if region.name in arguments and f" {region}\n" in (folder / "maps").read_text():
            return next((Path(each).parts[-3] for each in arguments if each.endswith("/model.py")), "?")
    return None


def session_members() -> list[int]:
    """List all other processes of this session, and children that have left it."""
    own, members = os.getpid(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != own:
            with contextlib.suppress(OSError):
                state, parent, _, session = stat_of(entry.name)[:4]
                if state != "Z" and own in (int(parent), int(session)):
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
        ended = reap(pid)
        status = ended if status is None else status
        try:  # grandchildren become ours once their parents have ended
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            if not members:
                break
        time.sleep(0.01)
    for region in regions(prefix):
        with contextlib.suppress(OSError):
            region.unlink()
    return status


def end_like(status: int | None) -> None:
    """End this process with the same exit code, or by the same signal."""
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # one that is waiting must not end this process in its own way
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    """Run the supervisor; see the module docstring."""
    starter, status_fd, prefix = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.set_inheritable(status_fd, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = start(sys.argv[4:])
    os.write(status_fd, f"{pid}\n".encode())
    status, model = supervise(pid, starter, status_fd, prefix, ranks=Path(sys.argv[4]).name == "mpirun")
    late = clear(pid, prefix)
    status = status if status is not None else late
    with contextlib.suppress(BrokenPipeError):
        os.write(status_fd, f"{status} {model}\n".encode())
    end_like(status)


if __name__ == "__main__":
    main()
