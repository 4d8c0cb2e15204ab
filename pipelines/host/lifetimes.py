"""Bind lifetimes: a child to the work that waits for it, a process to its parent, a loop to a block."""

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from pipelines.domain.errors import UserError


@contextmanager
def child_process(command: Sequence[str], *, grace_s: float, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; if the block is left by an exception, such as Ctrl-C, stop the command before it goes on."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with _signals_deferred():  # an interrupt inside of Popen would lose a child that runs already
            process = subprocess.Popen(command, **options)
        yield process
    except BaseException:
        if process is not None:
            process.terminate()
            if exit_code(process, grace_s) is None:
                process.kill()
                exit_code(process, math.inf)
        raise


def exit_code(process: subprocess.Popen[bytes], timeout_s: float = 0.0) -> int | None:
    """Return the exit code (negative for a signal), or None if the process still runs after this time.

    Popen's poll() and wait() do not do: after a Ctrl-C between their taking a lock and their `try`, they never see the
    end.
    """
    until = time.monotonic() + timeout_s
    while process.returncode is None:
        try:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                process.returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                os.waitpid(process.pid, 0)
            elif (left := until - time.monotonic()) > 0:
                time.sleep(min(WAIT_POLL_S, left))
            else:
                break
        except ChildProcessError:  # another thread was first; without its word 0, as Popen has it
            process.returncode = process.returncode or 0
    return process.returncode


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Deliver SIGINT, SIGTERM and SIGHUP only after the block; other threads than the main one never get them.

    Ignored ones stay ignored, so that a child started in the block ignores them too (nohup).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    heeded = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    with signal_handlers(heeded, lambda number, _: arrived.append(number)):
        yield
    for late in arrived:
        signal.raise_signal(late)


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command."""


@contextmanager
def signal_handlers(numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handle these signals in another way in the block; only the main thread can do that."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def on_hangup(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Handle a closed terminal, unless nohup lets this process outlive it."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def interrupt_once(number: int, _frame: FrameType | None) -> None:
    """Act like Ctrl-C on the first signal of this kind: the shell sends SIGHUP and, when it ends, so does the kernel.

    Raises:
        KeyboardInterrupt: always.
    """
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def end_with(pid: int) -> None:
    """Send this process SIGTERM as soon as another one has ended, however it ended; needs Linux 5.3.

    Unlike PR_SET_PDEATHSIG, it does not end this process with a mere thread of the other, and reaches grandparents.
    Where the other one leads the session, as make does in `ssh -t host 'make serve'`, the kernel tells it alone that
    the terminal was closed, and make then waits for its child: this process sends itself SIGHUP.
    """
    handle = None
    with suppress(AttributeError, PermissionError):  # another system, or an old container that forbids the call
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGTERM)
    if handle is None:
        return

    poller = select.poll()
    poller.register(handle, select.POLLIN)
    with suppress(OSError):  # no terminal, or the other has ended
        if os.getsid(0) == pid:
            poller.register(os.open("/dev/tty", os.O_RDONLY), 0)  # reports a hangup alone

    def follow() -> None:
        ended = False
        while not ended:
            for file, _ in poller.poll():
                poller.unregister(file)
                ended = file == handle
                os.kill(os.getpid(), signal.SIGTERM if ended else signal.SIGHUP)

    threading.Thread(target=follow, name="follow", daemon=True).start()


@contextmanager
def repeated(work: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Call `work` in a thread of this name every so many seconds of the block, and once more after it."""
    done = threading.Event()

    def loop() -> None:
        while not done.wait(every_s):
            work()

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        work()


# A child process that cannot outlive this one; see supervisor.py.

# Count the processes that the kernel has killed because memory ran out.

APART_S = 10.0
COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKills:
    """The kernel's own count of this process's control group, which its children are in too.

    Where the group's is not shown, it is that of the whole machine.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = next((file for file in _candidates(root) if _count(file) is not None), root / "proc/vmstat")
        self._before = self._latest = _count(self._file)
        self._checked = clock()

    def reset(self) -> None:
        """Forget kills of other processes, of which there may have been some: those before the last call but one.

        Calls within `APART_S` count as one, because a large process takes a while to end after it was killed.
        """
        if self._clock() - self._checked >= APART_S:
            self._before, self._latest, self._checked = self._latest, _count(self._file), self._clock()

    def happened(self) -> bool | None:
        """Return whether a process was killed for want of memory; None where the kernel does not say."""
        now = _count(self._file)
        return None if now is None or self._before is None else now > self._before


def _candidates(root: Path) -> Iterator[Path]:
    """Yield the files that may have the count: control groups of version 2 and 1, and the machine's."""
    groups = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # inside a container the path may be the host's, while only the container's own group is mounted
            for place in (path.lstrip("/"), ""):
                if not controllers:
                    yield groups / place / "memory.events"
                elif "memory" in controllers.split(","):
                    yield groups / "memory" / place / "memory.oom_control"
    yield root / "proc/vmstat"


def _count(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        if match := COUNT.search(file.read_text()):
            return int(match[1])
    return None


FINISHED_POLL_S, WAIT_POLL_S = 0.05, 0.02
SUPERVISOR = Path(__file__).with_name("supervisor.py")


class SupervisedProcess:
    """A running command, together with everything it starts.

    Attributes:
        pid: process id of the command itself, not of its supervisor.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_file: Path, shm_prefix: str = ""
    ) -> None:
        self._memory_kills = MemoryKills()
        read_fd, write_fd = os.pipe()
        arguments = (str(os.getpid()), str(write_fd), shm_prefix, *command)
        try:
            with log_file.open("ab") as log:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(SUPERVISOR), *arguments],
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
        self._answers = os.fdopen(read_fd)
        self.pid = int(self._answers.readline() or 0)
        self._report: str | None = None

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None while the command runs."""
        code = exit_code(self._supervisor)
        if code is None:
            self._memory_kills.reset()
        return code

    def wait(self, timeout_s: float = math.inf) -> int | None:
        """Wait for the end and return the exit code, or None after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while (code := self.poll()) is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(WAIT_POLL_S, left))
        return code

    def terminate(self) -> None:
        """Ask the command to shut down gracefully."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command and everything it started; return when all of it is gone."""
        self._send(signal.SIGQUIT)
        if self.wait(10) is None:
            self._supervisor.kill()  # the kernel then kills the command
            self.wait()

    def watch_stubs(self) -> None:
        """End everything when a stub of the python backend ends, from now on: its model never answers again.

        Returns once no loaded model has named shared memory, which would stay if this process and the supervisor were
        killed.
        """
        self._send(signal.SIGUSR2)
        line = self._answers.readline()
        self._report = None if line == "\n" else line

    def stop(
        self,
        timeout_s: float,
        *,
        first: Callable[[], bool] = lambda: False,
        finished: Callable[[], bool] = lambda: False,
    ) -> int:
        """Ask the command to end, wait up to `timeout_s`, then kill it; a second Ctrl-C kills at once.

        Args:
            timeout_s: seconds.
            first: whether there is something to wait for before the command is asked.
            finished: whether its work is done, so that what is left of it may be killed: an orderly end, with exit
                code 0.

        Returns:
            The exit code, negative for a signal.
        """
        until = time.monotonic() + timeout_s
        try:
            while first() and self.wait(FINISHED_POLL_S) is None:
                pass
            self.terminate()
            while self.wait(FINISHED_POLL_S) is None and time.monotonic() < until:
                if finished():
                    self._send(signal.SIGUSR1)
                    self.wait(timeout_s)
        finally:
            if self.poll() is None:
                self.kill()
        return int(self.poll() or 0)

    def describe_exit(self) -> str:
        """Describe how the command ended: "exit code 1", "killed by SIGSEGV", which part of it, who sent a SIGKILL."""
        if self._report is None:
            with self._answers:
                self._report = self._answers.readline()
        if not self._report:  # the supervisor wrote nothing, because it was killed itself
            return f"killed by the kernel: its supervisor (process {self._supervisor.pid}) was killed by SIGKILL"
        model = self._report.partition(" ")[2].strip()
        return (f"its process for model '{model}': " if model else "") + self._describe(self._supervisor.returncode)

    def _describe(self, code: int) -> str:
        if code >= 0:
            return f"exit code {code}"
        if code != -signal.SIGKILL:
            return f"killed by {_signal_name(-code)}"
        return {
            None: "killed by SIGKILL (by hand, or by the kernel when memory ran out)",
            True: "killed by SIGKILL, by the kernel, because memory ran out",
            False: "killed by SIGKILL (by hand or by another program; memory did not run out)",
        }[self._memory_kills.happened()]

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._supervisor.send_signal(number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


STOP_S = 10.0


def run_logged(
    command: Sequence[str],
    *,
    title: str,
    env: Mapping[str, str],
    cwd: Path,
    log_file: Path,
    writes: Path | None = None,
) -> list[str]:
    """Run a command to its end, and return the lines of its log; nothing of it is left if this is interrupted.

    Raises:
        UserError: it failed, or did not write the file that it is run for; with the end of its log.
    """
    process = SupervisedProcess(command, env=env, cwd=cwd, log_file=log_file)
    try:
        code = process.wait()
    except BaseException:
        process.stop(STOP_S)
        raise
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    if code or (writes is not None and not writes.is_file()):
        raise UserError(
            f"{title} failed ({process.describe_exit()}): {lines[-1] if lines else 'no output'}.",
            todo="Its last output: " + " | ".join(lines[-5:]),
        )
    return lines
