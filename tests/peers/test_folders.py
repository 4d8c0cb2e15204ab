"""Folders that other quantizers really made: our checkpoints have the weights that their own libraries compute with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipelines.checkpoint.dequantize import dequantize
from pipelines.checkpoint.read import Checkpoint
from pipelines.checkpoint.verify import verify
from tests.peers.prepare import FOLDER, ROOT, ROWS, Row, made

MODULES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
QUESTIONS = ("eval=mini_mmlu", "eval.limit=10", "eval.baseline=skip")


def command(store: Path, folder: Path, stage: str, *words: str) -> tuple[int, str]:
    line = [sys.executable, "-m", "pipelines", stage, f"paths.store={store}", f"model.path={folder}", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "110"}
    done = subprocess.run(line, cwd=FOLDER, env=environment, text=True, capture_output=True, check=False, timeout=900)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("row", [row for row in ROWS if row.quant], ids=lambda row: row.name)
def test_a_folder_is_taken_over(row: Row, tmp_path: Path) -> None:
    """The same weights, and more than 80 % of the bundled questions."""
    folder = made(row)
    code, text = command(tmp_path, folder, "evaluate", *row.quant, *QUESTIONS)
    assert code == 0, text
    (config,) = tmp_path.glob("quantize/*/config.json")
    checkpoint = Checkpoint.open(config.parent)
    assert verify(config.parent) == []
    theirs = load_file(folder / "dequantized.safetensors")
    for layer in range(checkpoint.config.num_hidden_layers):
        for part, stems in MODULES.items():
            expected = np.concatenate([theirs[f"model.layers.{layer}.{stem}"] for stem in stems])
            found = dequantize(checkpoint, f"transformer.layers.{layer}.{part}")
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=allowed(row, part, expected), err_msg=part)
    (result,) = tmp_path.rglob("evaluation.json")
    records = json.loads(result.read_text())["records"]
    assert sum(record["correct"] for record in records) / len(records) > 0.8


def allowed(row: Row, part: str, weight: np.ndarray[Any, Any]) -> float:
    """Return the error of what is rounded anew: q, k and v to a common scale in FP8."""
    largest = float(np.abs(weight).max())
    if row.quant[0] == "quant=fp8" and part == "attention.qkv":
        return 2**-4 * largest
    return 1e-6 * largest


@pytest.mark.parametrize("row", [row for row in ROWS if row.refusal], ids=lambda row: row.name)
def test_a_folder_is_refused_by_its_name(row: Row, tmp_path: Path) -> None:
    code, text = command(tmp_path, made(row), "build", "quant=none")
    assert code == 2
    assert row.refusal in text
    assert not list(tmp_path.glob("*/*/*.safetensors"))
