"""Checkpoints made tensor by tensor, without ModelOpt and Transformers, have the bytes that ModelOpt exports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.checkpoint.verify import verify
from pipelines.compress.quantizing import quantize
from pipelines.compress.specs import QuantSpec
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import PARTIAL
from pipelines.settings.model import BUNDLED
from tests.contract.compress.conftest import CALIBRATION, write_model
from tests.support.small_models import model_of
from tests.support.specs import quant_spec
from tests.support.stops import Stops
from tests.support.whole_model import assert_same_files, quantize_whole

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

from pipelines.compress import by_tensor  # noqa: E402

NONE = quant_spec(QFormat.NONE)
ROUNDED = quant_spec(QFormat.INT4_RTN, group_size=32)
UP = "model.layers.1.mlp.up_proj.weight"


def copied(model: Path, out: Path, spec: QuantSpec = NONE, **options) -> dict[str, object]:
    return quantize(model, out, spec, (), CALIBRATION, **options)


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("spec", [NONE, ROUNDED], ids=["none", "int4_rtn"])
@pytest.mark.parametrize("kind", ["llama", "tied", "gemma"])
def test_ranks_and_stages_are_those_of_modelopt(kind, spec, split, tmp_path) -> None:
    """Grouped heads of keys and values, and more ranks than such heads; a vocabulary that ranks do not divide."""
    model = write_model(tmp_path / "model", kind, vocab_size=201)
    tp_size, pp_size = split
    copied(model, tmp_path / "ours", spec, tp_size=tp_size, pp_size=pp_size)
    quantize_whole(model, tmp_path / "theirs", spec, (), CALIBRATION, tp_size=tp_size, pp_size=pp_size)
    if spec is ROUNDED and kind == "gemma" and pp_size > 1:  # ModelOpt then does not say that the head is not quantized
        path = tmp_path / "theirs" / "config.json"
        path.write_text(path.read_text().replace('"exclude_modules": []', '"exclude_modules": ["lm_head"]'))
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    assert verify(tmp_path / "ours") == []


def test_groups_of_zeros_are_rounded_as_by_modelopt(tmp_path, monkeypatch) -> None:
    """Each linear has another scale for them, also where q, k and v become one, and a weight is rounded in parts."""
    monkeypatch.setattr(by_tensor, "_AT_ONCE", 1000)
    model = write_model(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    for name in ("q_proj", "k_proj", "down_proj"):
        for key in (key for key in tensors if name in key):
            tensors[key][[0, 7, 33], 32:64] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    copied(model, tmp_path / "ours", ROUNDED)
    quantize_whole(model, tmp_path / "theirs", ROUNDED, (), CALIBRATION)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def test_a_linear_of_zeros_is_not_rounded(tmp_path) -> None:
    """It has no scale, and nothing is left behind."""
    model = write_model(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    tensors[UP].zero_()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"weights of the layer 'model\.layers\.1\.mlp\.up_proj' are all zero"):
        copied(model, tmp_path / "out", ROUNDED)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "qformat"),
    [
        ("mistral_with_window", QFormat.NONE),
        ("qwen2", QFormat.INT8_WO),
        ("qwen2_tied", QFormat.NONE),
        ("qwen2_yarn", QFormat.NONE),
        ("qwen", QFormat.INT4_WO),
        ("qwen2", QFormat.INT4_RTN),
        ("qwen", QFormat.INT4_RTN),
    ],
)
def test_every_family_is_that_of_modelopt(kind, qformat, tmp_path) -> None:
    """Biases of Qwen2 and head norms of Qwen3; what is quantized at build is in 16 bit until then."""
    model = model_of(tmp_path / "model", kind)
    spec = quant_spec(qformat, group_size=16)
    copied(model, tmp_path / "ours", spec, tp_size=2)
    quantize_whole(model, tmp_path / "theirs", spec, (), CALIBRATION, tp_size=2)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    ],
)
def test_biases_of_llama_are_those_of_modelopt(changes, tmp_path) -> None:
    """Of linears that are split by inputs, each rank has the whole bias."""
    model = write_model(tmp_path / "model", "llama", **changes)
    tensors = load_file(model / "model.safetensors")
    torch.manual_seed(1)
    random = {name: torch.randn_like(each) if name.endswith(".bias") else each for name, each in tensors.items()}
    save_file(random, model / "model.safetensors", metadata={"format": "pt"})
    copied(model, tmp_path / "ours", tp_size=2)
    quantize_whole(model, tmp_path / "theirs", NONE, (), CALIBRATION, tp_size=2)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("kind", ["llama", "gemma", "qwen2"])
def test_what_a_configuration_leaves_out_is_transformers_default(kind, tmp_path) -> None:
    """Transformers writes every key, but older folders and people do not."""
    model = model_of(tmp_path / "model", kind) if kind == "qwen2" else write_model(tmp_path / "model", kind)
    config = json.loads((model / "config.json").read_text())
    left_out = ("hidden_act", "hidden_activation", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings")
    shorter = {key: value for key, value in config.items() if key not in left_out}
    (model / "config.json").write_text(json.dumps(shorter))
    copied(model, tmp_path / "ours")
    quantize_whole(model, tmp_path / "theirs", NONE, (), CALIBRATION)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def test_neither_modelopt_nor_transformers_is_imported(tmp_path) -> None:
    """Their imports take five seconds of processor time, the copy of a small model none."""
    code = f"""
import sys
from pathlib import Path
from pipelines.compress.quantizing import quantize
from pipelines.domain.formats import QFormat
from pipelines.compress.config import CalibrationSettings
from tests.support.specs import quant_spec
for qformat in QFormat.NONE, QFormat.INT4_RTN:
    facts = quantize(
        Path({str(BUNDLED / "models" / "tiny_gemma")!r}), Path({str(tmp_path)!r}) / qformat, quant_spec(qformat), (),
        CalibrationSettings(),
    )
    assert facts["tool"] == {{}} and facts["calibration"]["sequences"] == 0 and facts["qformat"] == qformat
assert not {{"modelopt", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("spec", [NONE, ROUNDED], ids=["none", "int4_rtn"])
def test_a_stopped_copy_is_continued(spec, models, tmp_path) -> None:
    """After the last complete layer; the files are those of a run that was not stopped."""
    with pytest.raises(KeyboardInterrupt):
        copied(models["llama"], tmp_path / "out", spec, progress=Stops("copying layers", 1), tp_size=2, pp_size=2)
    assert (tmp_path / "out" / PARTIAL).is_dir()
    second = Stops("copying layers", -1)
    copied(models["llama"], tmp_path / "out", spec, progress=second, tp_size=2, pp_size=2)
    assert second.notes == ["continuing a run that was stopped: 1 of 2 layers are complete"]
    copied(models["llama"], tmp_path / "whole", spec, tp_size=2, pp_size=2)
    assert_same_files(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("kind", ["tied", "gemma"])
def test_a_head_that_contradicts_the_configuration_is_refused(kind, models, tmp_path) -> None:
    """A tied model with a head of its own, and nothing is left behind; an equal one does no harm."""
    model = write_model(tmp_path / "model", kind)
    tensors = load_file(model / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, model / "model.safetensors", metadata={"format": "pt"})
    copied(model, tmp_path / "equal")
    save_file(tensors | {"lm_head.weight": table + 1}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"its own 'lm_head\.weight', but .* tie_word_embeddings=true"):
        copied(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own", [True, False])
def test_gemma_without_a_tied_head_is_refused(own, tmp_path) -> None:
    """TensorRT-LLM's Gemma has no head of its own, so that one would be lost; without one, it is missing."""
    model = write_model(tmp_path / "model", "gemma")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(model / "model.safetensors")
    if own:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    words = r"its own 'lm_head\.weight', which TensorRT-LLM's Gemma" if own else r"lacks the tensor 'lm_head\.weight'"
    with pytest.raises(UserError, match=words):
        copied(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "model.layers.1.mlp.up_proj.weight",
            "drop",
            r"lacks the tensor 'model\.layers\.1\.mlp\.up_proj\.weight' \(1 ",
        ),
        (
            "model.layers.1.mlp.up_proj.weight",
            "shape",
            r"'model\.layers\.1\.mlp\.up_proj\.weight'.*\[255, 128\].*\[256, 128\]",
        ),
        (
            "model.layers.1.mlp.up_proj.weight",
            "nan",
            r"'model\.layers\.1\.mlp\.up_proj\.weight' .* contains NaN or infinity",
        ),
        ("model.norm.weight", "nan", r"'model\.norm\.weight' .* contains NaN or infinity"),
        ("model.embed_tokens.weight", "nan", r"'model\.embed_tokens\.weight' .* contains NaN or infinity"),
    ],
)
def test_a_broken_tensor_is_named(name, change, words, tmp_path) -> None:
    """And nothing is left behind."""
    model = write_model(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    if change == "drop":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][1:].contiguous()
    else:
        tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=words):
        copied(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
