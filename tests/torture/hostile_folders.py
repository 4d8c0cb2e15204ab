"""Plan with model folders whose files were spoilt: a clear refusal or a plan, no traceback, no long wait."""

import json
import math
import random
import shutil
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from pipelines.settings.root import Settings
from pipelines.store.store import Store
from tests.torture.configurations import HERE
from tests.torture.row import Row

LONGEST_REFUSAL = 24 * 80
"""Characters that a screen shows."""
SLOW_S = 2.0
"""Processor time, so that a busy machine changes no verdict; what waits without end runs into the test's own limit."""
SHARE = {"config.json": 0.6, "model.safetensors": 0.3, "tokenizer.json": 0.1}
"""Which file is spoilt how often."""
VALUES: tuple[Any, ...] = (
    *(0, -1, -(2**63), 2**63, 10**400, 1.5, -0.0, 1e-300, 1e308, math.inf, -math.inf, math.nan, True, False, None),
    *("", "12", "1e999", "LlamaForCausalLM", "x" * 100_000, "\x1b[2J\x00", "\ud800"),
    *([], {}, [[[[1]]]], {"a": {"b": {"c": 1}}}, ["LlamaForCausalLM"] * 1000),
)
"""What a hostile file may hold in place of any value."""

Spoil = Callable[[random.Random, Path], str]


def spoil_config(dice: random.Random, folder: Path) -> str:
    """Replace up to three values of config.json, at any depth."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    changed = []
    for _ in range(dice.randint(1, 3)):
        place: Any = config
        key = dice.choice([*place, "rope_scaling", "rope_theta", "head_dim", "num_local_experts"])
        if isinstance(place.get(key), dict) and place[key] and dice.random() < 0.7:
            place = place[key]
            key = dice.choice([*place])
        place[key] = dice.choice(VALUES)
        changed.append(f"{key}={str(place[key])[:40]!r}")
    path.write_text(json.dumps(config))
    return " ".join(changed)


def spoil_header(dice: random.Random, folder: Path) -> str:
    """Change the header of the safetensors file, its length, or its end."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    how = dice.randrange(5)
    if how == 0:
        declared = dice.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
        path.write_bytes(struct.pack("<Q", declared) + content[8:])
        return f"length {declared}"
    if how == 1:
        cut = dice.randrange(len(content))
        path.write_bytes(content[:cut])
        return f"cut at {cut}"
    name = dice.choice([name for name in header if name != "__metadata__"])
    if how == 2:
        key = dice.choice(["dtype", "shape", "data_offsets"])
        header[name][key] = dice.choice(VALUES)
    elif how == 3:
        at = dice.randrange(2)
        header[name]["data_offsets"][at] = dice.choice(
            [0, -1, len(data), 2**62, 1.5, header[name]["data_offsets"][at] + 1]
        )
    else:
        header[name] = dice.choice([*VALUES, header[dice.choice([*header])]])
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return f"{name}: {str(header[name])[:60]}"


def spoil_bytes(dice: random.Random, path: Path) -> str:
    """Change, cut or repeat bytes of a file, without regard to what they mean."""
    content = bytearray(path.read_bytes())
    at = dice.randrange(len(content))
    how = dice.randrange(4)
    if how == 0:
        content[at] ^= 1 << dice.randrange(8)
    elif how == 1:
        del content[at:]
    elif how == 2:
        content[at:at] = dice.choice([b"[" * 50_000, b'{"a":' * 50_000, b"1" * 5000, b"\0", b"NaN", b"1e999"])
    else:
        content[at:at] = content[at : at + 100]
    path.write_bytes(content)
    return f"{path.name} at {at}, way {how}"


def _spoil(dice: random.Random, folder: Path) -> str:
    (name,) = dice.choices(list(SHARE), list(SHARE.values()))
    if dice.random() < 0.3 or name == "tokenizer.json":
        return spoil_bytes(dice, folder / name)
    return spoil_config(dice, folder) if name == "config.json" else spoil_header(dice, folder)


@contextmanager
def spoilt(seed: str) -> Iterator[tuple[Path, str]]:
    """Yield a copy of a bundled model with one file spoilt, and how."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        shutil.copytree(BUNDLED / "models" / dice.choice(["tiny_llama", "tiny_gemma"]), folder)
        yield folder, _spoil(dice, folder)


def judge(settings: Settings, seed: str) -> tuple[str, float]:
    """Plan with one spoilt folder.

    Returns:
        what is wrong with the verdict, empty for nothing, and the seconds of processor time it took.
    """
    with spoilt(seed) as (folder, how):
        wanted = settings.model_copy(update={"model": settings.model.model_copy(update={"path": folder})})
        begun = time.process_time()
        fault = ""
        try:
            make_plan(wanted, "all", Store(folder.parent / "store"), HERE)
        except UserError as error:
            long = [str(each) for each in error.faults if len(str(each)) > LONGEST_REFUSAL]
            unclear = [str(each) for each in error.faults if not str(each).isprintable()]
            fault = f"{how}: {(long or unclear)[0][:400]}" if long or unclear else ""
        except Exception:  # noqa: BLE001 - whatever a user would see as a traceback is a finding
            fault = f"{how}: {traceback.format_exc(limit=-3)}"
        took = time.process_time() - begun
    return fault or (f"{how}: took {took:.1f} s" if took > SLOW_S else ""), took


def run(seed: int, seconds: float) -> list[Row]:
    """Spoil folders for as long as there is time."""
    until, settings = time.monotonic() + seconds, load([])
    faults, worst, tried = [], 0.0, 0
    while time.monotonic() < until:
        fault, took = judge(settings, f"{seed} {tried}")
        tried, worst = tried + 1, max(worst, took)
        faults += [fault] if fault else []
    note = faults[0] if faults else ""
    return [Row("model folders with spoilt files refused or planned", tried, tried - len(faults), worst, note)]
