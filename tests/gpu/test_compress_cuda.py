"""ModelOpt calibrating on a GPU writes checkpoints that pass the same rules and stay near those of the CPU."""

import numpy as np
import pytest

from pipelines.checkpoint.read import Checkpoint
from pipelines.checkpoint.verify import verify
from pipelines.compress import CalibrationSpec, QuantSpec, load_texts, quantize
from pipelines.domain.formats import QFormat
from pipelines.settings.model import BUNDLED
from tests.support.whole_model import quantize_whole

FORMATS = [QFormat.NONE, QFormat.FP8, QFormat.INT8_SQ, QFormat.INT4_AWQ, QFormat.W4A8_AWQ]


def export(folder, qformat, device):
    texts = load_texts(BUNDLED / "corpus.jsonl", size=16)
    spec = CalibrationSpec(size=16, batch_size=4)
    quantize(BUNDLED / "models" / "tiny_llama", folder, QuantSpec(qformat), texts, spec, device=device)
    return folder


@pytest.mark.parametrize("qformat", FORMATS, ids=str)
def test_a_checkpoint_made_on_cuda_is_valid(tmp_path, qformat):
    assert verify(export(tmp_path / "cuda", qformat, "cuda")) == []


def test_fp8_scales_agree_with_the_cpu(tmp_path):
    """Both see the same tokens; only rounding differs."""
    on_cuda = Checkpoint.open(export(tmp_path / "cuda", QFormat.FP8, "cuda"))
    on_cpu = Checkpoint.open(export(tmp_path / "cpu", QFormat.FP8, "cpu"))
    for name in on_cpu:
        if name.endswith("activation_scaling_factor"):
            assert np.allclose(on_cuda.tensor(name), on_cpu.tensor(name), rtol=0.05), name


@pytest.mark.parametrize("qformat", FORMATS, ids=str)
def test_layers_on_cuda_equal_the_whole_model_on_cuda(tmp_path, qformat):
    """One layer at a time is on the GPU; the bytes are those of the model calibrated there in one piece."""
    texts, spec = load_texts(BUNDLED / "corpus.jsonl", size=16), CalibrationSpec(size=16, batch_size=4)
    model = BUNDLED / "models" / "tiny_llama"
    export(tmp_path / "layers", qformat, "cuda")
    quantize_whole(model, tmp_path / "whole", QuantSpec(qformat), texts, spec, device="cuda")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "layers" / path.name).read_bytes(), path.name
