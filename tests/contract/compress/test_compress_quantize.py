"""Exports of tiny models obey the same rules as the measured ones, compute what ModelOpt simulates, and repeat."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.checkpoint.tensors import TensorFile
from pipelines.checkpoint.verify import verify
from pipelines.compress.config import CalibrationSettings
from pipelines.compress.quantizing import quantize
from pipelines.compress.simulating import fake_quantized_model
from pipelines.domain.errors import ContinuableError, UserError
from pipelines.domain.formats import FORMATS, UNIFORM, KvFormat, QFormat
from tests.contract.compress.conftest import CALIBRATION, spec_of, write_model
from tests.support.specs import quant_spec
from tests.support.stops import Stops

modelopt = pytest.importorskip("modelopt")
torch = pytest.importorskip("torch")

OLD = tuple(map(int, modelopt.__version__.split(".")[:2])) < (0, 47)
NVFP4 = pytest.param(
    QFormat.NVFP4, marks=pytest.mark.skipif(OLD, reason="NVFP4 needs CUDA with nvidia-modelopt before 0.47")
)
NEW = pytest.mark.skipif(OLD, reason="nvidia-modelopt before 0.47 has no GPTQ")
EXPORTED = [
    pytest.param(qformat, marks=NEW) if FORMATS[qformat].sequential else qformat
    for qformat in UNIFORM
    if qformat is not QFormat.NVFP4
]
SIMULATED = [QFormat.FP8, QFormat.INT8_SQ, QFormat.INT4_AWQ, QFormat.W4A8_AWQ]


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("tied", "gemma"))]
)
@pytest.mark.parametrize("qformat", EXPORTED)
def test_every_format_exports_a_sound_checkpoint(kind, qformat, models, texts, tmp_path) -> None:
    """Names, dtypes, shapes and values follow the rules the measured exports follow."""
    facts = quantize(models[kind], tmp_path, spec_of(qformat), texts, CALIBRATION)
    config = json.loads((tmp_path / "config.json").read_text())
    assert verify(tmp_path) == []
    assert config["quantization"]["quant_algo"] == FORMATS[qformat].quant_algo
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "rank0.safetensors"}
    assert facts["calibration"]["sequences"] == (4 if FORMATS[qformat].reads_texts else 0)
    json.dumps(facts)


@pytest.mark.parametrize("qformat", [NVFP4])
def test_nvfp4_exports_a_sound_llama(qformat, models, texts, tmp_path) -> None:
    """NVFP4 is for Llama, in groups of 16."""
    quantize(models["llama"], tmp_path, spec_of(qformat), texts, CALIBRATION)
    assert verify(tmp_path) == []


@pytest.mark.skipif(OLD, reason="ModelOpt has it since 0.47")
def test_headroom_changes_the_scales_of_activations_alone(models, texts, tmp_path) -> None:
    for way in ("max", "headroom"):
        spec = quant_spec(QFormat.NVFP4, fp4_inputs=way)
        quantize(models["llama"], tmp_path / way, spec, texts, CALIBRATION)
    assert verify(tmp_path / "headroom") == []
    usual, found = (TensorFile(tmp_path / way / "rank0.safetensors") for way in ("max", "headroom"))
    changed = {name for name in usual if usual[name].tobytes() != found[name].tobytes()}
    assert changed == {name for name in usual if name.endswith("activation_scaling_factor")}


@pytest.mark.skipif(not OLD or torch.cuda.is_available(), reason="this ModelOpt exports NVFP4 here")
def test_nvfp4_without_cuda_is_refused_before_anything_is_loaded(models, tmp_path) -> None:
    """The refusal comes before the texts are read."""
    with pytest.raises(UserError, match=r"nvfp4 with nvidia-modelopt 0\.37.* needs a CUDA device"):
        quantize(models["llama"], tmp_path / "out", spec_of(QFormat.NVFP4), iter(()), CALIBRATION)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("qformat", "kv_cache"),
    [
        (QFormat.NONE, KvFormat.INT8),
        (QFormat.FP8, KvFormat.FP8),
        (QFormat.INT8_WO, KvFormat.INT8),
        pytest.param(QFormat.NONE, KvFormat.FP8, marks=pytest.mark.thorough),
        pytest.param(QFormat.FP8, KvFormat.INT8, marks=pytest.mark.thorough),
        pytest.param(QFormat.INT8_WO, KvFormat.FP8, marks=pytest.mark.thorough),
    ],
)
def test_a_quantized_kv_cache_is_really_in_the_checkpoint(qformat, kv_cache, models, texts, tmp_path) -> None:
    """The pattern that TensorRT-LLM's own script uses loses INT8 without a word; ours must not."""
    quantize(models["gemma"], tmp_path, spec_of(qformat, kv_cache), texts, CALIBRATION)
    checkpoint = Checkpoint(tmp_path)
    assert verify(tmp_path) == []
    assert checkpoint.config.kv_format is kv_cache
    scale = checkpoint.tensor("transformer.layers.1.attention.kv_cache_scaling_factor")
    assert scale.item() >= 1.0 if kv_cache is KvFormat.FP8 else 0 < scale.item() < 1.0


@pytest.mark.parametrize(
    ("qformat", "tp_size", "pp_size"),
    [
        (QFormat.NONE, 1, 2),
        pytest.param(QFormat.NONE, 2, 1, marks=pytest.mark.thorough),
        (QFormat.FP8, 2, 2),
        (QFormat.INT8_SQ, 2, 1),
        (QFormat.INT4_AWQ, 2, 2),
        (QFormat.W4A8_AWQ, 2, 1),
        pytest.param(QFormat.W4A8_AWQ, 1, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_split_checkpoint_holds_the_same_model(qformat, tp_size, pp_size, models, texts, tmp_path) -> None:
    """Merged again, two or four ranks hold the tensors of one."""
    for name, split in (("one", (1, 1)), ("split", (tp_size, pp_size))):
        quantize(
            models["llama"], tmp_path / name, spec_of(qformat), texts, CALIBRATION, tp_size=split[0], pp_size=split[1]
        )
    assert verify(tmp_path / "split") == []
    one, split_up = Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "split")
    assert set(one) == set(split_up)
    for name in one:
        np.testing.assert_array_equal(one.tensor(name), split_up.tensor(name), err_msg=name)


def test_more_ranks_than_kv_heads_repeat_the_head(models, texts, tmp_path) -> None:
    """Gemma's one KV head is on both ranks."""
    quantize(models["gemma"], tmp_path, spec_of(QFormat.INT4_AWQ), texts, CALIBRATION, tp_size=2)
    assert verify(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "qformat"),
    [
        pytest.param(kind, qformat, marks=[] if (number + (kind == "gemma")) % 2 else [pytest.mark.thorough])
        for kind in ("llama", "gemma")
        for number, qformat in enumerate(SIMULATED)
    ],
)
def test_the_checkpoint_holds_the_weights_that_modelopt_simulates(kind, qformat, models, texts, tmp_path) -> None:
    """Dequantized weights equal the simulated ones.

    The simulation divides and rounds in 16 bit, the export in 32: a weight within a 16-bit rounding of the middle
    between two codes may take the other one. That is one step at most, and rare: such a rounding is 2^-9 of a
    weight; W4A8 rounds to FP8 as well, whose steps are 2^-4 of it, so a few in a hundred fall on the other side.
    """
    rare = 0.05 if qformat is QFormat.W4A8_AWQ else 0.002
    quantize(models[kind], tmp_path, spec_of(qformat), texts, CALIBRATION)
    model = fake_quantized_model(models[kind], spec_of(qformat), texts, CALIBRATION)
    checkpoint, layer = Checkpoint(tmp_path), model.model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    pairs = {
        "attention.qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
        "attention.dense": [attention.o_proj],
        "mlp.fc": [mlp.gate_proj],
        "mlp.gate": [mlp.up_proj],
        "mlp.proj": [mlp.down_proj],
    }
    for name, linears in pairs.items():
        ours = dequantize(checkpoint, f"transformer.layers.1.{name}")
        simulated = torch.cat([linear.weight_quantizer(linear.weight) for linear in linears]).float().numpy()
        difference, largest = np.abs(ours - simulated), np.abs(simulated).max()
        assert (difference > 2**-7 * largest).mean() < rare, name
        assert difference.max() < largest / 6, name  # a step of INT4 is a seventh of the largest


def test_a_simulated_model_runs(models, texts) -> None:
    """It gives finite logits that differ from the 16-bit ones, but not by much."""
    plain = fake_quantized_model(models["llama"], spec_of(QFormat.NONE), texts, CALIBRATION)
    fp8 = fake_quantized_model(models["llama"], spec_of(QFormat.FP8, KvFormat.FP8), texts, CALIBRATION)
    ids = torch.arange(12)[None]
    before, after = plain(ids).logits.float(), fp8(ids).logits.float()
    assert not torch.equal(before, after)
    assert torch.nn.functional.cosine_similarity(before, after, dim=-1).min() > 0.95


@pytest.mark.parametrize("qformat", [QFormat.FP8, QFormat.W4A8_AWQ])
def test_the_same_inputs_give_the_same_bytes(qformat, models, texts, tmp_path) -> None:
    """Every file of two exports is bit-identical, whatever the random state before."""
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        quantize(models["llama"], tmp_path / name, spec_of(qformat, KvFormat.FP8), texts, CALIBRATION)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_rope_of_either_transformers_style_arrives(models, texts, tmp_path) -> None:
    """Theta and Llama-3 scaling reach the checkpoint from rope_parameters as well as from rope_scaling."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    for style in ("old", "new"):
        folder = tmp_path / style
        folder.mkdir()
        for path in models["llama"].iterdir():
            (folder / path.name).symlink_to(path)
        config = json.loads((folder / "config.json").read_text())
        config.pop("rope_parameters", None), config.pop("rope_theta", None)
        block = {"rope_parameters": scaling | {"rope_theta": 5e5}}
        config |= block if style == "new" else {"rope_theta": 5e5, "rope_scaling": scaling}
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
        quantize(folder, tmp_path / f"out_{style}", spec_of(QFormat.FP8), texts, CALIBRATION)
    old, new = (json.loads((tmp_path / f"out_{style}" / "config.json").read_text()) for style in ("old", "new"))
    assert old["rotary_base"] == new["rotary_base"] == 500000.0
    assert old["rotary_scaling"] == new["rotary_scaling"] == scaling
    one, other = (tmp_path / f"out_{style}" / "rank0.safetensors" for style in ("old", "new"))
    assert one.read_bytes() == other.read_bytes()


def test_a_nan_weight_stops_with_its_name(tmp_path, texts) -> None:
    """The tensor is named, and nothing is written."""
    folder = write_model(tmp_path / "broken", "llama")
    change_weight(folder, "model.layers.1.mlp.up_proj.weight", slice(3, 4), slice(5, 6), float("nan"))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        quantize(folder, tmp_path / "out", spec_of(QFormat.FP8), texts, CALIBRATION)
    assert not (tmp_path / "out").exists()


TOO_LITTLE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.50 MiB is "
    "free. Including non-PyTorch memory, this process has 500.00 MiB memory in use. Of it 1 MiB is free."
)


def test_a_gpu_without_memory_is_named_and_its_layers_are_kept(models, texts, tmp_path, monkeypatch) -> None:
    """PyTorch's error is raised in the second layer; the same command goes on from there."""
    from pipelines.compress import modelopt_door

    real, calls = modelopt_door.simulate, []

    def simulate(*given):
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError(TOO_LITTLE)
        return real(*given)

    monkeypatch.setattr(modelopt_door, "simulate", simulate)
    wanted = (
        r"^The GPU has too little memory for quantizing: CUDA out of memory\. Tried to allocate 2\.00 GiB\. GPU 0 "
        r"has a total capacity of 79\.11 GiB of which 3\.50 MiB is free\. Free it .*calibration\.batch_size"
    )
    with pytest.raises(ContinuableError, match=wanted) as refused:
        quantize(models["llama"], tmp_path / "out", spec_of(QFormat.FP8), texts, CALIBRATION)
    assert "Including" not in str(refused.value)
    quantize(models["llama"], tmp_path / "out", spec_of(QFormat.FP8), texts, CALIBRATION)
    assert len(calls) == 3
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("qformats", "kv_cache", "wanted"),
    [
        ([QFormat.FP8], KvFormat.AUTO, ["fp8"]),
        ([QFormat.INT4_AWQ], KvFormat.AUTO, ["int"]),
        ([QFormat.W4A8_AWQ], KvFormat.AUTO, ["int", "fp8"]),
        ([QFormat.NONE], KvFormat.INT8, ["int"]),
        ([QFormat.INT8_WO], KvFormat.FP8, ["fp8"]),
        ([QFormat.FP8, QFormat.INT4_AWQ], KvFormat.AUTO, ["int", "fp8"]),
        ([QFormat.NVFP4], KvFormat.AUTO, []),
    ],
)
def test_kernels_are_loaded_for_the_formats_that_have_them(qformats, kv_cache, wanted, monkeypatch) -> None:
    """They are compiled at their first use, which the display says; without a compiler the note says so."""
    from modelopt.torch.quantization import extensions

    from pipelines.compress import modelopt_door

    asked: list[str] = []
    monkeypatch.setattr(extensions, "get_cuda_ext", lambda: asked.append("int"))
    monkeypatch.setattr(extensions, "get_cuda_ext_fp8", lambda: asked.append("fp8"))
    seen = Stops("", -1)
    modelopt_door.load_kernels(qformats, kv_cache, seen)
    assert asked == wanted
    assert bool(seen.notes) == bool(wanted)
    assert all("could not be compiled here" in note for note in seen.notes)


@pytest.mark.parametrize("qformat", [QFormat.FP8, QFormat.INT8_SQ, QFormat.INT4_AWQ])
def test_an_overflow_while_calibrating_stops_with_the_layer(qformat, tmp_path, texts) -> None:
    """Weights that are fine by themselves but overflow float16 in layer 1."""
    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path / "hot", "llama")
    tensors = load_file(folder / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"] *= 20000
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layer 'model\.layers\.1\.mlp\."):
        quantize(folder, tmp_path / "out", spec_of(qformat, dtype="float16"), texts, CALIBRATION)


def change_weight(folder: Path, name: str, rows: slice, columns: slice, value: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name][rows, columns] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "qformat", [QFormat.INT8_SQ, pytest.param(QFormat.INT4_AWQ, marks=pytest.mark.thorough), QFormat.W4A8_AWQ]
)
def test_a_dead_channel_stays_zero(qformat, tmp_path, texts) -> None:
    """An all-zero row has no scale of its own; any positive one is exact."""
    folder = write_model(tmp_path / "dead", "llama")
    change_weight(folder, "model.layers.0.self_attn.o_proj.weight", slice(6, 8), slice(None), 0.0)
    quantize(folder, tmp_path / "out", spec_of(qformat), texts, CALIBRATION)
    assert verify(tmp_path / "out") == []
    assert not dequantize(Checkpoint(tmp_path / "out"), "transformer.layers.0.attention.dense")[6:8].any()


def test_a_layer_of_zeros_is_named(tmp_path, texts) -> None:
    folder = write_model(tmp_path / "zero", "llama")
    change_weight(folder, "model.layers.0.mlp.down_proj.weight", slice(None), slice(None), 0.0)
    with pytest.raises(UserError, match=r"weights of the layer 'model\.layers\.0\.mlp\.down_proj' are all zero"):
        quantize(folder, tmp_path / "out", spec_of(QFormat.FP8), texts, CALIBRATION)


def test_a_cut_file_is_named(models, tmp_path, texts) -> None:
    """A download that stopped half way is found by its header, before loading."""
    for path in models["llama"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged or truncated"):
        quantize(tmp_path, tmp_path / "out", spec_of(QFormat.NONE), texts, CALIBRATION)


def test_nothing_reaches_the_terminal_but_our_progress(models, texts, tmp_path, capsys, recwarn) -> None:
    """ModelOpt and Transformers print a lot; all of it goes to the log."""
    from pipelines.domain.progress import SilentProgress

    class Loud(SilentProgress):
        stream = sys.stdout  # as a progress display has that of when it was made

        def task(self, title, total, unit=""):
            self.stream.write(f"<{title}>\n")
            return super().task(title, total, unit)

    quantize(models["llama"], tmp_path, spec_of(QFormat.INT4_AWQ), texts, CALIBRATION, progress=Loud())
    out, err = capsys.readouterr()
    assert out.split("\n") == [
        "<quantizing>",
        "<copying embedding and head>",
        "",
    ]
    assert err == ""


def test_the_batch_size_does_not_change_what_is_measured(models, texts, tmp_path) -> None:
    """No padding enters the statistics: activation scales agree to a rounding."""
    for size in (1, 4):
        spec = CalibrationSettings(size=12, seq_len=16, batch_size=size)
        quantize(models["llama"], tmp_path / str(size), spec_of(QFormat.FP8), texts, spec)
    one, four = Checkpoint(tmp_path / "1"), Checkpoint(tmp_path / "4")
    for name in one:
        if name.endswith("activation_scaling_factor"):
            np.testing.assert_allclose(one.tensor(name), four.tensor(name), rtol=0.02)


def test_an_unknown_model_folder_is_named(tmp_path: Path, texts) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        quantize(tmp_path, tmp_path / "out", spec_of(QFormat.NONE), texts, CALIBRATION)


def test_a_configuration_that_transformers_refuses_is_named(texts, tmp_path) -> None:
    config = write_model(tmp_path / "model", "llama") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"initializer_range": "0.02"}))
    with pytest.raises(UserError, match=r"Transformers .* refuses .*config\.json: .*initializer_range"):
        quantize(config.parent, tmp_path / "out", spec_of(QFormat.FP8), texts, CALIBRATION)
