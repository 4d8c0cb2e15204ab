"""A real Slurm cluster on this machine: munged, slurmctld and two slurmd of Debian's slurm-wlm.

It shares nothing with an installed cluster: key, sockets, ports, spool and state folders are its own, below one folder.
The nodes are configured with 128 processors and eight GPUs, which Slurm counts without checking that they exist, so
that scripts for GPU nodes can be tested. There is no accounting, as on many small clusters. Jobs run as the user who
runs the tests.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # munged and slurmctld are installed there
START_S = 20

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,defer
MpiDefault=none
ReturnToService=2
KillWait=5
MailProg=/bin/true
GresTypes=gpu
NodeName=DEFAULT CPUs=128 RealMemory=65536 Gres=gpu:8 State=UNKNOWN
NodeName=gpu1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1}
NodeName=gpu2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2}
PartitionName=gpu Nodes=gpu[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why no cluster can be started here, with the command that helps; empty if one can be started."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge" if missing else ""


class SlurmCluster:
    """A cluster that runs as long as the `with` block; nothing of it remains afterwards.

    Attributes:
        folder: contains keys, logs, spool and state.
        environment: variables that Slurm's commands need to find this cluster.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        self._sockets = Path(tempfile.mkdtemp(prefix="munge-"))  # a socket's path may have at most 107 characters
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        """Start the cluster and wait until its nodes accept jobs."""
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every job and daemon."""
        try:
            if len(self._daemons) == 4 and all(daemon.poll() is None for daemon in self._daemons):
                self._try("scancel", "--full", f"--user={getpass.getuser()}")
                self.wait_until_idle()
        finally:
            self._stop()

    def _stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def run(self, *command: str, timeout: float = 30) -> str:
        """Run one of Slurm's commands, which must succeed, and return its standard output."""
        done = subprocess.run(command, env=self._env(), capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self._logs()}"
        return done.stdout

    def processes(self, job: str) -> list[psutil.Process]:
        """List the processes of a running job, as reported by its node's slurmd."""
        number, node = self.run("squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%A %N").split()
        _, *rows = self.run("scontrol", "listpids", number, node).splitlines()
        job_environment = {"SLURM_CONF": self.environment["SLURM_CONF"], "SLURM_JOB_ID": number}
        found = []
        for row in rows:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process = psutil.Process(int(row.split()[0]))
                if job_environment.items() <= process.environ().items():  # the process ID may have been reused
                    assert os.getpgid(process.pid) != os.getpgrp(), f"{process} is in the process group of the tests"
                    found.append(process)
        return found

    def kill(self, job: str) -> list[str]:
        """Kill all processes of a running job at once, like a node that runs out of memory.

        They are suspended first: a launcher that sees its cell die would still write a result.

        Returns:
            Their command lines.
        """
        processes, commands = self.processes(job), []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                commands.append(" ".join(process.cmdline()))
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return commands

    def wait_until_idle(self) -> None:
        """Wait until no job is left in the queue."""
        self._wait(lambda: self.run("squeue", "--noheader") == "", "jobs that do not end")

    def _start(self) -> None:
        key, munge = self.folder / "munge.key", self._sockets / "munge"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for name in ("state", "spool-gpu1", "spool-gpu2"):
            (self.folder / name).mkdir()
        ctld_port, port_1, port_2 = _free_ports(3)
        conf = CONF.format(
            host=socket.gethostname().split(".")[0],
            user=getpass.getuser(),
            socket=munge,
            folder=self.folder,
            ctld_port=ctld_port,
            port_1=port_1,
            port_2=port_2,
        )
        (self.folder / "slurm.conf").write_text(conf)
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        options = {"key-file": key, "socket": munge, "pid-file": f"{munge}.pid", "seed-file": f"{munge}.seed"}
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in options.items()))
        self._wait(munge.exists, "munged has no socket")
        self._daemon("slurmctld", "-D", "-c")
        for name in ("gpu1", "gpu2"):
            self._daemon("slurmd", "-D", "-c", "-N", name)
        self._wait(lambda: self._try("sinfo", "--noheader", "--format=%D %t") == "2 idle\n", "no idle nodes")

    def _daemon(self, name: str, *options: str) -> None:
        with (self.folder / f"{name}{len(self._daemons)}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [str(shutil.which(name, path=PATH)), *options],
                    env=self._env(),
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def _try(self, *command: str) -> str:
        return subprocess.run(command, env=self._env(), capture_output=True, text=True, check=False, timeout=30).stdout

    def _wait(self, ready: object, problem: str) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if ready():  # type: ignore[operator]
                return
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, f"{ended} ended\n{self._logs()}"
            time.sleep(0.1)
        raise AssertionError(f"{problem} after {START_S} s\n{self._logs()}")

    def _logs(self) -> str:
        texts = [*self.folder.glob("*.out"), *self.folder.glob("slurm*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in texts)

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def _free_ports(count: int) -> list[int]:
    """Return ports that are free at this moment."""
    holders = [socket.socket() for _ in range(count)]
    for holder in holders:
        holder.bind(("127.0.0.1", 0))
    ports = [int(holder.getsockname()[1]) for holder in holders]
    for holder in holders:
        holder.close()
    return ports
