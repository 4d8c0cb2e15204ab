"""Stages on a disk that answers EIO, or that goes away: said as such, and nothing stays behind when it is back."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.domain.errors import UserError
from pipelines.store.store import Store, recover
from tests.conftest import ROOT
from tests.support.failing_disk import failing_disk
from tests.unit.core.test_runner import Write, execute


@pytest.fixture
def disk(tmp_path):
    with failing_disk(tmp_path) as found:
        if found is None:
            pytest.skip("mounting a FUSE file system needs root and /dev/fuse")
        yield found


class AtWork(Write):
    """A stage in which something happens to the disk."""

    def run(self, inputs, out_dir, progress):
        self.happens()
        return super().run(inputs, out_dir, progress)


def stage(happens):
    made = AtWork("one")
    object.__setattr__(made, "happens", happens)
    return made


@pytest.mark.parametrize("operation", ["write", "fsync", "create", "rename", "open"])
def test_a_failing_disk_is_said_and_the_stage_runs_again_when_it_is_healed(disk, operation):
    store = Store(disk.path / "store")
    with pytest.raises(UserError, match=r"Stage one stopped: the disk of /\S+ fails: input/output error \(EIO\)"):
        execute(store, stage(lambda: disk.fail(operation)))
    disk.fail()
    assert execute(store, Write("one")) == ["made"]
    recover(store)
    assert list((store.root / ".drafts").iterdir()) == []


def test_a_disk_that_goes_away_is_said(disk):
    store = Store(disk.path / "store")
    with pytest.raises(UserError, match=r"Stage one stopped: the file system of \S+ is gone \(Transport endpoint"):
        execute(store, stage(disk.vanish))


def test_a_killed_test_leaves_nothing_mounted(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from tests.support.failing_disk import failing_disk\n"
        "with failing_disk(Path(sys.argv[1])) as disk:\n"
        "    print(disk is not None, flush=True); os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, capture_output=True, text=True)
    if done.stdout != "True\n":
        pytest.skip("mounting a FUSE file system needs root and /dev/fuse")
    until = time.monotonic() + 60
    # Not is_mount(), which fails while the file system has lost its process and is still mounted.
    while str(tmp_path / "disk") in Path("/proc/self/mounts").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert str(tmp_path / "disk") not in Path("/proc/self/mounts").read_text()
