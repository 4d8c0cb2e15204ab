"""A supervised process leaves nothing behind, whoever is killed, and says who killed it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipelines.host.lifetimes import SupervisedProcess
from tests.conftest import ROOT
from tests.support.eventually import eventually, lives

SHM = Path("/dev/shm")
FAMILY = "sleep 1000 & bash -c 'sleep 1000 & wait' & wait"
"""A command, two children and a grandchild that hang; none of them looks at its parent."""


def family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


Start = Callable[..., SupervisedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command under a supervisor."""
    started = []

    def launch(*command: str, prefix: str = "") -> SupervisedProcess:
        process = SupervisedProcess(command, env=os.environ, cwd=tmp_path, log_file=tmp_path / "log", shm_prefix=prefix)
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()


def supervisor_of(supervised: SupervisedProcess) -> psutil.Process:
    parent = psutil.Process(supervised.pid).parent()
    assert parent is not None
    return parent


@pytest.mark.parametrize("also_the_command", [False, True])
def test_the_whole_group_dies_with_its_supervisor(start: Start, also_the_command: bool) -> None:
    """Descendants too that watch nobody, and even if the command, which the supervisor would clear up, dies with it."""
    supervised = start("bash", "-c", FAMILY)
    assert eventually(lambda: len(family(supervised.pid)) == 4)
    members, supervisor = family(supervised.pid), supervisor_of(supervised)
    for pid in [supervisor.pid, *([supervised.pid] if also_the_command else [])]:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not any(lives(member) for member in members))
    assert supervised.wait(60) == -signal.SIGKILL
    assert (
        supervised.describe_exit()
        == f"killed by the kernel: its supervisor (process {supervisor.pid}) was killed by SIGKILL"
    )


def test_the_end_is_seen_after_a_ctrl_c_inside_popen(start: Start) -> None:
    """A Ctrl-C between taking Popen's lock and its `try` leaves the lock held, and no later call of Popen's returns."""
    supervised = start("sleep", "1000")
    supervised._supervisor._waitpid_lock.acquire()
    begun = time.monotonic()
    assert supervised.stop(5) == -signal.SIGTERM
    assert time.monotonic() - begun < 4
    assert supervised.describe_exit() == "killed by SIGTERM"


def test_what_left_the_session_is_killed_too(start: Start) -> None:
    """A daemon of the command: a session of its own and no parent but the supervisor."""
    supervised = start("bash", "-c", "(setsid sleep 1000 &); sleep 1000")
    supervisor = supervisor_of(supervised)
    assert eventually(lambda: len(supervisor.children()) == 2)
    daemon = next(child for child in supervisor.children() if child.pid != supervised.pid)
    supervised.kill()
    assert not lives(daemon)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("exit 3", "exit code 3"),
        ("kill -SEGV $$", "killed by SIGSEGV"),
        ("kill -ABRT $$", "killed by SIGABRT"),
        ("kill -KILL $$", "killed by SIGKILL (by hand or by another program; memory did not run out)"),
    ],
)
def test_an_end_is_described(start: Start, ends: str, said: str) -> None:
    supervised = start("bash", "-c", ends)
    supervised.wait(60)
    assert supervised.describe_exit() == said


IN_A_SMALL_GROUP = """
import os, sys
from pathlib import Path
from pipelines.host.lifetimes import SupervisedProcess
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
command = [sys.executable, "-c", "b'x' * (1 << 30)"]
hungry = SupervisedProcess(command, env=os.environ, cwd=Path.cwd(), log_file=Path("log"))
hungry.wait()
print(hungry.describe_exit())
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 200 MiB."""
    own = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    version_1 = "memory" in own
    parent = Path("/sys/fs/cgroup", "memory" if version_1 else "", own["memory" if version_1 else ""].lstrip("/"))
    group = parent / f"trtllm-pipelines-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
        limit.write_text(str(200 << 20))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    assert eventually(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_memory_that_ran_out_is_named(tmp_path: Path, small_group: Path) -> None:
    """The kernel kills with the signal a person would use; its own count tells them apart."""
    command = [sys.executable, "-c", IN_A_SMALL_GROUP, str(small_group)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "killed by SIGKILL, by the kernel, because memory ran out\n", done.stderr


MAPPING = """
import mmap, sys, time
with open(f"/dev/shm/{sys.argv[1]}", "r+b") as file:
    region = mmap.mmap(file.fileno(), 0)
time.sleep(1000)
"""


def test_shared_memory_loses_its_name_once_both_users_have_it(start: Start) -> None:
    """So that nothing stays when everybody who could remove it is killed."""
    prefix = f"trtllm_pipelines_test_{os.getpid()}_"
    region, other = SHM / f"{prefix}1", SHM / f"{prefix}2"
    region.write_bytes(bytes(4096))
    other.write_bytes(bytes(4096))
    supervised = start(sys.executable, "-c", MAPPING, region.name, prefix=prefix)
    try:
        assert eventually(lambda: not region.exists())
        assert other.exists()  # nobody has opened it yet
        assert supervised.poll() is None
        supervised.kill()
        assert not other.exists()
    finally:
        region.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def test_no_region_has_a_name_once_all_models_are_loaded(start: Start) -> None:
    """Failed before: a supervisor that got no processor time in the meantime left names behind when it was killed."""
    prefix = f"trtllm_pipelines_test_{os.getpid()}_"
    region = SHM / f"{prefix}1"
    region.write_bytes(bytes(4096))
    supervised = start("bash", "-c", f"sleep 1; exec {sys.executable} -c '{MAPPING}' {region.name}", prefix=prefix)
    supervisor = supervisor_of(supervised)
    try:
        supervisor.suspend()
        server = psutil.Process(supervised.pid)
        assert eventually(lambda: str(region) in {each.path for each in server.memory_maps()})
        threading.Timer(0.3, supervisor.resume).start()
        supervised.watch_stubs()
        assert not region.exists()
        assert supervised.poll() is None
    finally:
        region.unlink(missing_ok=True)
