"""A child that runs is never lost, whenever the interrupt comes; and it ends with what it belongs to."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from pipelines.host.lifetimes import child_process

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_an_interrupt_while_the_child_starts_still_stops_it(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), child_process(SLEEP, grace_s=30):
        pytest.fail("the block began although the interrupt came before it")
    assert started[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_time_limit_stops_the_child():
    with pytest.raises(subprocess.TimeoutExpired), child_process(SLEEP, grace_s=30) as process:
        process.wait(0.1)
    assert process.returncode == -signal.SIGTERM


def test_an_interrupt_while_popen_holds_its_lock_still_stops_it():
    """Failed before: after all of `grace_s` the wait for the killed child had no end."""

    def interrupted(process):
        process._waitpid_lock.acquire()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), child_process(SLEEP, grace_s=30) as process:
        interrupted(process)
    process._waitpid_lock.release()
    assert process.wait(0.1) == -signal.SIGTERM


def test_a_child_ignores_the_hangup_that_its_parent_ignores():
    """Failed before: under nohup, a closed terminal ended the cells of a sweep."""
    program = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with child_process([sys.executable, "-c", program], grace_s=30, stdout=subprocess.PIPE) as process:
            assert process.communicate(timeout=30)[0] == b"True\n"
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_a_program_that_does_not_exist_is_only_an_error():
    with pytest.raises(FileNotFoundError), child_process(["/no/such/program"], grace_s=1):
        pass


FOLLOWER = """
import os, signal, time
from pipelines.host.lifetimes import end_with, on_hangup
on_hangup(lambda *_: (print("hangup", flush=True), os._exit(130)))
end_with(int(os.environ["MAKE_PID"]))
print("works", flush=True)
time.sleep(2)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("sighup", "line", "said"),
    [
        (signal.SIG_DFL, "exec {}", b"hangup\n"),
        (signal.SIG_IGN, "exec {}", b"done\n"),
        (signal.SIG_DFL, "{} & disown; read line", b"done\n"),
    ],
    ids=["ssh -t", "nohup", "a job of a shell"],
)
def test_a_closed_terminal_ends_what_make_runs_where_make_alone_is_told(tmp_path, sighup, line, said):
    (tmp_path / "Makefile").write_text('all:\n\t@MAKE_PID=$$PPID $(PYTHON) -c "$$FOLLOWER" && true\n')
    terminal, inside = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # not of `make test`

    def lead() -> None:
        signal.signal(signal.SIGHUP, sighup)
        fcntl.ioctl(inside, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        ["bash", "-mc", line.format(f"make PYTHON={sys.executable}")],
        cwd=tmp_path,
        env=plain | {"FOLLOWER": FOLLOWER, "PYTHONPATH": str(Path.cwd())},
        stdin=inside,
        stdout=subprocess.PIPE,
        stderr=inside,
        start_new_session=True,
        preexec_fn=lead,
    )
    os.close(inside)
    assert process.stdout.readline() == b"works\n"
    os.close(terminal)
    assert process.communicate(timeout=60)[0] == said
