"""A child that runs is never lost, whenever the interrupt comes."""

import signal
import subprocess
import sys

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


def test_a_program_that_does_not_exist_is_only_an_error():
    with pytest.raises(FileNotFoundError), child_process(["/no/such/program"], grace_s=1):
        pass
