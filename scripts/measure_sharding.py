"""What a part of a model costs instead of a whole one: `python -m scripts.measure_sharding FOLDER [LAYERS]`.

Trains a random model for four steps in two processes on this machine's CPU, with recover.sharding none and full, and
prints the most memory that each process had (VmHWM), less what it has once its libraries are loaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from pipelines.compress.config import RecoverSettings
from pipelines.compress.specs import RecoverySpec
from pipelines.compress.training_processes import recover

MIB = 2**20
SIZES: dict[str, Any] = {"steps": 4, "seq_len": 32, "batch_size": 2, "accumulation": 1, "evaluate_every": 2, "seed": 1}
TRAINING = RecoverSettings(method="distill", learning_rate=1e-4, patience=9, **SIZES)
TOKENIZER = Path(__file__).parent.parent / "pipelines" / "bundled" / "models" / "tiny_llama"
LIBRARIES = "import pipelines.compress.training_processes"


def main(folder: Path, layers: int) -> None:
    """Write the model, train it both ways, and print a line for each."""
    model, count = _model(folder / "model", layers)
    bare = _bare()
    sys.stdout.write(f"{count:,} weights; a process with its libraries has {bare // MIB:,} MiB\n")
    whole = 0.0
    for sharding in ("none", "full"):
        spec = RecoverySpec(TRAINING.model_copy(update={"sharding": sharding}), processes=2)
        with _peaks(str(folder)) as peaks:
            facts = recover(model, model, folder / sharding, spec, [_text()], device="cpu")
        most = max(peaks.values()) - bare
        whole = whole or most
        sys.stdout.write(
            f"recover.sharding={sharding}: {most // MIB:,} MiB, {most / count:.1f} bytes per weight,"
            f" {most / whole:.2f} of the whole; loss {facts['loss_after']}\n"
        )
        shutil.rmtree(folder / sharding)


def _model(folder: Path, layers: int) -> tuple[Path, int]:
    """Write a model with random weights in bf16."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig.from_pretrained(TOKENIZER)
    config.update({"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": layers, "head_dim": 64})
    config.update({"num_attention_heads": 12, "num_key_value_heads": 12})
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    shutil.copy(TOKENIZER / "tokenizer.json", folder)
    return folder, model.num_parameters()


def _text() -> str:
    return "the river runs by the city and the city is old. " * 100


def _bare() -> int:
    """Return the memory of a process that has loaded the libraries alone."""
    process = subprocess.run(
        [sys.executable, "-c", f"{LIBRARIES}; print(open('/proc/self/status').read())"],
        capture_output=True,
        text=True,
        check=True,
    )
    return _field(process.stdout)


def _field(status: str) -> int:
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


@contextmanager
def _peaks(folder: str) -> Iterator[dict[int, int]]:
    """Watch the training processes of a folder; the most memory of each is there afterwards."""
    peaks: dict[int, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    words = (entry / "cmdline").read_bytes().decode()
                    if "training_processes" in words and folder in words and "supervisor" not in words:
                        peaks[int(entry.name)] = _field((entry / "status").read_text())
                except (OSError, StopIteration):
                    continue
            time.sleep(0.2)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12)
