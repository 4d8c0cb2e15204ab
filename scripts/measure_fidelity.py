"""Measure what fidelity costs on a model with the shape of Gemma 2B, Llama 1B or 8B and random weights.

    python -m scripts.measure_fidelity WORK_FOLDER [SHAPE TOKENS PRECISION]

SHAPE is one of `scripts.measure_streaming` (gemma_2b unless given); PRECISION is f32, or bf16 for a processor that has
such products. Prints tokens/s and processor time of reading, the time that 32,768 tokens would take, the memory of the
two loaded models, and how much a comparison takes beyond it at its peak.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eval.fidelity.config import ALONE
from eval.fidelity.measure import NOISE_TOKENS, Side, Windows, measure
from pipelines.domain.progress import Advance
from pipelines.engines.port import LogitsSession
from pipelines.engines.registry import open_engine
from scripts.measure_streaming import SHAPES, make_model

WINDOW, FORMATS = 512, ("none", "int8_wo")


def build(work: Path, model: Path, qformat: str) -> Path:
    """Build an engine as a user would and return its folder."""
    words = [f"model.path={model}", f"quant={qformat}", f"paths.store={work / 'artifacts'}"]
    subprocess.run([sys.executable, "-m", "pipelines", "build", *words], cwd=work, check=True)
    return next((work / "artifacts" / "build").glob(f"{model.name}-{qformat}-*"))


def resident(name: str) -> float:
    """Return VmRSS or VmHWM of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


class Clock:
    """A progress display that keeps when each slice was compared.

    Attributes:
        slices: of each task, (seconds, processor seconds, tokens) at the end of every slice.
    """

    def __init__(self) -> None:
        self.slices: list[list[tuple[float, float, float]]] = []

    @contextmanager
    def task(self, _title: str, _total: float | None, _unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        here: list[tuple[float, float, float]] = []
        self.slices.append(here)
        yield lambda tokens: here.append((time.monotonic(), time.process_time(), tokens))

    def note(self, text: str) -> None:
        """See `Progress.note`."""

    def per_token(self, task: int) -> tuple[float, float]:
        """Return seconds and processor seconds of a token, without the first slice, which loads and compiles.

        Raises:
            ValueError: there was one slice only.
        """
        first, *rest = self.slices[task]
        if not rest:
            raise ValueError("One slice says nothing about time; measure more tokens.")
        tokens = sum(slice_tokens for _, _, slice_tokens in rest)
        return (rest[-1][0] - first[0]) / tokens, (rest[-1][1] - first[1]) / tokens


def opened(engine: Path, name: str, precision: str) -> Side:
    """Open an engine to read texts with."""
    session = open_engine("openvino", inference_precision=precision).open(engine)
    assert isinstance(session, LogitsSession)
    return Side(name, session)


def engines(work: Path, shape: str) -> list[Path]:
    """Make the model in a process of its own, which takes memory, and build an engine in each format."""
    command = [sys.executable, "-m", "scripts.measure_fidelity", str(work), shape, "model"]
    subprocess.run(command, check=True)
    return [build(work, work / shape, qformat) for qformat in FORMATS]


def main() -> None:
    """Build the engines, then compare them."""
    work, arguments = Path(sys.argv[1]).absolute(), sys.argv[2:]
    shape, tokens, precision = (*arguments, *("gemma_2b", "4096", "f32")[len(arguments) :])
    work.mkdir(parents=True, exist_ok=True)
    if tokens == "model":
        make_model(work / shape, SHAPES[shape])
        return
    sides = [opened(engine, qformat, precision) for engine, qformat in zip(engines(work, shape), FORMATS, strict=True)]
    count = -(-int(tokens) // (WINDOW - 1))
    rows = tuple(tuple((7 * at + 13 * row) % 1900 for at in range(WINDOW)) for row in range(count))
    imports = resident("VmRSS")
    loaded = [side.session.teacher_forcing() for side in sides]
    for each in loaded:
        list(each.logits(each.hidden([rows[0][:32]], 32), 32))
    models, loading = resident("VmRSS"), resident("VmHWM")
    del loaded, each
    Path("/proc/self/clear_refs").write_text("5")
    clock, start, busy = Clock(), time.monotonic(), time.process_time()
    names = {"model": shape, "qformat": FORMATS[1], "engine": "openvino", "reference": shape}
    result = measure(*sides, [Windows("user", rows, unseen=True)], work, clock, **names, greedy=None, layers=None)
    seconds, busy = time.monotonic() - start, time.process_time() - busy
    read, noise = clock.per_token(0), clock.per_token(1)
    fixed = seconds - read[0] * result.overall.tokens - noise[0] * result.noise.tokens
    whole = fixed + ALONE * read[0] + NOISE_TOKENS * noise[0]
    sys.stdout.write(
        f"{result.overall.tokens:,} tokens: {seconds:.1f} s, {busy:.1f} s of processor time; mean KL "
        f"{result.overall.kl_mean:.3g}, noise {result.noise.kl_mean:.3g}\n"
        f"{1 / read[0]:.1f} tokens/s through both, {read[1] * 1000:.1f} ms of processor time each; noise "
        f"{1 / noise[0]:.1f} tokens/s; loading {fixed:.1f} s; {ALONE:,} tokens with their noise: {whole:,.0f} s\n"
        f"imports {imports:,.0f} MiB; with two models {models:,.0f} MiB, {loading:,.0f} MiB while they load; "
        f"peak {resident('VmHWM'):,.0f} MiB, {resident('VmHWM') - models:,.0f} MiB beyond the loaded models\n"
    )


if __name__ == "__main__":
    main()
