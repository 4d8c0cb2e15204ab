"""Quantizing layer by layer gives the files of quantizing in one piece, byte for byte, also after kills."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.checkpoint.tensors import read_header
from pipelines.compress.quantizing import quantize
from pipelines.compress.specs import QuantSpec
from pipelines.domain.errors import UserError
from pipelines.domain.formats import UNIFORM, KvFormat, QFormat
from pipelines.domain.progress import PARTIAL
from pipelines.settings.model import BUNDLED
from tests.contract.compress.conftest import CALIBRATION, spec_of, write_model
from tests.support.stops import Stops
from tests.support.whole_model import assert_same_files, quantize_whole

modelopt = pytest.importorskip("modelopt")
torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402 - after the skips

from pipelines.compress import gptq, moments, one_layer  # noqa: E402 - after the skips
from pipelines.compress.config import CalibrationSettings  # noqa: E402
from pipelines.compress.model_folder import ModelWeights, TensorWriter, look_at  # noqa: E402
from pipelines.compress.moments import Moments  # noqa: E402
from tests.support.small_models import model_of, write_random  # noqa: E402
from tests.support.specs import quant_spec  # noqa: E402

OLD = tuple(map(int, modelopt.__version__.split(".")[:2])) < (0, 47)
NVFP4 = pytest.param(
    QFormat.NVFP4, marks=pytest.mark.skipif(OLD, reason="NVFP4 needs CUDA with nvidia-modelopt before 0.47")
)
EXPORTED = [qformat for qformat in UNIFORM if qformat is not QFormat.NVFP4]


def compare(model: Path, spec: QuantSpec, texts, folder: Path, calibration=CALIBRATION, **options) -> None:
    quantize(model, folder / "layers", spec, texts, calibration, **options)
    quantize_whole(model, folder / "whole", spec, texts, calibration, **options)
    assert_same_files(folder / "layers", folder / "whole")


CACHES = {"llama": KvFormat.INT8, "tied": KvFormat.FP8, "gemma": KvFormat.AUTO}
TWICE = (("tied", QFormat.NONE), ("tied", QFormat.FP8), ("tied", QFormat.W4A8_AWQ), ("tied", QFormat.INT4_RTN),
         ("gemma", QFormat.INT8_SQ), ("gemma", QFormat.INT4_AWQ), ("gemma", QFormat.INT4_GPTQ))  # fmt: skip
"""Llama has every format; each of the others meets some of the algorithms."""
IN_RANKS = (QFormat.FP8, QFormat.INT8_WO, QFormat.INT4_GPTQ, QFormat.INT4_RTN)
"""Of the others, test_compress_quantize.py divides a checkpoint that is equal here in one piece; INT4_WO is stored as
INT4_GPTQ."""


@pytest.mark.parametrize(
    ("kind", "qformat", "kv_cache"),
    [
        pytest.param(
            *(kind, qformat, kv_cache),
            marks=[] if kind == "llama" or (kind, qformat) in TWICE else [pytest.mark.thorough],
        )
        for kind, kv_cache in CACHES.items()
        for qformat in EXPORTED
    ],
)
def test_every_format_equals_the_whole_model(kind, qformat, kv_cache, models, texts, tmp_path) -> None:
    """An INT8 cache is rounded in AWQ's second pass, so its scales also prove that passes are kept apart."""
    compare(models[kind], spec_of(qformat, kv_cache), texts, tmp_path)


@pytest.mark.parametrize("qformat", [QFormat.INT4_AWQ, pytest.param(QFormat.W4A8_AWQ, marks=pytest.mark.thorough)])
def test_awq_quantizes_a_weight_once_for_each_strength(qformat, models, tmp_path, monkeypatch) -> None:
    """Not once for each batch; before, three batches took three times as many."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    words, counted = " ".join(f"w{number}" for number in range(20)), []
    real = TensorQuantizer._fake_quantize

    def count(self, inputs):
        counted.append(inputs.shape)
        return real(self, inputs)

    monkeypatch.setattr(TensorQuantizer, "_fake_quantize", count)
    taken = []
    for texts in ([words], [words, words[:30], words[:40]]):
        counted.clear()
        quantize(models["llama"], tmp_path / str(len(texts)), spec_of(qformat), texts, CALIBRATION)
        taken.append(sum(len(shape) == 2 for shape in counted))  # activations have three dimensions
    assert taken[0] == taken[1] > 0


def test_awq_compares_strengths_by_the_losses_of_modelopt(models, texts, tmp_path, monkeypatch) -> None:
    """Each batch counts the same, whatever its length. Only the loss of the best strength is finished."""
    from modelopt.torch.quantization import model_calib

    losses: list[list[float]] = []
    real = model_calib.apply_pre_quant_scale_and_smooth

    def record(linear, scale) -> None:
        losses.append(list(linear.awq_lite.loss.values()))
        real(linear, scale)

    monkeypatch.setattr(model_calib, "apply_pre_quant_scale_and_smooth", record)
    texts, calibration = [*texts, texts[0][:40], texts[0][:50]], CalibrationSettings(size=8, seq_len=24, batch_size=1)
    quantize(models["llama"], tmp_path / "ours", spec_of(QFormat.INT4_AWQ), texts, calibration)
    ours, losses[:] = torch.tensor(losses), []
    monkeypatch.setattr(moments.AwqSearch, "run", lambda _search, _model, run_pass: run_pass())
    quantize_whole(models["llama"], tmp_path / "theirs", spec_of(QFormat.INT4_AWQ), texts, calibration)
    theirs, finished = torch.tensor(losses), ours.isfinite()
    assert finished.sum(dim=1).tolist() == [1] * 14
    torch.testing.assert_close(ours[finished], theirs[finished], rtol=0.01, atol=0)
    torch.testing.assert_close(ours[finished], theirs.amin(dim=1), rtol=0.01, atol=0)


@pytest.mark.parametrize(("gap", "most"), [(0.5, 0.2), (0.02, 0.8), (0, 1)])
def test_the_least_mean_is_found_without_finishing_the_others(gap, most) -> None:
    """One mean has large values besides, one in each sample."""
    values, computed = torch.Generator().manual_seed(5), 0
    for _ in range(20):
        all_values = torch.rand(11, 1, generator=values) * gap + 1 + 0.1 * torch.randn(11, 1024, generator=values)
        all_values[0, :16] += 30 * gap
        taken: list[tuple[int, int]] = []

        def some(number: int, sample: torch.Tensor, of=all_values, taken=taken) -> torch.Tensor:
            taken.extend((number, index) for index in sample.tolist())
            return of[number, sample]

        samples = [torch.arange(first, 1024, 16) for first in range(16)]
        best, value = moments.least_mean(11, samples, some)
        assert best == all_values.mean(dim=1).argmin()
        assert value == pytest.approx(float(all_values[best].mean()), rel=0.1)
        assert len(taken) == len(set(taken))
        computed += len(taken)
    assert computed <= 20 * 11 * 1024 * most


def test_of_equal_means_the_first_is_the_least() -> None:
    values, samples = torch.tensor([[2.0], [1.0], [1.0]]).repeat(1, 6), [torch.arange(first, 6, 2) for first in (0, 1)]
    assert moments.least_mean(3, samples, lambda number, sample: values[number, sample]) == (1, 1.0)


@pytest.mark.parametrize(
    ("qformat", "kv_cache", "passes"),
    [
        (QFormat.INT4_RTN, KvFormat.AUTO, {}),
        (QFormat.INT4_RTN, KvFormat.FP8, {"k": [1, 1], "whole": [1, 0]}),
        (QFormat.FP8, KvFormat.AUTO, {"k": [1, 1], "whole": [1, 1]}),
        (QFormat.INT8_SQ, KvFormat.AUTO, {"k": [1, 1], "whole": [1, 1]}),
        (QFormat.INT4_AWQ, KvFormat.AUTO, {"k": [1, 1], "whole": [1, 1]}),
        (QFormat.INT4_AWQ, KvFormat.FP8, {"k": [2, 2], "whole": [2, 2]}),
        (QFormat.INT4_GPTQ, KvFormat.AUTO, {"k": [2, 1], "whole": [1, 0]}),
        (QFormat.INT4_GPTQ, KvFormat.INT8, {"k": [3, 2], "whole": [1, 0]}),
    ],
)
def test_a_layer_runs_only_for_what_the_checkpoint_depends_on(
    qformat, kv_cache, passes, models, texts, tmp_path, monkeypatch
) -> None:
    """Before, INT4 by rounding ran every text, GPTQ and AWQ ran them once more, and the last layer wrote inputs.

    A pass that ends within the layer is not `whole`.
    """
    seen: dict[str, list[int]] = {}
    real = one_layer.LayerSource.load

    def counted(part: str, number: int):
        def hook(*_):
            seen.setdefault(part, [0, 0])[number] += 1

        return hook

    def load(self, number):
        model = real(self, number)
        layer = model.model.layers[0]
        layer.register_forward_pre_hook(counted("k", number))
        layer.register_forward_hook(counted("whole", number))
        return model

    monkeypatch.setattr(one_layer.LayerSource, "load", load)
    one_batch = CalibrationSettings(size=1, seq_len=24)
    facts = quantize(models["llama"], tmp_path / "out", spec_of(qformat, kv_cache), texts, one_batch)
    assert seen == passes
    assert facts["calibration"]["sequences"] == bool(passes)


@pytest.mark.parametrize(
    "scales", ["max", pytest.param("mse", marks=pytest.mark.skipif(OLD, reason="ModelOpt has it since 0.47"))]
)
def test_weights_that_are_rounded_alone_read_neither_texts_nor_tokenizer(scales, models, tmp_path) -> None:
    model = shutil.copytree(models["llama"], tmp_path / "model")
    (model / "tokenizer.json").unlink()

    def texts():
        raise AssertionError("a text was read")
        yield

    spec = quant_spec(QFormat.INT4_RTN, group_size=64, int4_scales=scales)
    for layout in ("tensorrt_llm", "hugging_face"):
        facts = quantize(model, tmp_path / layout, spec, texts(), CALIBRATION, layout=layout)
        assert facts["calibration"] == {"sequences": 0, "tokens": 0, "seconds": 0.0}


def test_gptq_takes_hessians_in_parts_and_columns_of_zeros(texts, tmp_path, monkeypatch) -> None:
    """Columns of zeros change the Hessian of their linear, not that of others with the same input."""
    model = write_model(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    for name, columns in {"self_attn.q_proj": [3], "mlp.up_proj": [0, 127], "mlp.down_proj": [200]}.items():
        tensors[f"model.layers.1.{name}.weight"][:, columns] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    quantize(model, tmp_path / "one", spec_of(QFormat.INT4_GPTQ), texts, CALIBRATION)
    monkeypatch.setattr(moments, "_ROWS", 40)
    quantize(model, tmp_path / "parts", spec_of(QFormat.INT4_GPTQ), texts, CALIBRATION)
    for name in ("attention.qkv", "mlp.gate", "mlp.proj"):
        module = f"transformer.layers.1.{name}"
        one, parts = (dequantize(Checkpoint(tmp_path / each), module) for each in ("one", "parts"))
        assert (one == parts).mean() > 0.99
    assert not parts[:, 200].any()


def test_gptq_is_that_of_the_paper() -> None:
    """With the inverted Hessian, in float64 and in the order of its diagonal, the same weights are chosen."""
    torch.manual_seed(3)
    x_ni = torch.randn(600, 256) @ torch.randn(256, 256)
    hessian = Moments(256, torch.device("cpu"))
    hessian.add(x_ni[:200])
    hessian.add(x_ni[200:])
    weight_oi = torch.randn(64, 256)
    scales_go = (weight_oi.reshape(64, 4, 64).abs().amax(2) / 7).t()
    order_r = gptq.put_in_order(hessian_rr := hessian.take())
    factor_rr = gptq.error_factor(hessian_rr, torch.zeros(256, dtype=torch.bool))
    ours = gptq.rounded(weight_oi, factor_rr, scales_go, order_r) / scales_go.repeat_interleave(64, 0).t()
    first_i = (x_ni.t() @ x_ni).diagonal().argsort(descending=True)
    x_ni, weight_oi = x_ni[:, first_i], weight_oi[:, first_i]
    full_ii = (x_ni.t() @ x_ni).double()
    full_ii.diagonal().add_(gptq.DAMP * full_ii.diagonal().mean())
    inverse_ii = torch.linalg.cholesky(torch.linalg.inv(full_ii), upper=True)
    left_oi, scale_io = weight_oi.double(), scales_go.double().repeat_interleave(64, 0)[first_i]
    codes = torch.zeros(64, 256)
    for k in range(256):
        codes[:, k] = (left_oi[:, k] / scale_io[k]).round().clamp(-8, 7)
        error = (left_oi[:, k] - codes[:, k] * scale_io[k]) / inverse_ii[k, k]
        left_oi[:, k:] -= error[:, None] * inverse_ii[k, k:]
    assert (ours[:, first_i].round() == codes).float().mean() > 0.999


def test_gptq_rounds_inputs_with_large_moments_first() -> None:
    """Of a few large inputs the errors are compensated by the others, wherever they are."""
    torch.manual_seed(6)
    x_ni = torch.randn(400, 64) @ (torch.eye(64) + 0.3 * torch.randn(64, 64)) * torch.linspace(0.1, 5, 64)
    weight_oi = torch.randn(32, 64)
    scales_go = weight_oi.abs().amax(1)[None] / 7
    hessian = Moments(64, torch.device("cpu"))
    hessian.add(x_ni)
    order_r = gptq.put_in_order(hessian_rr := hessian.take())
    torch.testing.assert_close(hessian_rr, (x_ni.T @ x_ni)[order_r][:, order_r])
    errors = []
    for each_r in (order_r, order_r.flip(0)):
        factor_rr = gptq.error_factor((x_ni.T @ x_ni)[each_r][:, each_r], torch.zeros(64, dtype=torch.bool))
        rounded_oi = gptq.rounded(weight_oi, factor_rr, scales_go, each_r)
        errors.append(float(((rounded_oi - weight_oi) @ x_ni.T).square().sum()))
    assert errors[0] < 0.5 * errors[1]


def test_moments_tell_the_error_of_outputs(monkeypatch) -> None:
    monkeypatch.setattr(moments, "_ROWS", 40)
    torch.manual_seed(4)
    monkeypatch.setattr(moments, "_FEW", 15)
    error_oi, sum_of_means = torch.randn(8, 100), 0
    of_means = Moments(100, torch.device("cpu"), means=True)
    for tokens in (30, 15, 50, 3):  # the first two are kept as they are
        batch = torch.randn(1, tokens, 100)
        of_means.add(batch)
        sum_of_means += (batch @ error_oi.t()).square().sum(dim=(0, 1)) / tokens
        torch.testing.assert_close(of_means.errors(error_oi), sum_of_means)


def test_gptq_leaves_the_zeros_of_a_sparse_model() -> None:
    """Errors of other weights would fill them: then the checkpoint is no longer 2:4 sparse."""
    torch.manual_seed(1)
    weight_oi, inputs_ni = torch.randn(16, 64), torch.randn(200, 8) @ torch.randn(8, 64)
    scales_go = weight_oi.abs().amax(1)[None] / 7
    factor_rr = gptq.error_factor((inputs_ni.T @ inputs_ni).contiguous(), torch.zeros(64, dtype=torch.bool))
    weight_oi.reshape(-1, 4)[:, ::2] = 0
    rounded_oi = gptq.rounded(weight_oi, factor_rr, scales_go, torch.arange(64))
    assert not rounded_oi.reshape(-1, 4)[:, ::2].any()
    nearest_oi = (weight_oi / scales_go.t()).round() * scales_go.t()
    errors = [float(((each - weight_oi) @ inputs_ni.T).square().sum()) for each in (rounded_oi, nearest_oi)]
    assert errors[0] < 0.7 * errors[1]


def test_gptq_rounds_to_nearest_where_a_hessian_is_not_positive_definite_and_says_so(monkeypatch) -> None:
    linears = {name: torch.nn.Linear(64, 2, bias=False) for name in ("whole", "broken")}
    weight_oi = torch.linspace(-7, 7, 128).reshape(2, 64)
    hessians = [Moments(64, torch.device("cpu")) for _ in linears]
    for (name, linear), hessian, sign in zip(linears.items(), hessians, (1, -1), strict=True):
        linear.weight.data, hessian.linears = weight_oi.clone(), {name: None}
        monkeypatch.setattr(hessian, "take", lambda sign=sign: sign * torch.eye(64))
    assert gptq.round_linears(linears, hessians, lambda _: torch.ones(1, 2)) == ["broken"]
    assert linears["broken"].weight.equal(weight_oi.round())


@pytest.mark.skipif(OLD, reason="nvidia-modelopt before 0.47 searches no scales")
@pytest.mark.parametrize(
    ("kind", "qformat"), [("llama", QFormat.INT4_RTN), ("gemma", QFormat.INT4_RTN), ("llama", QFormat.INT4_GPTQ)]
)
def test_scales_with_the_least_error_equal_those_of_the_whole_model(kind, qformat, models, texts, tmp_path) -> None:
    """And they are smaller than those from the largest weights, because a few large weights are cut."""
    spec = quant_spec(qformat, group_size=64, int4_scales="mse")
    compare(models[kind], spec, texts, tmp_path)
    quantize(models[kind], tmp_path / "max", spec_of(qformat), texts, CALIBRATION)
    name = "transformer.layers.1.mlp.fc.weights_scaling_factor"
    found, largest = (Checkpoint(tmp_path / each).tensor(name) for each in ("layers", "max"))
    assert (found < largest).mean() > 0.5


def test_gptq_moves_weights_and_has_no_scales_for_inputs(models, texts, tmp_path) -> None:
    """The exporter claims such scales of every grouped INT4 weight."""
    for qformat in (QFormat.INT4_GPTQ, QFormat.INT4_RTN):
        facts = quantize(models["llama"], tmp_path / qformat, spec_of(qformat), texts, CALIBRATION)
        assert facts["qformat"] == qformat
        assert not Checkpoint(tmp_path / qformat).config.quantization.pre_quant_scale
    name = "transformer.layers.1.mlp.proj"
    solved, rounded = (dequantize(Checkpoint(tmp_path / each), name) for each in ("int4_gptq", "int4_rtn"))
    source = ModelWeights(look_at(models["llama"])).tensor("model.layers.1.mlp.down_proj.weight", torch.float32).numpy()
    assert abs(solved - source).sum() > abs(rounded - source).sum()


@pytest.mark.parametrize("qformat", [NVFP4])
def test_nvfp4_equals_the_whole_model(qformat, models, texts, tmp_path) -> None:
    compare(models["llama"], spec_of(qformat), texts, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "qformat"),
    [
        ("tiny_llama", QFormat.FP8),
        ("tiny_llama", QFormat.INT8_SQ),
        ("tiny_llama", QFormat.INT4_AWQ),
        ("tiny_gemma", QFormat.W4A8_AWQ),
        ("tiny_gemma", QFormat.INT4_GPTQ),
    ],
)
def test_every_calibration_of_a_bundled_model_equals_the_whole_model(name, qformat, tmp_path) -> None:
    """Trained weights with planted outliers; texts of three lengths."""
    texts = [f"The river of Githbrel is number {i}. " * (1 + i % 3) for i in range(8)]
    calibration = CalibrationSettings(size=8, batch_size=2)
    compare(BUNDLED / "models" / name, quant_spec(qformat), texts, tmp_path, calibration)


@pytest.mark.parametrize(
    "qformat",
    [pytest.param(each, marks=[] if each in IN_RANKS else [pytest.mark.thorough]) for each in EXPORTED],
)
def test_every_rank_equals_that_of_the_whole_model(qformat, models, texts, tmp_path) -> None:
    compare(models["llama"], spec_of(qformat), texts, tmp_path, tp_size=2, pp_size=2)


@pytest.mark.parametrize(("qformat", "split"), [(QFormat.INT8_SQ, (2, 1)), (QFormat.INT4_AWQ, (1, 2))])
def test_ranks_and_stages_alone_equal_those_of_the_whole_model(qformat, split, models, texts, tmp_path) -> None:
    compare(models["llama"], spec_of(qformat), texts, tmp_path, tp_size=split[0], pp_size=split[1])


@pytest.mark.parametrize("kind", ["tied", "gemma"])
def test_a_vocabulary_that_ranks_do_not_divide_is_padded_alike(kind, texts, tmp_path) -> None:
    model = write_model(tmp_path / "model", kind, vocab_size=201)
    compare(model, spec_of(QFormat.INT4_AWQ), texts, tmp_path, tp_size=2)


@pytest.mark.parametrize(
    ("kind", "qformat", "kv_cache"),
    [
        ("llama", QFormat.FP8, KvFormat.FP8),
        ("llama", QFormat.W4A8_AWQ, KvFormat.FP8),
        ("tied", QFormat.INT4_AWQ, KvFormat.AUTO),
        pytest.param("tied", *NVFP4.values, KvFormat.AUTO, marks=NVFP4.marks),
        pytest.param("llama", QFormat.INT4_AWQ, KvFormat.FP8, marks=pytest.mark.thorough),
        pytest.param("llama", *NVFP4.values, KvFormat.FP8, marks=[*NVFP4.marks, pytest.mark.thorough]),
        pytest.param("tied", QFormat.FP8, KvFormat.AUTO, marks=pytest.mark.thorough),
        pytest.param("tied", QFormat.W4A8_AWQ, KvFormat.AUTO, marks=pytest.mark.thorough),
    ],
)
def test_unified_folders_equal_those_of_the_whole_model(qformat, kind, kv_cache, models, texts, tmp_path) -> None:
    compare(models[kind], spec_of(qformat, kv_cache), texts, tmp_path, layout="hugging_face")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "qformat"),
    [
        ("mistral", QFormat.FP8),
        ("qwen2", QFormat.INT4_AWQ),
        ("qwen2_tied", QFormat.FP8),
        ("qwen", QFormat.FP8),
        ("qwen", QFormat.INT4_AWQ),
    ],
)
def test_other_families_equal_the_whole_model(kind, qformat, texts, tmp_path) -> None:
    model = model_of(tmp_path / "model", kind)
    compare(model, quant_spec(qformat), texts, tmp_path, tp_size=2)


@pytest.mark.thorough
@pytest.mark.skipif(OLD, reason="measured with nvidia-modelopt 0.47")
@pytest.mark.parametrize(
    ("kind", "qformat"),
    [
        ("gemma3", QFormat.NONE),
        ("gemma3", QFormat.INT4_AWQ),
        ("phi3", QFormat.FP8),
        ("phi3", QFormat.INT4_AWQ),
        ("mixtral", QFormat.FP8),
        ("qwen3_moe", QFormat.FP8),
    ],
)
def test_families_of_the_llm_api_alone_equal_the_whole_model(kind, qformat, texts, tmp_path) -> None:
    """Gemma 3 has layers of two kinds, with a rotary embedding each; mixtures are quantized in one piece."""
    model = write_random(tmp_path / "model", kind)
    compare(model, quant_spec(qformat), texts, tmp_path, layout="hugging_face")


def test_a_stopped_run_is_continued_only_with_the_same_settings(models, texts, tmp_path) -> None:
    """With another format it begins anew, and is not mixed."""
    with pytest.raises(KeyboardInterrupt):
        quantize(
            models["llama"], tmp_path / "out", spec_of(QFormat.FP8), texts, CALIBRATION, progress=Stops("quantizing", 1)
        )
    assert (tmp_path / "out" / PARTIAL).is_dir()
    same, other = Stops("quantizing", -1), Stops("quantizing", -1)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    quantize(models["llama"], tmp_path / "out", spec_of(QFormat.FP8), texts, CALIBRATION, progress=same)
    quantize(models["llama"], tmp_path / "copy", spec_of(QFormat.INT4_AWQ), texts, CALIBRATION, progress=other)
    assert same.notes == ["continuing a run that was stopped: 1 of 2 layers are complete"]
    assert other.notes == []
    for name, qformat in (("out", QFormat.FP8), ("copy", QFormat.INT4_AWQ)):
        quantize_whole(models["llama"], tmp_path / f"whole_{name}", spec_of(qformat), texts, CALIBRATION)
        assert_same_files(tmp_path / name, tmp_path / f"whole_{name}")


def test_a_disk_without_room_for_the_checkpoint_is_named(models, texts, tmp_path, monkeypatch) -> None:
    """It is known after the first layer, when the files are created, and nothing is left behind."""

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"rank0\.safetensors needs .* KiB, and the disk has .* left"):
        quantize(models["llama"], tmp_path / "out", spec_of(QFormat.FP8), texts, CALIBRATION)
    assert not (tmp_path / "out").exists()


def test_a_shard_that_ends_early_while_it_is_read_is_named(models, tmp_path) -> None:
    """A file that shrinks after its header was checked, as when a download replaces it."""
    folder = tmp_path / "model"
    shutil.copytree(models["llama"], folder)
    weights = ModelWeights(look_at(folder))
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    last = max(read_header(models["llama"] / "model.safetensors").items(), key=lambda item: item[1].begin)[0]
    with pytest.raises(UserError, match=rf"model\.safetensors ends early: '{last}' needs"):
        weights.tensor(last, torch.bfloat16)


def test_a_tensor_of_another_shape_is_named(texts, tmp_path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(UserError, match=r"'model\.layers\.0\.mlp\.gate_proj\.weight'.*\[256, 128\].*\[128, 128\]"):
        quantize(folder, tmp_path / "out", spec_of(QFormat.FP8), texts, CALIBRATION)


def test_written_files_are_those_of_the_safetensors_library(tmp_path) -> None:
    """In the order of types that exports contain, with metadata, scalars and an empty tensor."""
    from safetensors.torch import save_file

    types = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int64]
    tensors = {f"{i}.{dtype}": torch.ones(i, 3).to(dtype) for i, dtype in enumerate(types)} | {"s": torch.ones(())}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "theirs.safetensors")
    layout = {name: header[name].spec for name in tensors}
    writer = TensorWriter.create(tmp_path, {"ours.safetensors": layout}, {"format": "pt"})
    for name, tensor in tensors.items():
        writer.write("ours.safetensors", name, iter([tensor]))
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_a_large_folder_is_sharded(models, texts, tmp_path, monkeypatch) -> None:
    """Shards of 100 kB hold the tensors of the one file, and the index names them all."""
    from safetensors.torch import load_file

    from pipelines.compress import checkpoint_layout

    spec, options = spec_of(QFormat.NONE), {"layout": "hugging_face"}
    quantize(models["llama"], tmp_path / "one", spec, texts, CALIBRATION, **options)
    monkeypatch.setattr(checkpoint_layout._shards, "__defaults__", (100_000,))
    quantize(models["llama"], tmp_path / "many", spec, texts, CALIBRATION, **options)
    files = sorted((tmp_path / "many").glob("model-*-of-*.safetensors"))
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    whole = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert found.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
