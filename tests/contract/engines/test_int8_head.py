"""An output head in INT8: `engine.openvino.head_precision=int8`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.checkpoint.read import Checkpoint, quantize_weight_only
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino import weights
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.memory import CpuSizes, cpu_memory
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions, arithmetic
from pipelines.engines.openvino.weights import WeightStore
from tests.contract.engines.conftest import LIMITS, Workshop, relative_error
from tests.contract.engines.test_cpu_memory import LARGE

F32 = OpenVinoOptions(inference_precision="f32", num_threads=1, head_precision="int8")
TABLE = {"gemma": "transformer.vocab_embedding.weight", "llama": "lm_head.weight"}
"""Gemma's head is its embedding."""


@pytest.mark.parametrize("kind", TABLE)
def test_the_head_multiplies_with_rounded_weights(
    kind: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are those of trtllm-build's INT8 rounding, and the embedding keeps its 16 bits."""
    monkeypatch.setattr(weights, "PIECE_ROWS", 100)
    checkpoint = workshop.checkpoint(kind, QFormat.NONE)
    engine = OpenVinoEngine(F32)
    facts = engine.build(checkpoint, LIMITS, tmp_path / "engine", SilentProgress())
    folder, opened = EngineFolder.load(tmp_path / "engine"), Checkpoint(checkpoint)
    table = opened.tensor(TABLE[kind])
    hidden = np.random.default_rng(0).standard_normal((1, 5, table.shape[1]), dtype=np.float32)
    (found,) = engine.open(folder.path).head().logits([hidden], 5)
    codes, scale = quantize_weight_only(table, 8)
    root = np.sqrt(np.square(hidden).mean(axis=-1, keepdims=True) + folder.config.norm_epsilon)
    normed = hidden / root * opened.tensor("transformer.ln_f.weight").astype(np.float32)
    assert relative_error(found, normed @ (codes * scale.astype(np.float32)[:, None]).T) < 1e-5
    assert relative_error(found, normed @ table.astype(np.float32).T) > 1e-4
    assert facts.details["weight_elements"]["i8"] == table.size
    assert arithmetic(folder, F32) == "f32, head in INT8"


def test_a_head_that_is_quantized_already_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    checkpoint = workshop.checkpoint("llama", QFormat.FP8)
    with pytest.raises(UserError, match=r"head_precision=int8: .*layers.0.mlp.fc.weight' is quantized.*, to F8_E4M3"):
        WeightStore(Checkpoint(checkpoint)).int8_rows("transformer.layers.0.mlp.fc")


def test_its_memory_is_half_of_the_head() -> None:
    wide = CpuSizes(LARGE, QFormat.INT4_WO, "f32", "f16", LIMITS.max_num_tokens, LIMITS.max_seq_len)
    before, after = cpu_memory(wide), cpu_memory(replace(wide, int8_head=True))
    assert before is not None
    assert after is not None
    table = LARGE.vocab_size * LARGE.hidden_size
    assert (before.weights - after.weights, before.mapped - after.mapped) == (table, table)
