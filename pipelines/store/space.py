"""Disk use of the store: size of each folder, whether it is needed, and removal of the rest."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.document.show import count
from pipelines.domain.units import DAY
from pipelines.store.manifest import MANIFEST
from pipelines.store.store import SET_ASIDE, Store, subfolders

LINKS = ".links"
"""File with the links to artifacts that `make stage` has made, one path per line, relative to the store like them."""
ANSWERS = ".answers"
"""Folder with what engines answered, `.answers/ENGINE/answers.jsonl`, for evaluations that ask the same again."""
NIGHTLY = ".nightly"
"""Folder with the stores of nights that make everything anew: `.nightly/HOST/RUN/`."""


@dataclass(frozen=True, slots=True)
class DiskFile:
    """One file, however many names it has: weights are hard-linked.

    Attributes:
        bytes: that it takes on disk.
        links: names that it has anywhere.
        names: of them in the folder that was looked at.
    """

    bytes: int
    links: int
    names: int


@dataclass(frozen=True, slots=True)
class Holding:
    """One folder of the store: an artifact, damaged or not, the store of a night, or an abandoned staging folder.

    Attributes:
        files: those in it, by device and inode.
        used: when a run used it last, in seconds since the epoch.
        needed: why it is kept; empty if nothing needs it.
        names: of the artifacts in it, as leases name them.
        digests: of their content.
        inputs: digests of what they were made from.
    """

    path: Path
    files: Mapping[tuple[int, int], DiskFile]
    used: float
    needed: str = ""
    names: frozenset[str] = field(default_factory=frozenset)
    digests: frozenset[str] = field(default_factory=frozenset)
    inputs: frozenset[str] = field(default_factory=frozenset)

    @property
    def name(self) -> str:
        """Return the folder with the one it is in: "build/tiny_gemma-fp8-..."."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def bytes(self) -> int:
        """Bytes on disk, those of files included that other artifacts share."""
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, slots=True)
class Space:
    """The contents of a store that take space."""

    artifacts: tuple[Holding, ...]
    abandoned: tuple[Holding, ...]

    @property
    def unneeded(self) -> tuple[Holding, ...]:
        """Artifacts that can be removed."""
        return tuple(each for each in self.artifacts if not each.needed)


def occupied(holdings: Iterable[Holding]) -> int:
    """Return the bytes that these take on disk together."""
    return sum({inode: file.bytes for each in holdings for inode, file in each.files.items()}.values())


def freed(holdings: Iterable[Holding]) -> int:
    """Return the bytes freed by removing all of these: files without a hard link elsewhere."""
    together: dict[tuple[int, int], DiskFile] = {}
    for holding in holdings:
        for inode, file in holding.files.items():
            before = together.get(inode)
            together[inode] = replace(file, names=file.names + (before.names if before else 0))
    return sum(file.bytes for file in together.values() if file.names >= file.links)


def remember_link(store: Store, link: Path) -> None:
    """Keep the artifact that a link of the user leads to, for as long as it leads there."""
    link = link.parent.resolve() / link.name
    if link not in _links(store):
        with (store.root / LINKS).open("a") as file:
            file.write(f"{os.path.relpath(link, store.root.resolve())}\n")


def survey(store: Store, keep_days: int) -> Space:
    """Look at every artifact and every abandoned staging folder.

    Args:
        store: the store.
        keep_days: an artifact is kept for this long after its last use.
    """
    damaged = (path for stage in subfolders(store.root / SET_ASIDE) for path in subfolders(stage))
    holdings = [*_artifacts(store), *_nights(store), *map(_unnamed, damaged), *_answers(store)]
    reasons = _reasons(store, holdings, keep_days)
    judged = [replace(each, needed=reasons.get(each.path, "")) for each in holdings]
    abandoned = map(_unnamed, store.abandoned_staging())
    return Space(tuple(sorted(judged, key=lambda each: (each.needed != "", -each.bytes))), tuple(abandoned))


def remove(store: Store, holdings: Sequence[Holding]) -> list[Holding]:
    """Remove artifacts, except those that a process has begun to use since they were inspected.

    Each is moved aside in one step, so that no run finds half of it. A reader names an artifact in a lease before it
    checks that the artifact exists, and the leases are read after the move: one of the two sees the other.

    Returns:
        those that are gone.
    """
    gone = []
    with store.staging("prune") as aside:
        for number, holding in enumerate(holdings):
            moved = aside / str(number)
            try:
                holding.path.rename(moved)
            except FileNotFoundError:
                continue  # another prune was faster
            if holding.names & _in_use(store).keys():
                moved.rename(holding.path)
            else:
                gone.append(holding)
    return gone


def _artifacts(store: Store) -> Iterator[Holding]:
    for stage in subfolders(store.root):
        if not stage.name.startswith("."):
            for path in subfolders(stage):
                if (path / MANIFEST).is_file():
                    yield _holding(path, [path])


def _nights(store: Store) -> Iterator[Holding]:
    for host in subfolders(store.root / NIGHTLY):
        for night in subfolders(host):
            stages = [stage for stage in subfolders(night) if not stage.is_symlink()]
            yield _holding(night, [path for stage in stages for path in subfolders(stage)])


def _unnamed(path: Path) -> Holding:
    """Return a folder that nothing needs: a damaged artifact, whose name a whole one may have, or abandoned staging."""
    return Holding(path, _files(path), path.stat().st_mtime)


def _answers(store: Store) -> Iterator[Holding]:
    """Yield the answers of each engine; they are used when something is added, and can be asked for again."""
    for path in subfolders(store.root / ANSWERS):
        yield Holding(path, _files(path), max((file.stat().st_mtime for file in path.iterdir()), default=0.0))


def _holding(path: Path, artifacts: Sequence[Path]) -> Holding:
    manifests: list[dict[str, Any]] = []
    for each in artifacts:
        with suppress(OSError, ValueError):
            if isinstance(manifest := json.loads((each / MANIFEST).read_text()), dict):
                manifests.append(manifest)
    return Holding(
        path,
        _files(path),
        max(each.stat().st_mtime for each in (path, *artifacts)),
        names=frozenset(each.name for each in (path, *artifacts)),
        digests=frozenset(str(each.get("digest")) for each in manifests),
        inputs=frozenset(
            digest for each in manifests for digest in each.get("made_from", {}).get("inputs", {}).values()
        ),
    )


def _reasons(store: Store, holdings: Sequence[Holding], keep_days: int) -> dict[Path, str]:
    """Say of each artifact that is kept why: it is used, linked, young, or a kept one was made from it."""
    in_use, linked = _in_use(store), {link.resolve(): link for link in _links(store) if link.is_symlink()}
    since = time.time() - keep_days * DAY
    reasons: dict[Path, str] = {}
    for each in holdings:
        if name := min(each.names & in_use.keys(), default=""):
            reasons[each.path] = f"in use by {in_use[name]}"
        elif link := linked.get(each.path.resolve()):
            reasons[each.path] = f"linked from {link}"
        elif each.used > since:
            reasons[each.path] = f"used in the last {count(keep_days, 'day')}"
    waiting = [each for each in holdings if each.path in reasons]
    while waiting:
        later = waiting.pop()
        for each in holdings:
            if each.path not in reasons and each.digests & later.inputs:
                reasons[each.path] = f"{later.name} was made from it"
                waiting.append(each)
    return reasons


def _in_use(store: Store) -> dict[str, str]:
    """Map the names of artifacts that a living process uses to that process."""
    return {name: lease.holder for lease in store.leases.all() if lease.alive for name in lease.uses}


def _links(store: Store) -> list[Path]:
    try:
        lines = (store.root / LINKS).read_text().splitlines()
        return [Path(os.path.normpath(store.root.resolve() / line)) for line in lines]
    except FileNotFoundError:
        return []


def _files(folder: Path) -> dict[tuple[int, int], DiskFile]:
    """Look at every file below a folder; symbolic links are not followed."""
    files: dict[tuple[int, int], DiskFile] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                stat = (Path(parent) / name).lstat()
                inode = (stat.st_dev, stat.st_ino)
                before = files[inode].names if inode in files else 0
                files[inode] = DiskFile(stat.st_blocks * 512, stat.st_nlink, before + 1)
    return files
