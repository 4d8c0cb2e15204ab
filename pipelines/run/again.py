"""The commands that are asked for again and again: what nothing has changed for is said again, without a new plan.

A plan is little work, but it takes all settings and rules, whose classes Python needs a third of a second to make. It
depends on what its process was told and on what it read: Python reports each file it opens and each folder it lists
(PEP 578), with those the sources of its modules, and the store reports each file whose hash it relied on. A run that
finds every stage cached writes down what these were. While they are the same, so is the plan, and the next run prints
what that one printed and leaves the same in a run folder of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.host.disk import disk_errors
from pipelines.host.files import write_json, write_text
from pipelines.host.paths import relative_to_cwd
from pipelines.host.screen import Transcript
from pipelines.store.leases import BOOT_ID, LEASES, Leases
from pipelines.store.manifest import seal_is_right, sealed
from pipelines.store.run_folder import CONFIG, run_folder

if TYPE_CHECKING:
    from pipelines.plan.plan import Plan
    from pipelines.plan.targets import Target
    from pipelines.run.session import FinishedRun
    from pipelines.store.store import Store

AGAIN = ".again"
"""Folder of the store with one file per command that had nothing to do."""
MOST = 32
"""Such files that are kept, newest first; each has about 100 KB."""
STORE = "artifacts"
"""paths.store where no override names it; where a configuration names another, nothing is repeated."""
PASSING = frozenset({"_", "SHLVL", "OLDPWD", "PWD", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKE_TERMOUT", "MAKE_TERMERR"})
"""Environment variables of the shell and of make that nothing reads, but for the words in them."""
CHANGING = ("/proc/", "/sys/")
"""Files whose times say nothing, so that their content is compared."""
FIXED = ("/dev/", "/proc/cpuinfo")
"""Devices, and a file of which only what no boot changes is used."""
OUTSIDE = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect", "socket.sendto")
"""What another program or machine said may be different next time."""
RUN = "\0run\0"
"""Stands for the run's folder in what was printed."""
Facts = dict[str, Any]


def build(overrides: Sequence[str]) -> int:
    """Build an engine from a model."""
    return _once("build", overrides)


def repository(overrides: Sequence[str]) -> int:
    """Build an engine and write its Triton model repository."""
    return _once("repository", overrides)


def _once(target: Target, overrides: Sequence[str]) -> int:
    attempt = Attempt(target, overrides)
    if attempt.repeated():
        return 0
    with attempt.watching():
        from pipelines.run.commands import plan_for  # imports the settings

        plan, store = plan_for(target, overrides)
    from pipelines.run.session import run_target

    ran = run_target(plan, store, overrides)
    if plan.is_done:
        attempt.remember(plan, store, ran)
    return 0


class Attempt:
    """One call of a command, which may be the same as one before."""

    def __init__(self, target: Target, overrides: Sequence[str]) -> None:
        self._target: Target = target
        self._overrides = list(overrides)
        self._store = _store_of(overrides)
        told = hashlib.sha256(json.dumps(_told(target, overrides), sort_keys=True).encode()).hexdigest()
        self._file = self._store / AGAIN / f"{told}.json"
        self._heard = Overheard()

    def repeated(self) -> bool:
        """Say what the command said before, if it would say it again; return whether it did."""
        known = _read(self._file)
        if known is None or time.time() >= known["until"] or not Path(known["hashes"]).is_file():
            return False
        if not all(_is_as_before(path, fact) for path, fact in known["facts"].items()):
            return False
        made = [Path(path) for path in known["made"]]
        with (
            run_folder(self._target, Path(known["runs"]), known["config"], self._overrides) as folder,
            disk_errors("The run", self._store),
            Leases(self._store / LEASES).hold(*made),
        ):
            write_text(folder / known["plan"][0], known["plan"][1])
            place = str(relative_to_cwd(folder))
            Transcript().repeat((kind, text.replace(RUN, place)) for kind, text in known["said"])
        return True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice what is read meanwhile, which is what the plan depends on."""
        sys.addaudithook(self._heard.hear)
        try:
            yield
        finally:
            self._heard.end()

    def remember(self, plan: Plan, store: Store, ran: FinishedRun) -> None:
        """Write down what a run depended on that had nothing to do, if it can be repeated."""
        from pipelines.run.session import PLAN
        from pipelines.store.hash_cache import HASHES, TICK_NS
        from pipelines.store.store import DRAFTS, LOCKS

        made = any(outcome.state == "made" for outcome in ran.outcomes)  # what the plan found was removed since
        if made or store.root != self._store or self._heard.asked_outside:
            return
        self._heard.listed.add(str(store.root / DRAFTS))  # a run first keeps what killed ones have measured
        inside = [f"{ran.folder}/", *(f"{store.root / name}" for name in (LEASES, AGAIN, LOCKS, HASHES))]
        hashed = [str(path) for path in store.hashes.relied]
        facts = self._heard.facts(inside, hashed, before_ns=_started_ns() - TICK_NS)
        if facts is None:
            return
        place = str(relative_to_cwd(ran.folder))
        known = {
            "until": min(store.hashes.relied.values(), default=0),
            "hashes": str(store.root / HASHES),  # who removes it wants every file read again
            "facts": facts,
            "made": [str(outcome.artifact.path) for outcome in ran.outcomes],
            "runs": str(plan.settings.paths.runs),
            "config": (ran.folder / CONFIG).read_text(),
            "plan": [PLAN, (ran.folder / PLAN).read_text()],
            "said": [[kind, text.replace(place, RUN)] for kind, text in ran.said.lines],
        }
        with suppress(OSError):  # it only saves time
            write_json(self._file, sealed(known))
            for old in sorted(self._file.parent.iterdir(), key=_changed, reverse=True)[MOST:]:
                old.unlink()


class Overheard:
    """What this process opens and lists, heard from Python's audit events.

    Attributes:
        opened: files.
        listed: folders.
        asked_outside: whether it asked another program or machine.
    """

    def __init__(self) -> None:
        self.opened: set[str] = set()
        self.listed: set[str] = set()
        self.asked_outside = False
        self._ended = False

    def end(self) -> None:
        """Hear nothing more; Python keeps the hook itself."""
        self._ended = True

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take one audit event."""
        if self._ended:
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._add(self.opened, arguments[0])
        elif event in ("os.listdir", "os.scandir"):
            self._add(self.listed, os.curdir if arguments[0] is None else arguments[0])
        elif event in OUTSIDE:
            self.asked_outside = True

    @staticmethod
    def _add(paths: set[str], path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):  # or the number of an open file, whose opening was heard
            paths.add(str(Path(os.fsdecode(path)).absolute()))

    def facts(self, inside: Sequence[str], hashed: Sequence[str], *, before_ns: int) -> Facts | None:
        """Return what everything that was read is now; None if some of it may have changed after it was read.

        Args:
            inside: beginnings of paths that the runs themselves keep.
            hashed: further files that were relied on.
            before_ns: what changed later may have changed after it was read.
        """
        loaded = [str(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
        programs = os.environ.get("PATH", "").split(os.pathsep)  # a program that is installed changes its folder
        found: Facts = {}
        for path in sorted({*map(_source, self.opened), *map(_source, loaded), *hashed, *programs}):
            found[path] = _content(path) if path.startswith(CHANGING) else _stamp(path)
        for path in sorted(self.listed):
            found[f"{path}/"] = _names(path)
        found = {path: fact for path, fact in found.items() if not path.startswith((*inside, *FIXED))}
        return found if all(fact[-1] < before_ns for fact in found.values() if isinstance(fact, list)) else None


def _told(target: str, overrides: Sequence[str]) -> Facts:
    """Return what this process knows without reading a file: words, environment, screen, its share of the machine."""
    return {
        "words": [target, *overrides],
        "folder": str(Path.cwd()),
        "environment": {name: value for name, value in os.environ.items() if name not in PASSING},
        "python": [sys.executable, sys.version, *sys.path],
        "screen": [stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)],
        "width": list(shutil.get_terminal_size()),
        "machine": [_content(str(BOOT_ID)), os.sysconf("SC_PHYS_PAGES"), sorted(os.sched_getaffinity(0)), os.geteuid()],
    }


def _store_of(overrides: Sequence[str]) -> Path:
    """Return the store as far as the words alone name it."""
    named = [word.partition("=")[2] for word in overrides if re.fullmatch(r"paths\.store=[\w./-]+", word)]
    return Path(named[-1] if named else STORE).absolute()


def _read(file: Path) -> Mapping[str, Any] | None:
    """Read what is known of a command; None where there is nothing, or not what was written."""
    try:
        known: Facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known if seal_is_right(known) else None


def _is_as_before(path: str, fact: object) -> bool:
    if path.endswith("/"):
        return _names(path[:-1]) == fact
    return (_content(path) if path.startswith(CHANGING) else _stamp(path)) == fact


def _stamp(path: str) -> list[int] | None:
    """Return what changes with every change of a file or folder; None where there is none."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _content(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _names(folder: str) -> str | None:
    try:
        names = "/".join(sorted(path.name for path in Path(folder).iterdir() if path.name != "__pycache__"))
        return hashlib.sha256(os.fsencode(names)).hexdigest()
    except OSError:
        return None


def _source(path: str) -> str:
    """Return the source of a compiled module, which is what people change; other paths as they are."""
    try:
        return importlib.util.source_from_cache(path) if path.endswith(".pyc") else path
    except ValueError:
        return path


def _started_ns() -> int:
    """Return when this process began, ns since 1970, from the kernel's account of it (proc(5), starttime)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age_s * 1e9)


def _changed(file: Path) -> float:
    return file.stat().st_mtime
