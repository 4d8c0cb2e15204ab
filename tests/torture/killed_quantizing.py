"""kill -9 of a quantization at random moments: no complete layer is computed again, and no bit differs in the end.

The quantizations run in a process of their own, `python -m tests.torture.killed_quantizing SECONDS SEED`, which imports
ModelOpt once and forks them.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from pipelines.compress.config import CalibrationSettings
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.progress import PARTIAL
from pipelines.settings.model import BUNDLED
from tests.conftest import ROOT
from tests.support.specs import quant_spec
from tests.torture.row import Row

MODELS = tuple(BUNDLED / "models" / name for name in ("tiny_llama", "tiny_gemma"))
FORMATS = (QFormat.INT4_AWQ, QFormat.FP8, QFormat.INT8_SQ)
"""AWQ passes through the layers twice, FP8 once, and SmoothQuant changes the tensors around the linears."""
TEXTS = [f"The river of Githbrel is number {i}. " * (1 + i % 3) for i in range(8)]
KILLS = 12
"""Most kills of one quantization, which is then left to finish."""


def run(seed: int, seconds: float) -> list[Row]:
    """Kill until `seconds` are over; survived means that the layer was kept, and the files are the usual ones."""
    words = [sys.executable, "-m", "tests.torture.killed_quantizing", str(seconds), str(seed)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    kills, runs = found["kills"], found["runs"]
    what = "kill -9 while quantizing: complete layers are kept, and the files are the same to the byte"
    return [Row(what, kills, kills - found["lost"], 0.0, f"{runs} quantizations, {found['wrong']} with other files")]


def _campaign(seconds: float, seed: int) -> dict[str, int]:
    """Quantize under kills again and again; count kills, and those after which something was lost."""
    _import_modelopt()
    rng, until = random.Random(seed), time.monotonic() + seconds
    count = {"runs": 0, "kills": 0, "lost": 0, "wrong": 0}
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        while count["runs"] == 0 or time.monotonic() < until:
            model, qformat = rng.choice(MODELS), rng.choice(FORMATS)
            usual = Path(folder, f"{model.name}-{qformat}")
            longest = _finish(model, usual, qformat) if not usual.exists() else 1.0
            killed = Path(folder, f"run-{count['runs']}")
            layers = _kill_often(model, killed, qformat, rng, longest / 3)
            _finish(model, killed, qformat)
            wrong = _files(usual) != _files(killed)
            count["runs"] += 1
            count["kills"] += len(layers)
            count["wrong"] += wrong
            count["lost"] += len(layers) if wrong else sum(b < a for a, b in pairwise(layers))
    return count


def _import_modelopt() -> None:
    """Load what a quantization needs before the forks, so that each starts in milliseconds."""
    import transformers  # noqa: F401

    import pipelines.compress.modelopt_door
    import pipelines.compress.quantizing  # noqa: F401


def _kill_often(model: Path, out: Path, qformat: QFormat, rng: random.Random, longest: float) -> list[int]:
    """Start and kill until one ends by itself, or `KILLS` times; return the complete layers after each kill."""
    layers: list[int] = []
    for _ in range(KILLS):
        pid = _start(model, out, qformat)
        time.sleep(rng.uniform(0.02, longest))
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            assert status == 0, "a quantization failed by itself"
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if any(layers) and not (out / PARTIAL / "layers.json").exists():
            break  # killed while it removed its record, which is the last that it does
        layers.append(_complete_layers(out))
    return layers


def _finish(model: Path, out: Path, qformat: QFormat) -> float:
    """Let a quantization run to its end; return the seconds."""
    begun = time.monotonic()
    assert os.waitpid(_start(model, out, qformat), 0)[1] == 0, "a quantization failed by itself"
    return time.monotonic() - begun


def _start(model: Path, out: Path, qformat: QFormat) -> int:
    from pipelines.compress.quantizing import quantize

    pid = os.fork()
    if pid == 0:
        try:
            spec = quant_spec(qformat, KvFormat.INT8)  # a KV cache that AWQ's second pass rounds
            quantize(model, out, spec, TEXTS, CalibrationSettings(size=8, batch_size=2))
        except BaseException:  # noqa: BLE001 - a forked child must not return into the parent's code
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return pid


def _complete_layers(out: Path) -> int:
    try:
        return int(json.loads((out / PARTIAL / "layers.json").read_text())["layers"])
    except FileNotFoundError:
        return 0


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_campaign(float(sys.argv[1]), int(sys.argv[2]))) + "\n")
