"""Kill a quantization again and again until it is complete.

    python -m tests.support.killed_quantize MODEL OUT FORMAT KILLS SEED

Quantizes in a child process, which is killed after a random time, up to KILLS times, and then left to finish. Prints
one JSON object: the kills that met a running child, and the complete layers after each.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import modelopt.torch.export
import modelopt.torch.quantization  # noqa: F401 - loaded before the forks, so that a child starts in milliseconds
import transformers  # noqa: F401

import pipelines.compress.modelopt_door
import pipelines.compress.quantizing  # noqa: F401
from pipelines.compress import CalibrationSpec, QuantSpec, quantize
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.progress import PARTIAL

TEXTS = [f"The river of Githbrel is number {i}. " * (1 + i % 3) for i in range(8)]
CALIBRATION = CalibrationSpec(size=8, batch_size=2)


def spec_of(qformat: str) -> QuantSpec:
    """Return the quantization under test, with a KV cache that AWQ's second pass rounds."""
    return QuantSpec(QFormat(qformat), KvFormat.INT8)


def _complete_layers(out: Path) -> int:
    try:
        return int(json.loads((out / PARTIAL / "layers.json").read_text())["layers"])
    except FileNotFoundError:
        return 0


def _start(model: Path, out: Path, qformat: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            quantize(model, out, spec_of(qformat), TEXTS, CALIBRATION)
        except BaseException:  # noqa: BLE001 - a forked child must not return into the parent's code
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return pid


def main() -> None:
    """See the module."""
    model, out, qformat = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    draw, layers = random.Random(int(sys.argv[5])), []
    longest = 1.0
    for _ in range(int(sys.argv[4])):
        pid = _start(model, out, qformat)
        time.sleep(draw.uniform(0.02, longest))
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            assert status == 0, "a child failed by itself"
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        layers.append(_complete_layers(out))
    _, status = os.waitpid(_start(model, out, qformat), 0)
    assert status == 0, "the last child failed"
    sys.stdout.write(json.dumps({"kills": len(layers), "layers": layers}) + "\n")


if __name__ == "__main__":
    main()
