"""Recovery training on GPUs: the loss falls, zeros stay, and GPUs that share a batch find the weights of one."""

import pytest
import torch

from pipelines.compress.config import CalibrationSettings, QuantSettings, SparsitySettings
from pipelines.compress.sparsifying import sparsify
from pipelines.compress.training_processes import recover
from pipelines.domain.formats import QFormat
from tests.support.specs import recovery_spec
from tests.support.trained import LLAMA, SHORT, texts, weights


@pytest.mark.parametrize("lora", [None, (4, 8.0, ("q_proj", "down_proj"))], ids=["all weights", "low rank"])
@pytest.mark.parametrize("qformat", [QFormat.INT4_RTN, QFormat.NVFP4, QFormat.FP8], ids=str)
def test_a_model_learns_on_a_gpu(tmp_path, qformat, lora):
    sparsify(LLAMA, tmp_path / "sparse", SparsitySettings(method="magnitude"), (), CalibrationSettings(), device="cuda")
    spec = recovery_spec("distill", sparse=True, rounding=QuantSettings(qformat=qformat), lora=lora, **SHORT)
    facts = recover(tmp_path / "sparse", LLAMA, tmp_path / "out", spec, texts(), device="cuda")
    assert facts["device"] == "cuda"
    assert facts["loss_after"] < facts["loss_before"]
    before, after = weights(tmp_path / "sparse"), weights(tmp_path / "out")
    assert not any((after[name][before[name] == 0] != 0).any() for name in before if "_proj" in name)


def test_one_process_trains_on_one_gpu_of_several(tmp_path, monkeypatch):
    """The Trainer takes all that it sees, each with a batch of its own; one process is one GPU here."""
    spec = recovery_spec("distill", rounding=QuantSettings(qformat=QFormat.FP8), **SHORT)
    alone = recover(LLAMA, LLAMA, tmp_path / "alone", spec, texts(), device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    beside = recover(LLAMA, LLAMA, tmp_path / "beside", spec, texts(), device="cuda")
    assert beside["losses"] == alone["losses"]
    assert beside["held_out_losses"] == alone["held_out_losses"]


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_gpus_find_the_weights_of_one(tmp_path, sharding):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is visible to PyTorch")
    found = []
    for processes, more in ((1, {}), (2, {"sharding": sharding})):
        spec = recovery_spec(
            "distill", rounding=QuantSettings(qformat=QFormat.INT8_WO), processes=processes, **more, **SHORT
        )
        found.append(recover(LLAMA, LLAMA, tmp_path / str(processes), spec, texts(), device="cuda"))
    assert found[1]["loss_after"] == pytest.approx(found[0]["loss_after"], rel=0.02)
    left, right, before = weights(tmp_path / "1"), weights(tmp_path / "2"), weights(LLAMA)
    learned = sum(float((left[name].float() - before[name].float()).norm()) for name in left)
    assert sum(float((left[name].float() - right[name].float()).norm()) for name in left) < 0.1 * learned
