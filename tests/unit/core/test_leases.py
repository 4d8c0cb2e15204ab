"""Drafts of killed runs are reclaimed whatever host or key made them; those of living runs never are."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from pipelines.store import leases
from pipelines.store.leases import DEAD_S, Leases
from pipelines.store.store import Store, recover
from tests.conftest import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from pipelines.store.store import Store

with Store(Path(sys.argv[1])).staging(sys.argv[2]) as staging:
    (staging / "half").write_bytes(bytes(4096))
    print(staging.name, flush=True)
    time.sleep(600)
"""
OTHER_HOST = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", 'hostname elsewhere && exec "$@"', "-")
"""A container's view: its own host name and its own process ids."""


def can_rename_host() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*OTHER_HOST, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def hold(store):
    """Starts a process that works in a staging folder; ends it afterwards."""
    started = []

    def start(key, prefix=()):
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", HOLDER, str(store.root), key],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process, store.root / ".drafts" / process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_draft_of_a_living_process_stays(store, hold):
    _, staging = hold("k" * 64)
    assert (staging / "half").is_file()
    assert recover(store) == []
    assert (staging / "half").is_file()


def test_the_draft_of_a_killed_process_is_reclaimed_at_once_for_any_key(store, hold):
    process, staging = hold("k" * 64)
    process.send_signal(signal.SIGKILL)
    process.wait()
    recover(store)
    assert not staging.exists()
    assert list((store.root / ".leases").iterdir()) == []


@pytest.mark.skipif(not can_rename_host(), reason="this system does not let its users change a host name")
def test_a_container_with_another_host_name_is_treated_alike(store, hold):
    """It is alive while it runs, although neither its name nor its process id says anything here."""
    process, staging = hold("k" * 64, OTHER_HOST)
    (seen,) = store.leases.all()
    assert seen.holder.startswith("elsewhere ")
    recover(store)
    assert staging.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60
    while staging.exists() and time.monotonic() < until:  # the kernel kills what is inside a moment later
        recover(store)
    assert not staging.exists()


def test_two_drafts_of_one_key_do_not_share_a_folder(store, hold):
    """Locks of some shared file systems hold on one host only."""
    _, first = hold("k" * 64)
    _, second = hold("k" * 64)
    assert first != second
    assert (first / "half").is_file()
    assert (second / "half").is_file()


def elsewhere(store, seconds_ago, text="another-kernel:7 elsewhere 1\nlabel-key\n"):
    """A lease from another kernel, whose last beat is so long ago, and its staging folder."""
    staging = store.root / ".drafts" / "kkkkkkkkkkkkkkkk.1"
    staging.mkdir(parents=True)
    lease = store.root / ".leases" / staging.name
    lease.parent.mkdir()
    lease.write_text(text)
    then = lease.stat().st_mtime - seconds_ago
    os.utime(lease, (then, then))
    return staging


@pytest.mark.parametrize("text", ["another-kernel:7 elsewhere 1\nlabel-key\n", " elsewhere 1\n"])
@pytest.mark.parametrize(
    ("seconds_ago", "stays"), [(0, True), (DEAD_S - 60, True), (DEAD_S + 60, False), (-9999, True)]
)
def test_another_hosts_lease_lives_until_its_beat_stops(store, seconds_ago, stays, text):
    staging = elsewhere(store, seconds_ago, text)
    recover(store)
    assert staging.exists() == stays


def test_the_clock_of_this_host_does_not_matter(store, monkeypatch):
    """Both times are stamped by the file system."""
    staging = elsewhere(store, 0)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    recover(store)
    assert staging.exists()


def test_a_lease_that_was_never_written_is_swept_away(store):
    """Its holder was killed between making the file and writing into it."""
    elsewhere(store, 0, "")
    recover(store)
    assert list((store.root / ".leases").iterdir()) == []


def test_a_lease_that_is_swept_away_while_it_is_made_is_made_again(store, monkeypatch):
    flock, swept = fcntl.flock, []

    def sweep_first(handle, kind):
        if kind == fcntl.LOCK_EX and not swept:
            swept.append(store.leases.all())
            store.leases.all(sweep=True)
        flock(handle, kind)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    lease = store.leases.take("one")
    assert [seen.alive for seen in swept[0]] == [False]
    (seen,) = store.leases.all()
    assert seen.alive
    store.leases.all(sweep=True)
    assert lease.path.is_file()
    lease.end()


def test_a_lease_is_beaten(store, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_S", 0.02)
    with store.staging("k" * 64) as staging:
        lease = store.root / ".leases" / staging.name
        os.utime(lease, (1, 1))
        until = time.monotonic() + 60
        while lease.stat().st_mtime == 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert lease.stat().st_mtime > 1
    assert not lease.exists()


def test_without_locks_the_beat_decides(store, monkeypatch):
    """As on file systems that do not know flock."""

    def refuse(_handle, _kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lease = Leases(store.root / ".leases").take("one")
    (seen,) = store.leases.all()
    assert seen.alive
    os.utime(lease.path, (1, 1))
    (seen,) = store.leases.all()
    assert not seen.alive
    lease.end()


def test_a_draft_without_a_lease_is_reclaimed_when_its_key_is_free(store):
    """Left by a version that had none."""
    left = store.root / ".drafts" / f"{'k' * 16}.some-host"
    left.mkdir(parents=True)
    with store.lock("k" * 64, lambda: None):
        recover(store)
        assert left.exists()
    recover(store)
    assert not left.exists()


def test_a_store_that_cannot_be_written_is_used_without_a_lease(tmp_path):
    (tmp_path / "file").write_text("")
    with Leases(tmp_path / "file" / ".leases").hold(tmp_path) as use:
        use(tmp_path)
