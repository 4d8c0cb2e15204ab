"""Unified Hugging Face checkpoints of tiny models: sound, repeatable, and computing what ModelOpt simulates."""

import json
import shutil
from pathlib import Path

import pytest

from pipelines.checkpoint.unified import verify_unified
from pipelines.compress.config import KvCacheSettings
from pipelines.compress.quantizing import quantize
from pipelines.compress.simulating import fake_quantized_model
from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.domain.progress import SILENT, SilentProgress
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.stages.unified import ConfigureLlm
from tests.contract.compress.conftest import CALIBRATION
from tests.support.small_models import model_of, write_random
from tests.support.specs import mix_spec, quant_spec
from triton_repo.config import TritonSettings

modelopt = pytest.importorskip("modelopt")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

OLD = tuple(map(int, modelopt.__version__.split(".")[:2])) < (0, 47)
TAKEN = [
    QFormat.FP8,
    QFormat.INT4_AWQ,
    QFormat.W4A8_AWQ,
    pytest.param(
        QFormat.NVFP4, marks=pytest.mark.skipif(OLD, reason="NVFP4 needs CUDA with nvidia-modelopt before 0.47")
    ),
]
GROUP = 64


def export(model: Path, out: Path, qformat: QFormat, texts, kv_cache: KvFormat = KvFormat.AUTO) -> dict:
    return quantize(
        model, out, quant_spec(qformat, kv_cache, group_size=GROUP), texts, CALIBRATION, layout="hugging_face"
    )


@pytest.mark.parametrize("kind", ["llama", pytest.param("tied", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("qformat", TAKEN)
def test_every_format_exports_a_sound_folder(qformat, kind, models, texts, tmp_path) -> None:
    """Names, dtypes and shapes follow the measured rules; the quantization stands in both places readers look."""
    facts = export(models[kind], tmp_path, qformat, texts, KvFormat.FP8)
    block = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert verify_unified(tmp_path) == []
    assert (block["quant_algo"], block["kv_cache_quant_algo"]) == (FORMATS[qformat].quant_algo, "FP8")
    assert config["quantization_config"]["quant_algo"] == FORMATS[qformat].quant_algo
    assert (facts["qformat"], facts["kv_cache"]) == (qformat.value, "fp8")
    assert facts["bits_per_weight"] < 9


def test_the_same_inputs_give_the_same_bytes(models, texts, tmp_path) -> None:
    for name in ("one", "two"):
        export(models["llama"], tmp_path / name, QFormat.INT4_AWQ, texts)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_rope_is_understood_by_either_transformers(models, texts, tmp_path) -> None:
    """Version 4 reads rope_theta, version 5 rope_parameters; the model's is not the default."""
    export(models["llama"], tmp_path, QFormat.FP8, texts)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(str(tmp_path))
    assert 500000.0 in (
        getattr(read, "rope_theta", None),
        (getattr(read, "rope_parameters", None) or {}).get("rope_theta"),
    )


@pytest.fixture
def configured(models, texts, tmp_path):
    """Exports a checkpoint and makes the folder that the LLM API reads."""

    def make(spec) -> Path:
        quantize(models["llama"], tmp_path / "checkpoint", spec, texts, CALIBRATION, layout="hugging_face")
        assert verify_unified(tmp_path / "checkpoint") == []
        stage = ConfigureLlm(BuildSettings(), TritonSettings(), KvCacheSettings(), enable_chunked_context=False)
        (tmp_path / "out").mkdir()
        stage.run({"checkpoint": tmp_path / "checkpoint", "model": models["llama"]}, tmp_path / "out", SILENT)
        return tmp_path / "out" / "checkpoint"

    return make


def test_int4_without_awq_gets_scales_of_one_where_the_llm_api_reads_any(configured, tmp_path) -> None:
    """Its loader reads them of o_proj and down_proj, not of linears that it fuses; the checkpoint itself has none."""
    folder = configured(quant_spec(QFormat.INT4_RTN, group_size=GROUP))
    scales = safetensors.load_file(folder / "pre_quant_scale.safetensors")
    names = {
        f"model.layers.{n}.{name}.pre_quant_scale" for n in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    assert set(scales) == names
    assert all(bool((scale == 1).all()) and scale.dtype == torch.bfloat16 for scale in scales.values())
    assert verify_unified(folder) == []
    assert verify_unified(tmp_path / "checkpoint") == []
    assert not (tmp_path / "checkpoint" / "pre_quant_scale.safetensors").exists()


def test_a_mix_of_formats_says_the_format_of_each_linear(configured) -> None:
    folder = configured(mix_spec((QFormat.FP8, QFormat.INT4_AWQ), 6.0, texts=2, group_size=GROUP))
    block = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert block["quant_algo"] == "MIXED_PRECISION"
    assert {layer["quant_algo"] for layer in block["quantized_layers"].values()} == {"FP8", "W4A16_AWQ"}
    stored = safetensors.load_file(folder / "model.safetensors")
    smoothed = {name for name in stored if name.endswith("pre_quant_scale")}
    assert all(".o_proj." in name or ".down_proj." in name for name in smoothed)  # the loader drops others
    name, layer = next(iter(block["quantized_layers"].items()))
    layer["quant_algo"] = "W4A16_AWQ" if layer["quant_algo"] == "FP8" else "FP8"
    (folder / "hf_quant_config.json").unlink()
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": block}))
    assert any(name in str(fault) for fault in verify_unified(folder))


def unpacked(packed, scale):
    """uint8 [out/2, in] -> float [out, in]: row 2o in the low nibble, row 2o+1 in the high, signed."""
    low, high = (packed & 15).to(torch.int8), (packed >> 4).to(torch.int8)
    rows = torch.stack([low, high], dim=1).reshape(-1, packed.shape[1])
    signed = torch.where(rows > 7, rows - 16, rows).float()
    return signed * scale.repeat_interleave(GROUP, dim=1)


def test_an_awq_folder_is_as_near_to_the_model_as_modelopts_simulation(models, texts, tmp_path) -> None:
    """Unpacked by the documented layout into a plain Llama, norms as exported.

    Not equal to the simulation: linears that will be fused get a common smoothing when they are exported.
    """
    spec = quant_spec(QFormat.INT4_AWQ, group_size=GROUP)
    export(models["llama"], tmp_path, QFormat.INT4_AWQ, texts)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    plain = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and f"{module}.weight_scale" in tensors:
            weight = unpacked(tensor, tensors[f"{module}.weight_scale"])
            smooth = tensors.get(f"{module}.pre_quant_scale")
            plain[name] = weight if smooth is None else weight * smooth.float()
        elif name.endswith(".weight"):
            plain[name] = tensor.float()
    model = transformers.AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.float32)
    ids = torch.arange(24)[None] % 199
    with torch.no_grad():
        exact = model(ids).logits
        model.load_state_dict(plain)
        ours = model(ids).logits
        theirs = fake_quantized_model(models["llama"], spec, texts, CALIBRATION)(ids).logits.float()
    ours_off, theirs_off = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert ours_off < 1.1 * theirs_off
    assert (ours - theirs).abs().mean() < 0.3 * theirs_off  # and it is the same error


@pytest.fixture
def broken(models, texts, tmp_path):
    """Writes the folder again with some tensors changed."""
    export(models["llama"], tmp_path / "good", QFormat.NVFP4 if not OLD else QFormat.W4A8_AWQ, texts)

    def change(edit):
        folder = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", folder, dirs_exist_ok=True)
        tensors = safetensors.load_file(folder / "model.safetensors")
        edit(tensors)
        safetensors.save_file(tensors, folder / "model.safetensors")
        return "\n".join(map(str, verify_unified(folder)))

    return change


Q = "model.layers.1.self_attn.q_proj"


def test_every_fault_of_a_folder_is_named(broken) -> None:
    """What the PyTorch backend would refuse, or load wrongly."""
    assert f"lacks '{Q}.weight_scale'" in broken(lambda t: t.pop(f"{Q}.weight_scale"))
    assert "unexpected tensor 'model.extra'" in broken(lambda t: t.update({"model.extra": torch.ones(1)}))
    assert f"'{Q}.input_scale' is F32[1]" in broken(lambda t: t.update({f"{Q}.input_scale": torch.ones(1)}))
    assert f"the scale '{Q}.input_scale' has the value -1" in broken(
        lambda t: t.update({f"{Q}.input_scale": torch.tensor(-1.0)})
    )
    assert f"differ in weight_scale_2: {Q}.weight_scale_2=0.5" in broken(
        lambda t: t.update({f"{Q}.weight_scale_2": torch.tensor(0.5)})
    )
    assert "model.norm.weight' contains NaN" in broken(lambda t: t["model.norm.weight"].fill_(float("nan")))


def test_a_format_the_backend_does_not_take_is_named(models, texts, tmp_path) -> None:
    export(models["llama"], tmp_path, QFormat.FP8, texts)
    path = tmp_path / "hf_quant_config.json"
    path.write_text(path.read_text().replace('"FP8"', '"W8A16"'))
    (fault,) = verify_unified(tmp_path)
    assert "quant_algo='W8A16'" in str(fault)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen"])
@pytest.mark.parametrize("qformat", [QFormat.NONE, QFormat.FP8, QFormat.INT4_AWQ])
def test_other_families_export_sound_folders(kind, qformat, texts, tmp_path) -> None:
    """Biases of q, k and v and norms of heads are expected where the family has them."""
    export(model_of(tmp_path / "model", kind), tmp_path / "out", qformat, texts)
    assert verify_unified(tmp_path / "out") == []


@pytest.mark.thorough
@pytest.mark.skipif(OLD, reason="measured with nvidia-modelopt 0.47")
@pytest.mark.parametrize(
    ("kind", "qformat"),
    [
        *((kind, qformat) for kind in ("gemma3", "phi3") for qformat in (QFormat.NONE, QFormat.FP8, QFormat.INT4_AWQ)),
        *((kind, qformat) for kind in ("mixtral", "qwen3_moe") for qformat in (QFormat.FP8, QFormat.NVFP4)),
    ],
)
def test_families_of_the_llm_api_alone_export_sound_folders(kind, qformat, texts, tmp_path) -> None:
    """Four norms, norms of heads, fused linears and experts; Transformers reads the same configuration as before."""
    source = write_random(tmp_path / "model", kind)
    facts = quantize(source, tmp_path / "out", quant_spec(qformat), texts, CALIBRATION, layout="hugging_face")
    assert verify_unified(tmp_path / "out") == []
    assert facts["bits_per_weight"] == pytest.approx(BITS[qformat], rel=0.03)
    before, after = (transformers.AutoConfig.from_pretrained(str(path)) for path in (source, tmp_path / "out"))
    assert before.rope_parameters == after.rope_parameters


BITS = {QFormat.NONE: 16, QFormat.FP8: 8, QFormat.INT4_AWQ: 4.25, QFormat.NVFP4: 4.5}


class _Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.skipif(OLD, reason="measured with nvidia-modelopt 0.47")
def test_an_expert_that_calibration_never_reaches_is_named(texts, tmp_path) -> None:
    """Of expert scores [s, -s, t, 0], the last one is never the largest."""
    source = write_random(tmp_path / "model", "mixtral")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    weights = safetensors.load_file(source / "model.safetensors")
    router = weights["model.layers.1.block_sparse_moe.gate.weight"]
    router[1], router[3] = -router[0], 0
    safetensors.save_file(weights, source / "model.safetensors", {"format": "pt"})
    progress, spec = _Notes(), quant_spec(QFormat.FP8)
    facts = quantize(source, tmp_path / "out", spec, texts, CALIBRATION, layout="hugging_face", progress=progress)
    tokens = facts["experts"]["tokens"]["model.layers.1.mlp.gate"]
    assert sum(tokens) == facts["calibration"]["tokens"]
    assert tokens[3] == 0
    assert "1.3" in facts["experts"]["unreached"]
    assert any("calibration sent no token to" in note and "1.3" in note for note in progress.notes)
