"""ModelOpt computing on a GPU writes checkpoints that pass the same rules, repeat, and stay near those of the CPU."""

import json

import numpy as np
import pytest
import torch

from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.checkpoint.unified import verify_unified
from pipelines.checkpoint.verify import verify
from pipelines.compress.config import CalibrationSettings, SparsitySettings
from pipelines.compress.loading import ReferenceModel
from pipelines.compress.pruning import prune_model
from pipelines.compress.quantizing import quantize
from pipelines.compress.sparsifying import sparsify
from pipelines.compress.texts import load_texts
from pipelines.domain.errors import ContinuableError
from pipelines.domain.formats import FORMATS, UNIFORM, KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.settings.model import BUNDLED
from tests.support.specs import mix_spec, pruned_to, quant_spec
from tests.support.stops import Stops
from tests.support.trained import weights
from tests.support.whole_model import quantize_whole

LLAMA = BUNDLED / "models" / "tiny_llama"
SPEC = CalibrationSettings(size=16, batch_size=4)


def texts():
    return load_texts(BUNDLED / "corpus.jsonl", size=16)


def export(folder, spec, device="cuda", **options):
    quantize(LLAMA, folder, spec, texts(), SPEC, device=device, **options)
    return folder


def assert_same_files(one, other):
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


@pytest.mark.parametrize("kv_cache", [KvFormat.AUTO, KvFormat.FP8, KvFormat.INT8], ids=str)
@pytest.mark.parametrize("qformat", UNIFORM, ids=str)
def test_a_checkpoint_made_on_cuda_is_valid_and_repeats(tmp_path, qformat, kv_cache):
    """Equal keys have equal bytes on a GPU, too."""
    spec = quant_spec(qformat, kv_cache)
    assert verify(export(tmp_path / "one", spec)) == []
    assert_same_files(tmp_path / "one", export(tmp_path / "two", spec))


@pytest.mark.parametrize("qformat", UNIFORM, ids=str)
def test_weights_and_scales_are_near_those_of_the_cpu(tmp_path, qformat):
    """Both see the same tokens; only rounding differs, which may move a weight to the next code."""
    if FORMATS[qformat].sequential:
        pytest.skip("with a GPU in the machine, ModelOpt's GPTQ asks it for its memory even for a model on the CPU")
    on_cuda = Checkpoint(export(tmp_path / "cuda", quant_spec(qformat)))
    on_cpu = Checkpoint(export(tmp_path / "cpu", quant_spec(qformat), "cpu"))
    assert set(on_cuda) == set(on_cpu)
    for name in on_cpu:
        if name.endswith("activation_scaling_factor"):
            assert np.allclose(on_cuda.tensor(name), on_cpu.tensor(name), rtol=0.05), name
    if FORMATS[qformat].tuning:  # factors move between weights and activations, whose product alone is comparable
        return
    for name in ("attention.qkv", "mlp.fc", "mlp.proj"):
        ours, theirs = (dequantize(each, f"transformer.layers.0.{name}") for each in (on_cuda, on_cpu))
        assert np.linalg.norm(ours - theirs) <= 0.02 * np.linalg.norm(theirs), name


@pytest.mark.parametrize("qformat", UNIFORM, ids=str)
def test_layers_on_cuda_equal_the_whole_model_on_cuda(tmp_path, qformat):
    """One layer at a time is on the GPU; the bytes are those of the model calibrated there in one piece."""
    export(tmp_path / "layers", quant_spec(qformat))
    quantize_whole(LLAMA, tmp_path / "whole", quant_spec(qformat), texts(), SPEC, device="cuda")
    assert_same_files(tmp_path / "whole", tmp_path / "layers")


@pytest.mark.parametrize("qformat", [QFormat.FP8, QFormat.INT4_AWQ, QFormat.NVFP4], ids=str)
def test_a_hugging_face_checkpoint_of_cuda_is_valid(tmp_path, qformat):
    export(tmp_path / "unified", quant_spec(qformat, KvFormat.FP8), layout="hugging_face")
    assert verify_unified(tmp_path / "unified") == []


@pytest.mark.parametrize("scoring", ["gradient", "kl_div"])
def test_a_mix_is_searched_on_cuda(tmp_path, scoring):
    export(tmp_path, mix_spec((QFormat.FP8, QFormat.INT4_AWQ), 6.0, scoring=scoring, texts=8))
    assert verify(tmp_path) == []
    algorithms = {
        each["quant_algo"]
        for each in json.loads((tmp_path / "quant_cfg.json").read_text())["quantized_layers"].values()
    }
    assert len(algorithms) > 1, algorithms


@pytest.mark.parametrize("qformat", [QFormat.FP8, QFormat.INT4_AWQ, QFormat.INT4_GPTQ], ids=str)
def test_a_run_on_cuda_that_was_stopped_goes_on_to_the_same_bytes(tmp_path, qformat):
    export(tmp_path / "whole", quant_spec(qformat))
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "stopped", quant_spec(qformat), progress=Stops("quantizing", 2))
    assert_same_files(tmp_path / "whole", export(tmp_path / "stopped", quant_spec(qformat)))


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_half_of_every_linear_is_zero_and_it_repeats(tmp_path, method):
    for name in ("one", "two"):
        sparsify(LLAMA, tmp_path / name, SparsitySettings(method=method), texts(), SPEC, device="cuda")
    found, again = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, tensor in found.items():
        assert torch.equal(tensor, again[name]), name
        if "_proj" in name:
            assert bool(((tensor.reshape(-1, 4) == 0).sum(dim=1) >= 2).all()), name


def test_a_model_pruned_on_cuda_keeps_what_the_cpu_keeps(tmp_path):
    """What is cut follows from sums over activations; the weights that stay are copied."""
    for device in ("cuda", "cpu"):
        prune_model(LLAMA, tmp_path / device, pruned_to("width", mlp=256), texts(), SPEC, device=device)
    ours, theirs = weights(tmp_path / "cuda"), weights(tmp_path / "cpu")
    assert {name: tensor.shape for name, tensor in ours.items()} == {k: v.shape for k, v in theirs.items()}
    for name, tensor in ours.items():
        kept = {tuple(row) for row in tensor.flatten(1).tolist()} if tensor.dim() > 1 else set()
        others = {tuple(row) for row in theirs[name].flatten(1).tolist()} if tensor.dim() > 1 else set()
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            assert len(kept & others) >= 0.95 * len(kept), name


def test_only_one_layer_is_on_the_gpu(tmp_path):
    """Memory does not grow with the number of layers: less is held than the weights of all."""
    held = []
    for name in ("libraries", "measured"):  # those of the GPU take memory at their first call, and keep it
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        export(tmp_path / name, quant_spec(QFormat.FP8))
        held.append(torch.cuda.max_memory_allocated() - before)
    assert held[1] < (LLAMA / "model.safetensors").stat().st_size, f"{held} bytes"


def test_the_reference_on_cuda_scores_as_on_the_cpu():
    """Float32 on both: what `eval.baseline=hugging_face` compares with does not depend on the machine."""
    rows = [((1, 5, 9, 200, 31), (7, 8)), ((1, 44), (3,))]
    found = [ReferenceModel(LLAMA, device).loglikelihood(rows, SilentProgress()) for device in ("cuda", "cpu")]
    for ours, theirs in zip(*found, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
        assert ours[1] == theirs[1]


@pytest.mark.parametrize("kv_cache", [KvFormat.FP8, KvFormat.INT8], ids=str)
@pytest.mark.parametrize("qformat", [QFormat.FP8, QFormat.INT8_SQ, QFormat.INT4_AWQ, QFormat.W4A8_AWQ], ids=str)
def test_modelopts_kernels_give_the_bytes_of_pytorchs_operators(tmp_path, monkeypatch, qformat, kv_cache):
    """A machine without nvcc has no kernels, and its artifacts have the same keys."""
    from modelopt.torch.quantization import extensions

    export(tmp_path / "kernels", quant_spec(qformat, kv_cache))
    for load in (extensions.get_cuda_ext, extensions.get_cuda_ext_fp8):
        monkeypatch.setattr(load, "extension", None, raising=False)
    assert_same_files(tmp_path / "kernels", export(tmp_path / "operators", quant_spec(qformat, kv_cache)))


def test_memory_that_runs_out_is_named(tmp_path):
    share = 2**20 * 24 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        with pytest.raises(
            ContinuableError, match=r"GPU has too little memory for quantizing.*calibration\.batch_size"
        ):
            export(tmp_path, quant_spec(QFormat.INT4_AWQ))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
