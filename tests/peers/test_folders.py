"""Folders that other quantizers really made: our checkpoints have the weights that their own libraries compute with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.checkpoint.verify import verify
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.runtime import OpenVinoOptions
from pipelines.engines.port import BuildLimits
from tests.peers.prepare import FOLDER, ROOT, ROWS, SOURCE, Row, made
from tests.support.scored_logits import scored_logits

Array = np.ndarray[Any, Any]

MODULES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
QUESTIONS = ("eval=mini_mmlu", "eval.limit=10", "eval.baseline=skip")
LOGITS = {"quant=int4_gptq": 1e-4, "quant=int4_awq": 0.01, "quant=fp8": 0.05, "quant=nvfp4": 0.3}
"""Largest relative errors of logits. The CPU engine rounds activations too in FP8 and NVFP4; the reference does not."""
LIMITS = BuildLimits(max_batch_size=1, max_input_len=512, max_seq_len=1024, max_num_tokens=512)


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
    checkpoint = Checkpoint(config.parent)
    assert verify(config.parent) == []
    theirs = load_file(folder / "dequantized.safetensors")
    for layer in range(checkpoint.config.num_hidden_layers):
        for part, stems in MODULES.items():
            expected = np.concatenate([theirs[f"model.layers.{layer}.{stem}"] for stem in stems])
            found = dequantize(checkpoint, f"transformer.layers.{layer}.{part}")
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=allowed(row, part, expected), err_msg=part)
    ours, expected = logits(config.parent, tmp_path), logits_of_peer(folder, theirs)
    error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
    sys.stdout.write(f"{row.name}: logits differ by {error:.1e}\n")
    assert error < LOGITS[row.quant[0]]
    (result,) = tmp_path.rglob("evaluation.json")
    records = json.loads(result.read_text())["records"]
    assert sum(record["correct"] for record in records) / len(records) > 0.8


def tokens() -> list[list[int]]:
    """Return token ids of two texts."""
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    texts = ("The moon of Velm is small. The river begins", "Question: what is the capital? Answer:")
    return [tokenizer(text)["input_ids"] for text in texts]


def logits(checkpoint: Path, out: Path) -> Array:
    """Return the CPU engine's logits, of float32 arithmetic."""
    OpenVinoEngine().build(checkpoint, LIMITS, out / "engine", SilentProgress())
    with OpenVinoEngine(OpenVinoOptions(inference_precision="f32")).open(out / "engine") as session:
        return np.concatenate([scored_logits(session, row) for row in tokens()])


def logits_of_peer(folder: Path, weights: dict[str, Array]) -> Array:
    """Return the logits of Transformers with the weights of the peer, and with its folder's other tensors."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_torch(folder / "model.safetensors")
    state = {name: tensor for name, tensor in tensors.items() if "_proj." not in name}
    for name, weight in weights.items():
        state[f"{name}.weight"] = (
            torch.from_numpy(weight) * tensors.get(f"{name}.pre_quant_scale", torch.ones(1)).float()
        )
    model.load_state_dict(state)
    with torch.no_grad():
        return np.concatenate([model(torch.tensor([row])).logits[0].numpy() for row in tokens()])


def allowed(row: Row, part: str, weight: Array) -> float:
    """Return the error of what is rounded anew: q, k and v to a common scale in FP8, zero points to 16 bit."""
    largest = float(np.abs(weight).max())
    if row.quant[0] == "quant=fp8" and part == "attention.qkv":
        return 2**-4 * largest
    return (2**-8 if "zero_points" in row.words else 1e-6) * largest


@pytest.mark.parametrize("row", [row for row in ROWS if row.refusal], ids=lambda row: row.name)
def test_a_folder_is_refused_by_its_name(row: Row, tmp_path: Path) -> None:
    code, text = command(tmp_path, made(row), "build", "quant=none")
    assert code == 2
    assert row.refusal in text
    assert not list(tmp_path.glob("*/*/*.safetensors"))
