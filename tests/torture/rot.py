"""Damage that keeps the modification time, planted in every kind of artifact, result and manifest of small stores."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress, SilentProgress
from pipelines.engines.registry import OPENVINO
from pipelines.host.files import write_json
from pipelines.host.machine import Machine
from pipelines.plan.deployment import Deployment
from pipelines.plan.engine_nodes import Node
from pipelines.plan.plan import Plan, _resolve
from pipelines.report.collect import collect
from pipelines.run.commands import serve
from pipelines.run.runner import run as run_plan
from pipelines.run.verify import verify
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.store.manifest import MANIFEST, sealed
from pipelines.store.sources import InputSource
from pipelines.store.store import SET_ASIDE, Store
from tests.support.report_store import full_store
from tests.torture.row import Row

KINDS = {
    "download": ("config.json", "tokenizer.json", "model.safetensors"),
    "quantize": ("config.json", "rank0.safetensors", "rank1.safetensors"),
    "build": ("config.json", "rank0.engine"),
    "repository": ("preprocessing/1/model.py", "preprocessing/1/tokenizer/tokenizer.json", "tensorrt_llm/config.pbtxt"),
}
"""Stage -> its files; each stage reads all files of the one before."""
MACHINE = Machine(2, 8 << 30, (), "no GPU is needed", False, "torture")
REAL_FROM_S = 120
"""With less time than this, the campaign on a real model is left out."""


class MissedError(Exception):
    """Damage was not found, not named, or used."""


def _expect(held: bool, otherwise: str) -> None:
    if not held:
        raise MissedError(otherwise)


def run(seed: int, seconds: float) -> list[Row]:
    """Plant damage until the time is over; survived means found, named, and never used."""
    rng, end = random.Random(seed), time.monotonic() + seconds
    real = seconds >= REAL_FROM_S
    trials: dict[str, Callable[[random.Random, Path], None]] = {
        "damaged artifact: named, set aside, made again": _before_a_run,
        "damage between plan and stage: made again before it is read": _within_a_run,
        "damaged result or manifest: named by the report": _in_a_result,
        "damaged repository: no server is started": _in_a_repository,
        "damage that changes no time: named by make verify": _of_a_disk,
    }
    counts = {what: [0, 0, 0.0] for what in trials}
    notes = dict.fromkeys(trials, "")
    quick_end = time.monotonic() + seconds / 2 if real else end
    while time.monotonic() < quick_end:
        for what, trial in trials.items():
            _count(counts[what], what, trial, rng, notes)
    rows = [Row(what, int(n), int(good), round(worst, 2), notes[what]) for what, (n, good, worst) in counts.items()]
    return [*rows, _real(rng, end)] if real else rows


def _count(
    count: list[float],
    what: str,
    trial: Callable[[random.Random, Path], None],
    rng: random.Random,
    notes: dict[str, str],
) -> None:
    with tempfile.TemporaryDirectory(prefix="rot-") as folder:
        start = time.monotonic()
        try:
            trial(rng, Path(folder))
            count[1] += 1
        except MissedError as error:
            notes[what] = notes[what] or f"first: {str(error)[:200]}"
        count[0] += 1
        count[2] = max(count[2], time.monotonic() - start)


@dataclass(frozen=True)
class _Writes:
    """A stage that writes fixed bytes, and refuses an input with other bytes than its maker wrote."""

    name: str
    version = "1"
    measures = False
    libraries: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        for stage, folder in inputs.items():
            for name in KINDS.get(stage, ()):
                _expect((folder / name).read_bytes() == _content(stage, name), f"{self.name} read a damaged {name}")
        for name in KINDS[self.name]:
            (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (out_dir / name).write_bytes(_content(self.name, name))
        return {}


def _content(stage: str, name: str) -> bytes:
    rng = random.Random(f"{stage}/{name}")
    return rng.randbytes(rng.randint(100, 40_000))


def _plan(store: Store) -> Plan:
    nodes, given = [], {"source": InputSource(Path("/source"), "digest")}
    for name in KINDS:
        nodes.append(Node(name, _Writes(name), "tiny", dict(given)))
        given = {name: name}
    return Plan(Deployment(_settings(), "build", OPENVINO, MACHINE), "", _resolve(nodes, store), ())


@cache
def _settings() -> Settings:
    return load(["engine=openvino"])


def _run(store: Store, plan: Plan | None = None) -> str:
    """Run the plan of the store as it is now, and return what the user sees, in one line."""
    screen = StringIO()
    with redirect_stdout(screen):
        run_plan(plan or _plan(store), store, [], SilentProgress())
    store.hashes.save()
    return " ".join(screen.getvalue().split())


def _artifact(store: Store, stage: str) -> Path:
    (folder,) = (store.root / stage).iterdir()
    return folder


def harm(path: Path, rng: random.Random) -> str:
    """Change the bytes of a file as rot, a crash or an editor does, and restore its modification time."""
    before, stat = path.read_bytes(), path.stat()
    while True:
        after, at = bytearray(before), rng.randrange(len(before))
        how = rng.choice(["a flipped bit", "zeros", "a lost end"])
        if how == "a flipped bit":
            after[at] ^= 1 << rng.randrange(8)
        elif how == "zeros":
            after[at : at + 4096] = bytes(len(after[at : at + 4096]))
        else:
            del after[at:]
        if _means_another(path, before, bytes(after)):
            break
    with path.open("r+b") as file:  # in place: the inode stays
        file.write(after)
        file.truncate()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return how


def _means_another(path: Path, before: bytes, after: bytes) -> bool:
    """Return whether bytes mean something else; JSON with other blanks, or with é written otherwise, does not."""
    if path.name != MANIFEST:
        return before != after
    try:
        return bool(json.loads(before) != json.loads(after))
    except ValueError:
        return True


def _before_a_run(rng: random.Random, folder: Path) -> None:
    _run(Store(folder))
    stage = rng.choice(list(KINDS))
    name = rng.choice([*KINDS[stage], MANIFEST])
    place = _artifact(Store(folder), stage)
    how = harm(place / name, rng)
    planned = {step.node.id: step for step in _plan(Store(folder)).steps}[stage]
    _expect(name in planned.why, f"the plan does not name {how} in {stage}/{name}")
    shown = _run(Store(folder))
    _expect(name in shown and place.name in shown, f"{how} in {stage}/{name} is not named: {shown}")
    _expect((folder / SET_ASIDE / stage / place.name / name).is_file(), f"{stage} is not set aside")
    _all_right(folder)


def _within_a_run(rng: random.Random, folder: Path) -> None:
    _run(Store(folder))
    reader = rng.choice(list(KINDS)[1:])
    read = list(KINDS)[list(KINDS).index(reader) - 1]
    shutil.rmtree(_artifact(Store(folder), reader))
    store = Store(folder)
    plan = _plan(store)
    name = rng.choice(KINDS[read])
    how = harm(_artifact(store, read) / name, rng)
    shown = _run(store, plan)
    _expect(name in shown, f"{how} in {read}/{name} is not named: {shown}")
    _all_right(folder)


def _all_right(folder: Path) -> None:
    store = Store(folder)
    _expect(_plan(store).is_done, "something is missing afterwards")
    for stage, names in KINDS.items():
        for name in names:
            _expect((_artifact(store, stage) / name).read_bytes() == _content(stage, name), f"{stage}/{name} differs")


def _verified(folder: Path) -> str:
    """Return what `make verify` says is damaged."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            verify([f"paths.store={folder}"])
        except UserError as error:
            return str(error)
    return ""


def _in_a_result(rng: random.Random, folder: Path) -> None:
    store = full_store(folder, ("none", "fp8"))
    place = rng.choice([*folder.glob("benchmark/*"), *folder.glob("evaluate/*"), *folder.glob("build/*")])
    name = rng.choice(["benchmark.json", "requests-0.json.gz", "evaluation.json", MANIFEST])
    if not (place / name).is_file():
        name = MANIFEST
    how = harm(place / name, rng)
    try:
        collect(store)
    except UserError as error:
        _expect(name in str(error) and place.name in str(error), f"{how} in {name} is not named: {error}")
    else:
        raise MissedError(f"{how} in {place.parent.name}/{name} is used")


def _in_a_repository(rng: random.Random, folder: Path) -> None:
    _run(Store(folder / "store"))
    copy = shutil.copytree(_artifact(Store(folder / "store"), "repository"), folder / "copy")
    name = rng.choice([*KINDS["repository"], MANIFEST])
    how = harm(copy / name, rng)
    try:
        serve([f"serving.repository={copy}", f"paths.store={folder / 'store'}"])
    except UserError as error:
        _expect(name in str(error) and str(copy) in str(error), f"{how} in {name} is not named: {error}")
    else:
        raise MissedError(f"{how} in {name} is served")


def _of_a_disk(rng: random.Random, folder: Path) -> None:
    _run(Store(folder))
    stage = rng.choice(list(KINDS))
    name = rng.choice(KINDS[stage])
    path = _artifact(Store(folder), stage) / name
    how = harm(path, rng)
    hashes = folder / ".hashes.json"  # as if the damage had left the change time alone
    known, stat = json.loads(hashes.read_text())["files"], path.stat()
    entry = known[f"{stat.st_dev}:{stat.st_ino}"]
    write_json(hashes, sealed({"files": {**known, f"{stat.st_dev}:{stat.st_ino}": _stamped(entry, stat)}}))
    _expect(name in _verified(folder), f"{how} in {stage}/{name} is not named")


def _stamped(entry: list[Any], stat: os.stat_result) -> list[Any]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, *entry[3:]]


def _real(rng: random.Random, end: float) -> Row:
    """Damage the checkpoint, the engine and the repository of a bundled model, and build it again."""
    tried, survived, worst, note = 0, 0, 0.0, ""
    with tempfile.TemporaryDirectory(prefix="rot-") as folder:
        store = Path(folder) / "store"
        _command(folder, store)
        files = _files(store)
        links = Counter(path.stat().st_ino for path in files)
        _expect(
            all(path.stat().st_nlink == links[path.stat().st_ino] for path in files), "a link leads out of the store"
        )
        wanted = {path.relative_to(store): path.read_bytes() for path in files}
        while not tried or time.monotonic() < end:
            name = rng.choice(sorted(each for each, content in wanted.items() if content))
            how, start = harm(store / name, rng), time.monotonic()
            shown = _command(folder, store)
            differ = [each for each in wanted if (store / each).read_bytes() != wanted[each]]
            tried, worst = tried + 1, max(worst, time.monotonic() - start)
            if name.name in shown and "was changed after" in shown and not differ:
                survived += 1
            else:
                note = note or f"first: {how} in {name}; then different: {differ[:3]}"
    return Row("damage in a real model's artifacts: equal bytes again", tried, survived, worst, note)


def _files(store: Path) -> list[Path]:
    folders = [path for path in store.glob("*/*") if not path.parent.name.startswith(".") and path.is_dir()]
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]


def _command(folder: str, store: Path) -> str:
    words = ["repository", "model=tiny_llama", "quant=int8_wo", f"paths.store={store}", f"paths.runs={folder}/runs"]
    done = subprocess.run(
        [sys.executable, "-m", "pipelines", *words], capture_output=True, text=True, timeout=300, check=False
    )
    return " ".join((done.stdout + done.stderr).split())
