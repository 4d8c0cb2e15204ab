"""Runs that are killed, and disks that fill, fail or go away, at random moments of stages that write, link and sync.

Whatever happened: it is said in one sentence, what was finished is still there byte for byte, and the next run makes
the rest and leaves neither a draft nor a lease.
"""

import json
import os
import random
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress, SilentProgress
from pipelines.engines.registry import OPENVINO
from pipelines.host.disk import disk_errors
from pipelines.host.files import sha256_file
from pipelines.host.machine import Machine
from pipelines.plan.deployment import Deployment
from pipelines.plan.engine_nodes import Node
from pipelines.plan.plan import Plan, _resolve
from pipelines.run.runner import run as run_plan
from pipelines.settings.compose import load
from pipelines.store.manifest import MANIFEST
from pipelines.store.sources import InputSource
from pipelines.store.store import Artifact, Store, recover
from tests.support.failing_disk import Mounted, failing_disk
from tests.torture.row import Row

STAGES = ("quantize", "build", "repository")
MACHINE = Machine(2, 8 << 30, (), "no GPU is needed", False, "torture")
PATIENCE_S = 60.0
"""A run that takes longer than this hangs."""
OPERATIONS = ("write", "fsync", "create", "mkdir", "open", "rename", "read", "lookup", "getattr", "unlink", "rmdir")
DONE, SAID = 0, 2


@dataclass(frozen=True)
class Files:
    """A stage that writes some files and links those of the stage before."""

    name: str
    version = "1"
    measures = False
    libraries: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """Return what determines the bytes."""
        return {}

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Write slowly enough that something can happen in between."""
        chance = random.Random(self.name)
        for number in range(8):
            path = out_dir / f"part{number % 2}" / f"{number}.bin"
            path.parent.mkdir(exist_ok=True)
            with path.open("wb", buffering=0) as file:
                for _ in range(4):
                    file.write(chance.randbytes(chance.randrange(1, 8192)))
                    time.sleep(0.0005)
        for given in inputs.values():
            for path in sorted(given.rglob("*.bin")) if given.is_dir() else ():
                os.link(path, out_dir / f"{path.parent.name}-{path.name}")
        return {"files": 8}


@dataclass
class Count:
    """Counts the trials of one kind.

    Attributes:
        failures: what went wrong, for the note.
    """

    tried: int = 0
    survived: int = 0
    worst_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, failure: str, seconds: float) -> None:
        """Count one trial; an empty failure is a success."""
        self.tried += 1
        self.survived += not failure
        self.worst_s = max(self.worst_s, seconds)
        if failure:
            self.failures.append(failure)

    def row(self, what: str) -> Row:
        """Make the row of the table."""
        return Row(what, self.tried, self.survived, self.worst_s, "; ".join(self.failures[:3]))


class Campaign:
    """Trials on one temporary folder.

    Attributes:
        seconds: how long an undisturbed run takes.
        content: digest of each stage's artifact, as an undisturbed run makes it.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance, self.folder = random.Random(seed), folder
        self.settings = load(["engine=openvino"])
        healthy = folder / "healthy"
        start = time.monotonic()
        self._await(self._start(healthy))
        self.seconds = time.monotonic() - start
        self.content = {stage: artifact.digest for stage, artifact in self._artifacts(healthy)}

    def moment(self) -> float:
        """Choose a moment of a run, or shortly after it, in seconds."""
        return self.chance.uniform(0, 1.1 * self.seconds)

    def trial(self, count: Count, store: Path, disturb: Callable[[int], bool], heal: Callable[[], None]) -> None:
        """Disturb one run and see whether the next one finishes it.

        Args:
            count: where the outcome goes.
            store: the store of both runs.
            disturb: called with the process id of the run; returns whether it killed the run.
            heal: called before the second run.
        """
        pid = self._start(store)
        killed = disturb(pid)
        code, said = self._await(pid)
        heal()
        failure = "" if killed or code in (DONE, SAID) else f"the run ended with {code}: {_last(said)}"
        start = time.monotonic()
        failure = failure or self._damage(store)
        code, said = self._await(self._start(store))
        seconds = time.monotonic() - start
        failure = failure or ("" if code == DONE else f"the next run ended with {code}: {_last(said)}")
        count.add(failure or self._damage(store, whole=True), seconds)

    def _damage(self, root: Path, *, whole: bool = False) -> str:
        """Say what is wrong with a store; empty if nothing is.

        Args:
            root: the store.
            whole: the run is finished, so everything must be there and nothing else.
        """
        found = dict(self._artifacts(root))
        for stage, artifact in found.items():
            files = {name: entry["sha256"] for name, entry in artifact.manifest["files"].items()}
            if artifact.digest != self.content[stage]:
                return f"{stage} has other content"
            for name, sha256 in files.items():
                if sha256_file(artifact.path / name) != sha256:
                    return f"{stage}/{name} is damaged"
        if whole and found.keys() != set(STAGES):
            return f"only {sorted(found)} is there"
        left = [path.name for hidden in (".drafts", ".leases") for path in (root / hidden).glob("*")]
        return f"{', '.join(left)} stayed behind" if whole and left else ""

    def _artifacts(self, root: Path) -> Iterator[tuple[str, Artifact]]:
        for stage in STAGES:
            for manifest in (root / stage).glob(f"*/{MANIFEST}"):
                yield stage, Artifact(manifest.parent, json.loads(manifest.read_text()))

    def _start(self, root: Path) -> int:
        """Run the plan in a process of its own and return its id."""
        self.log = self.folder / "log"
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1), os.dup2(handle, 2)
            with disk_errors("The run", root):
                store = Store(root)
                recover(store)
                run_plan(self._plan(store), store, [], SilentProgress())
            code = DONE
        except UserError as error:
            os.write(2, f"{error}\n".encode())
            code = SAID
        except BaseException:  # noqa: BLE001 - this is what must not happen, so it is shown
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)

    def _plan(self, store: Store) -> Plan:
        nodes, before = [], InputSource(Path("/input"), "digest")
        for name in STAGES:
            nodes.append(Node(name, Files(name), "label", {"given": before}))
            before = name
        return Plan(Deployment(self.settings, "repository", OPENVINO, MACHINE), "", _resolve(nodes, store), ())

    def _await(self, pid: int) -> tuple[int, str]:
        """Wait for a run; return its exit code and what it said."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), self.log.read_text(errors="replace")
            time.sleep(0.002)
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)
        return -SIGKILL, f"it hung for {PATIENCE_S:g} s"


def run(seed: int, seconds: float) -> list[Row]:
    """Run the campaign for about so many seconds."""
    with tempfile.TemporaryDirectory(prefix="torture-disks-") as name:
        campaign = Campaign(seed, Path(name))
        start = time.monotonic()
        rows = [_kills(campaign, start + 0.4 * seconds)]
        if _may_mount(campaign.folder / "may"):
            rows.append(_full(campaign, start + 0.65 * seconds))
            rows.append(_failing(campaign, start + 0.9 * seconds))
            rows.append(_gone(campaign, start + seconds))
        else:
            rows[0] = replace(rows[0], note=f"{rows[0].note} {NO_MOUNT}".strip())
        return rows


NO_MOUNT = "Not tried here: disks that fill, fail or go away, because mounting needs root and /dev/fuse."


def _may_mount(folder: Path) -> bool:
    """Return whether this machine lets its user mount a small file system and a FUSE file system."""
    folder.mkdir()
    with failing_disk(folder) as disk, _small(folder / "small", 64) as mounted:
        return disk is not None and mounted


def _kills(campaign: Campaign, until: float) -> Row:
    count = Count()

    def kill(pid: int) -> bool:
        time.sleep(campaign.moment())
        os.kill(pid, SIGKILL)
        return True

    while time.monotonic() < until or not count.tried:
        store = campaign.folder / f"killed-{count.tried}"
        campaign.trial(count, store, kill, lambda: None)
    return count.row("kill -9 of a run at a random moment")


def _full(campaign: Campaign, until: float) -> Row:
    count = Count()
    while time.monotonic() < until or not count.tried:
        disk = campaign.folder / f"small-{count.tried}"
        with _small(disk, campaign.chance.choice((64, 256, 512, 4096))) as mounted:
            if not mounted:
                raise RuntimeError(f"{disk} could be mounted before, and cannot now")

            def fill(_pid: int, ballast: Path = disk / "ballast") -> bool:
                time.sleep(campaign.moment())
                with suppress(OSError), ballast.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(1 << 16))
                return False

            def heal(disk: Path = disk) -> None:
                (disk / "ballast").unlink(missing_ok=True)
                subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)

            campaign.trial(count, disk / "store", fill, heal)
    return count.row("a disk that is too small, or fills at a random moment")


@contextmanager
def _small(folder: Path, kib: int) -> Iterator[bool]:
    """Mount a file system of so many KiB; yields whether that is allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


def _failing(campaign: Campaign, until: float) -> Row:
    def fail(disk: Mounted) -> None:
        disk.fail(*campaign.chance.sample(OPERATIONS, campaign.chance.randrange(1, 4)))

    return _on_fuse(campaign, until, "a disk that answers EIO from a random moment on", fail, Mounted.fail)


def _gone(campaign: Campaign, until: float) -> Row:
    what = "a file system that goes away at a random moment"
    return _on_fuse(campaign, until, what, Mounted.vanish, Mounted.come_back)


def _on_fuse(
    campaign: Campaign, until: float, what: str, spoil: Callable[[Mounted], None], heal: Callable[[Mounted], None]
) -> Row:
    count, folder = Count(), Path(tempfile.mkdtemp(dir=campaign.folder))
    with failing_disk(folder) as disk:
        if disk is None:
            raise RuntimeError(f"{folder} could be mounted before, and cannot now")

        def disturb(_pid: int) -> bool:
            time.sleep(campaign.moment())
            spoil(disk)
            return False

        while time.monotonic() < until or not count.tried:
            campaign.trial(count, disk.path / f"store-{count.tried}", disturb, lambda: heal(disk))
    return count.row(what)


def _last(text: str) -> str:
    """Return the last line of an output."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing was said")
