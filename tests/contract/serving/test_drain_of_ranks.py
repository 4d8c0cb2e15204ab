"""A server of several ranks drains: SIGTERM reaches the rank that answers, not mpirun, which would kill all of them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.deploy.nodes import FILES
from pipelines.host.lifetimes import SupervisedProcess

RANK = """
import os, pathlib, signal, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ["OMPI_COMM_WORLD_RANK"]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(here / f"started{rank}").touch()
while not (asked if rank == "0" else (here / "drained").exists()):
    time.sleep(0.05)
if rank == "0":
    time.sleep(3)  # requests that run
    (here / "drained").touch()
"""
# What Open MPI 4.1 was seen to do on SIGTERM, with its default of one second.
MPIRUN = """
import os, signal, subprocess, sys, time
words = " ".join(sys.argv[1:]).split(" : ")
ranks = [
    subprocess.Popen(word.split()[2:], env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)})
    for rank, word in enumerate(words)
]
def end(*_):
    for number in (signal.SIGTERM, signal.SIGKILL):
        time.sleep(1)
        for rank in ranks:
            rank.send_signal(number)
signal.signal(signal.SIGTERM, end)
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


def wait_for(path: Path, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not appear"
        time.sleep(0.05)


@pytest.mark.parametrize("which", ["stand-in", "Open MPI"])
def test_requests_that_run_may_finish(which: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    mpirun = tmp_path / "mpirun"
    if which == "stand-in":
        mpirun.write_text(f"#!{sys.executable}\n{MPIRUN}")
        mpirun.chmod(0o755)
    elif found := shutil.which("mpirun"):
        mpirun = Path(found)
    else:
        pytest.skip("Open MPI is not installed")
    one = ["-n", "1", sys.executable, str(tmp_path / "rank.py"), str(tmp_path)]
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    server = SupervisedProcess([str(mpirun), *one, ":", *one], env=env, cwd=tmp_path, log_file=tmp_path / "log")
    for rank in range(2):
        wait_for(tmp_path / f"started{rank}")
    server.stop(20)
    assert (tmp_path / "drained").exists(), (tmp_path / "log").read_text()


def test_the_leader_of_several_nodes_is_drained_before_it_ends(tmp_path: Path) -> None:
    """drain.sh finds rank 0 among the servers of its pod and waits for its end.

    It sees only this test's processes, as it would in a pod; with the /proc of the whole machine it would end any other
    server that runs here.
    """
    server = tmp_path / "tritonserver"
    server.write_text(f"#!{sys.executable}\n{RANK}")
    server.chmod(0o755)
    ranks = [
        subprocess.Popen([server, tmp_path], env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in (1, 0)
    ]
    try:
        wait_for(tmp_path / "started0")
        wait_for(tmp_path / "started1")
        pod = tmp_path / "proc"
        pod.mkdir()
        for rank in ranks:
            (pod / str(rank.pid)).symlink_to(f"/proc/{rank.pid}")
        script = (FILES / "drain.sh").read_text().replace("/proc/", f"{pod}/")
        waiting = subprocess.Popen(["bash", "-c", script, "drain.sh", "1", "20"])
        wait_for(tmp_path / "drained")
        assert [rank.wait(60) for rank in ranks] == [0, 0]
        assert waiting.wait(60) == 0
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()


def test_ssh_takes_the_configuration_of_the_group(tmp_path: Path) -> None:
    """Both files as a pod mounts them, with keys in another place."""
    sshd = shutil.which("sshd", path=f"/usr/sbin:{os.environ['PATH']}")
    if sshd is None or not shutil.which("ssh-keygen"):
        pytest.skip("OpenSSH's server is not installed")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "ssh_host_ed25519_key"], check=True)
    for name in ("ssh_config", "sshd_config"):
        (tmp_path / name).write_text((FILES / name).read_text().replace("/etc/pipelines/ssh", str(tmp_path)))
    told = subprocess.run([sshd, "-T", "-f", tmp_path / "sshd_config"], capture_output=True, text=True)
    if "Privilege separation user sshd does not exist" in told.stderr or "/run/sshd" in told.stderr:
        pytest.skip(told.stderr.strip())
    assert told.returncode == 0, told.stderr
    assert {"port 2222", "usepam no", "strictmodes no", "permitrootlogin no", "disableforwarding yes"} <= set(
        told.stdout.splitlines()
    )
    asked = subprocess.run(["ssh", "-G", "-F", tmp_path / "ssh_config", "w-0-1.w"], capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    assert {"port 2222", "batchmode yes", "stricthostkeychecking true"} <= set(asked.stdout.splitlines())
