"""Change the inputs of the fuzzing corpus at random: without coverage, but with nothing to install; see tests/fuzz."""

import random
import time
import traceback
from pathlib import Path

from tests.fuzz.targets import TARGETS
from tests.torture.row import Row

CORPUS = Path(__file__).resolve().parent.parent / "fuzz" / "corpus"
SLOW_S = 5.0
WORDS = (b"null", b"NaN", b"1e999", b"-1", b"[[", b"{", b'"', b"\\ud800", b"\xff", b"0" * 50, b"{% for %}", b"true")


def mutated(dice: random.Random, inputs: list[bytes]) -> bytes:
    """Return an input with some bytes changed, left out, repeated, or replaced by a part of another."""
    found = bytearray(dice.choice(inputs))
    for _ in range(dice.choice([1, 1, 2, 4, 8])):
        at, end = dice.randrange(len(found) + 1), dice.randrange(len(found) + 1)
        other = dice.choice(inputs)
        part = other[dice.randrange(len(other)) :][: dice.randrange(1, 40)]
        new = dice.choice([b"", bytes([dice.randrange(256)]), dice.choice(WORDS), part])
        found[at : dice.choice([at, at + 1, at + len(new), max(at, end)])] = new
    return bytes(found[:4096])


def fuzz(target: str, seed: int, seconds: float) -> Row:
    """Try one target for some seconds."""
    dice, inputs = (
        random.Random(f"{target} {seed}"),
        [path.read_bytes() for path in sorted((CORPUS / target).iterdir())],
    )
    until, tried, worst = time.monotonic() + seconds, 0, 0.0
    faults: list[str] = []
    while time.monotonic() < until:
        data, begun = mutated(dice, inputs), time.process_time()
        try:
            TARGETS[target](data)
        except Exception:  # noqa: BLE001 - whatever a user would see as a traceback is a finding
            faults.append(f"{data!r:.300}: {traceback.format_exc(limit=-2)}")
        took = time.process_time() - begun
        tried, worst = tried + 1, max(worst, took)
        faults += [f"{data!r:.300}: took {took:.1f} s"] if took > SLOW_S else []
    return Row(f"inputs at random: {target}", tried, tried - len(faults), worst, faults[0] if faults else "")


def run(seed: int, seconds: float) -> list[Row]:
    """Share the time out to the targets."""
    return [fuzz(target, seed, seconds / len(TARGETS)) for target in TARGETS]
