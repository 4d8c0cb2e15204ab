"""What a contained command starts ends with it, whoever ends first."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import ROOT

DAEMON = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
"""A daemon: two forks and a session of its own."""
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {DAEMON!r}, 'MARK'])"


def contained(mark, code):
    command = [sys.executable, "-c", STARTS.replace("MARK", mark) + "\n" + code]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.contained", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def marked(mark):
    """Processes with this last argument, zombies left out."""
    return [
        process for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[-1] == mark
    ]  # fmt: skip


@pytest.fixture
def mark(tmp_path):
    """A word that no other process has."""
    return f"daemon of {tmp_path}"


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_daemon_left_by_a_command_that_succeeded_is_named_ended_and_a_failure(mark, monkeypatch):
    process = contained(mark, "")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"left running by {sys.executable}: " in said
    assert mark in said
    assert marked(mark) == []


def test_the_exit_code_of_a_command_is_kept(mark):
    process = subprocess.run([sys.executable, "-m", "tests.contained", "sh", "-c", "exit 7"], cwd=ROOT)
    assert process.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ending_the_whole_group_ends_daemons_too(mark, number):
    process = contained(mark, "import time; time.sleep(600)")
    until(lambda: marked(mark))
    os.killpg(process.pid, number)
    assert process.wait(60) != 0
    until(lambda: not marked(mark))
    process.stderr.close()


def test_a_process_that_loses_its_parent_and_ends_is_no_zombie():
    """Tests wait for the processes of a killed command to vanish."""
    code = """
import os, subprocess, sys, time
child = subprocess.run([sys.executable, "-c", "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', "
    "'import time; time.sleep(0.5)'], stdout=subprocess.DEVNULL).pid)"], capture_output=True, text=True)
end = time.monotonic() + 20
while os.path.exists(f"/proc/{int(child.stdout)}"):
    assert time.monotonic() < end
    time.sleep(0.05)
"""
    process = subprocess.run(
        [sys.executable, "-m", "tests.contained", sys.executable, "-c", code], cwd=ROOT, timeout=60
    )
    assert process.returncode == 0


def test_a_command_does_not_ignore_sigint_because_a_script_started_it_in_the_background():
    """`make test &` in a script: the shell lets it ignore SIGINT, and tests of Ctrl-C would wait for ever."""
    asks = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    command = [sys.executable, "-m", "tests.contained", sys.executable, "-c", asks]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 0
