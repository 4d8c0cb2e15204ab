"""Training computes with the very weights that are served: its last forward pass is held against the checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch")
modelopt = pytest.importorskip("modelopt")

from pipelines.checkpoint.read import Checkpoint, dequantize  # noqa: E402 - after the skips
from pipelines.compress.config import CalibrationSettings, QuantSettings, SparsitySettings  # noqa: E402
from pipelines.compress.quantizing import quantize  # noqa: E402
from pipelines.compress.sparsifying import sparsify  # noqa: E402
from pipelines.compress.specs import QuantSpec  # noqa: E402
from pipelines.compress.trained_weights import (  # noqa: E402
    StraightThrough,
    TrainedWeights,
    rounder,
)
from pipelines.compress.training_processes import recover  # noqa: E402
from pipelines.domain.formats import FORMATS, UNIFORM, QFormat  # noqa: E402
from tests.support.specs import LoRA, recovery_spec  # noqa: E402
from tests.support.trained import GEMMA, LINEARS, LLAMA, SHORT, texts  # noqa: E402

LORA = (8, 16.0, ("q_proj", "v_proj", "up_proj", "down_proj"))
OLD = modelopt.__version__ < "0.4"
fp4 = pytest.param(
    QuantSettings(qformat=QFormat.NVFP4), None, False, id="nvfp4", marks=pytest.mark.skipif(OLD, reason="0.37")
)


@pytest.mark.parametrize(
    ("rounding", "lora", "sparse"),
    [
        pytest.param(QuantSettings(qformat=QFormat.INT8_WO), None, False, id="int8_wo"),
        pytest.param(
            QuantSettings(qformat=QFormat.INT4_WO, dtype="float16"), LORA, True, id="int4_wo-float16-lora-sparse"
        ),
        pytest.param(QuantSettings(qformat=QFormat.INT4_RTN, group_size=64), None, True, id="int4_rtn-64-sparse"),
        pytest.param(QuantSettings(qformat=QFormat.INT4_RTN), LORA, False, id="int4_rtn-128-lora"),
        pytest.param(QuantSettings(qformat=QFormat.FP8), LORA, False, id="fp8-lora"),
        fp4,
    ],
)
def test_the_checkpoint_has_the_weights_that_training_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounding: QuantSettings, lora: LoRA | None, sparse: bool
) -> None:
    seen: dict[str, Any] = {}
    real = TrainedWeights.finished

    def finished(self: TrainedWeights) -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=lora is not None):
            seen.update({name: self.computed(name).numpy().copy() for name in self._linears})
        return real(self)

    monkeypatch.setattr(TrainedWeights, "finished", finished)
    source = LLAMA
    if sparse:
        source = tmp_path / "sparse"
        sparsify(LLAMA, source, SparsitySettings(method="magnitude"), (), CalibrationSettings())
    more = {"learning_rate": 1e-3, "precision": "bfloat16" if lora else "float32"}
    spec = recovery_spec("distill", rounding=rounding, lora=lora, sparse=sparse, **SHORT | more)
    recover(source, LLAMA, tmp_path / "trained", spec, texts())
    quantize(
        tmp_path / "trained",
        tmp_path / "checkpoint",
        QuantSpec(rounding),
        texts()[:4],
        CalibrationSettings(size=4, seq_len=64, batch_size=1),
    )
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    assert len(seen) == 4 * len(LINEARS)
    for layer in range(4):
        for theirs in dict.fromkeys(LINEARS.values()):
            own = [seen[f"model.layers.{layer}.{ours}"] for ours, name in LINEARS.items() if name == theirs]
            served = dequantize(checkpoint, f"transformer.layers.{layer}.{theirs}")
            assert np.array_equal(np.concatenate(own), served), (layer, theirs)


def test_the_rounding_is_part_of_the_forward_pass(tmp_path: Path) -> None:
    """The loss before training is that of the rounded model: larger with fewer bits, and none without rounding."""
    losses = []
    for rounding in (
        None,
        QuantSettings(qformat=QFormat.INT8_WO),
        QuantSettings(qformat=QFormat.INT4_RTN),
        QuantSettings(qformat=QFormat.INT4_WO),
    ):
        spec = recovery_spec("distill", rounding=rounding, **SHORT | {"steps": 1, "batch_size": 4})
        losses.append(recover(GEMMA, GEMMA, tmp_path / str(len(losses)), spec, texts())["loss_before"])
    assert losses[0] < 1e-9
    assert losses == sorted(losses)
    assert losses[2] > 100 * losses[1] > 0


def test_every_format_that_rounds_weights_alone_is_rounded_here() -> None:
    formats = [qformat for qformat in UNIFORM if FORMATS[qformat].rounds_alone]
    assert formats == [QFormat.FP8, QFormat.INT4_RTN, QFormat.INT8_WO, QFormat.INT4_WO, QFormat.NVFP4]
    for qformat in formats:
        zeros = torch.zeros(2, 256)
        assert torch.equal(rounder(QuantSettings(qformat=qformat))(zeros, torch.ones(()), 16), zeros)


def test_gradients_pass_straight_through() -> None:
    weight = torch.randn(4, 8, requires_grad=True)
    found = StraightThrough.apply(weight, torch.round)
    assert torch.equal(found, weight.detach().round())
    (found * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 3))
