"""A folder that is already quantized becomes a checkpoint with the same weights, or is refused with the reason."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.checkpoint.given import import_faults
from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.checkpoint.tensors import TensorFile
from pipelines.checkpoint.verify import verify
from pipelines.compress import modelopt_door
from pipelines.compress.by_modelopt import correct_unified
from pipelines.compress.by_tensor import QuantizeTask, Split
from pipelines.compress.contexts import muted
from pipelines.compress.model_folder import look_at
from pipelines.compress.quantizing import quantize
from pipelines.compress.simulating import simulated
from pipelines.compress.specs import QuantSpec
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from tests.contract.compress.conftest import CALIBRATION, write_model
from tests.support.packed_folder import rounded, write_awq, write_compressed, write_gptq
from tests.support.small_models import model_of
from tests.support.specs import mix_spec, quant_spec
from tests.unit.core.test_plan import plan

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

LINEARS = (".mlp.", "attention.qkv", "attention.dense")
SPEC = quant_spec(QFormat.INT4_GPTQ, group_size=64)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["llama", "tied", "gemma"])
def test_an_imported_checkpoint_has_the_weights_of_the_folder(kind, symmetric, version, models, tmp_path) -> None:
    """Everything but the linears is byte for byte what ModelOpt exports from the original."""
    folder = write_gptq(models[kind], tmp_path / "given", group=64, version=version, symmetric=symmetric)
    facts = quantize(folder, tmp_path / "out", SPEC, (), CALIBRATION)
    assert verify(tmp_path / "out") == []
    checkpoint = Checkpoint(tmp_path / "out")
    assert facts["calibration"]["sequences"] == 0
    assert checkpoint.config.quantization.has_zero_point is not symmetric
    name = "model.layers.1.mlp.down_proj"
    source = load_file(models[kind] / "model.safetensors")[f"{name}.weight"].float().numpy()
    codes, points, scales = (each.astype(np.float32) for each in rounded(source, 64, symmetric))
    expected = (codes - np.repeat(points, 64, axis=1)) * np.repeat(scales, 64, axis=1)
    found = dequantize(checkpoint, "transformer.layers.1.mlp.proj")
    # zero points are stored times the scale, in bfloat16
    np.testing.assert_allclose(found, expected, atol=1e-7 if symmetric else float(scales.max()) * 2**-8)
    quantize(models[kind], tmp_path / "plain", quant_spec(QFormat.NONE), (), CALIBRATION)
    ours, theirs = (TensorFile(tmp_path / each / "rank0.safetensors") for each in ("out", "plain"))
    others = [each for each in theirs if not any(part in each for part in (".mlp.", "qkv", "dense"))]
    assert others
    for each in others:
        assert ours[each].tobytes() == theirs[each].tobytes(), each
    config, exported = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "plain"))
    assert {k: v for k, v in config.items() if k not in ("quantization", "producer")} == {
        k: v for k, v in exported.items() if k not in ("quantization", "producer")
    }


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen"])
def test_other_families_are_taken_over_with_all_that_is_not_rounded(kind, tmp_path) -> None:
    """Biases of Qwen2 and head norms of Qwen3 among it; codes and scales are those of the folder."""
    original = model_of(tmp_path / "original", kind)
    folder = write_gptq(original, tmp_path / "given", group=64, version=1, symmetric=True)
    quantize(folder, tmp_path / "out", SPEC, (), CALIBRATION)
    assert verify(tmp_path / "out") == []
    source = load_file(original / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].float().numpy()
    codes, points, scales = (each.astype(np.float32) for each in rounded(source, 64, symmetric=True))
    expected = (codes - np.repeat(points, 64, axis=1)) * np.repeat(scales, 64, axis=1)
    found = dequantize(Checkpoint(tmp_path / "out"), "transformer.layers.1.mlp.proj")
    np.testing.assert_allclose(found, expected, atol=1e-7)
    quantize(original, tmp_path / "plain", quant_spec(QFormat.NONE), (), CALIBRATION)
    ours, theirs = (TensorFile(tmp_path / each / "rank0.safetensors") for each in ("out", "plain"))
    others = [each for each in theirs if not (each.endswith(".weight") and any(p in each for p in LINEARS))]
    assert any("bias" in each or "q_layernorm" in each for each in others) is (kind != "mistral")
    for each in others:
        assert ours[each].tobytes() == theirs[each].tobytes(), each


@pytest.mark.parametrize("cache", [KvFormat.FP8, KvFormat.INT8])
@pytest.mark.parametrize(("kind", "symmetric"), [("llama", True), ("gemma", False)])
def test_the_cache_of_an_int4_folder_is_calibrated_on_its_weights(
    kind, symmetric, cache, models, texts, tmp_path
) -> None:
    """The scales are those of a 16-bit model that has the decoded weights; the weights are those without a cache."""
    folder = write_gptq(models[kind], tmp_path / "given", group=64, symmetric=symmetric)
    facts = quantize(folder, tmp_path / "out", replace(SPEC, kv_cache=cache), texts, CALIBRATION)
    assert verify(tmp_path / "out") == []
    assert facts["calibration"]["sequences"] == CALIBRATION.size
    quantize(folder, tmp_path / "bare", SPEC, (), CALIBRATION)
    shutil.copytree(models[kind], tmp_path / "decoded")
    tensors, bare = load_file(models[kind] / "model.safetensors"), Checkpoint(tmp_path / "bare")
    for layer in range(2):
        rows = 0
        for name in ("q", "k", "v"):
            at = f"model.layers.{layer}.self_attn.{name}_proj.weight"
            qkv = torch.from_numpy(dequantize(bare, f"transformer.layers.{layer}.attention.qkv"))
            tensors[at] = qkv[rows : rows + len(tensors[at])].to(torch.bfloat16)
            rows += len(tensors[at])
        for module, name in DECODED.items():
            found = torch.from_numpy(dequantize(bare, f"transformer.layers.{layer}.{module}"))
            tensors[f"model.layers.{layer}.{name}.weight"] = found.to(torch.bfloat16)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        tmp_path / "decoded/model.safetensors",
        metadata={"format": "pt"},
    )
    quantize(tmp_path / "decoded", tmp_path / "expected", quant_spec(QFormat.NONE, cache), texts, CALIBRATION)
    ours, theirs, plain = (TensorFile(tmp_path / each / "rank0.safetensors") for each in ("out", "expected", "bare"))
    scales = ours.keys() - plain.keys()
    assert len(scales) == 6
    assert {name: float(ours[name][0]) for name in scales} == {name: float(theirs[name][0]) for name in scales}
    assert all(ours[name].tobytes() == plain[name].tobytes() for name in plain)
    assert not (tmp_path / "out/.partial").exists()


DECODED = {
    "attention.dense": "self_attn.o_proj",
    "mlp.fc": "mlp.gate_proj",
    "mlp.gate": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}


def test_order_of_activations_is_refused(models, tmp_path) -> None:
    folder = write_gptq(models["llama"], tmp_path / "given", group=64, desc_act=True)
    quantize(folder, tmp_path / "sorted", SPEC, (), CALIBRATION)  # the flag alone does no harm
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"'{name}' of .* out of order \(act-order\)"):
        quantize(folder, tmp_path / "out", SPEC, (), CALIBRATION)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "asked", "message"),
    [
        ({}, {"qformat": QFormat.FP8}, "quant=fp8 would quantize it again.*Set quant=int4_gptq quant.group_size=64"),
        ({}, {"group_size": 128}, "in groups of 64. Set quant.group_size=64"),
        ({}, {"world_size": 2}, "for one rank, not 2"),
        ({"quant_method": "hqq"}, {}, r"quant_method='hqq'.*Folders of AutoGPTQ and GPTQModel .* AutoAWQ"),
        ({"bits": 8}, {}, "with bits=8. It can be 4"),
        ({"group_size": 24}, {}, "with group_size=24. It can be 16, 32, 64, 128, 256"),
        ({"group_size": -1}, {}, "in groups of 128. Set quant.group_size=128"),
        ({"is_marlin_format": True}, {}, "is_marlin_format=True. It can be False"),
        ({"pack_dtype": "int8"}, {}, "pack_dtype='int8'. It can be 'int32'"),
        ({"dynamic": {"+:.*up_proj": {"bits": 8}}}, {}, r"dynamic=\['\+:\.\*up_proj'\]. It must be absent"),
        ({"checkpoint_format": "marlin"}, {}, "checkpoint_format='marlin'. It can be 'gptq', 'gptq_v2'"),
        ({"lm_head": True}, {}, "with lm_head=True. It must be absent"),
        ({"rotation": "hadamard"}, {}, "with rotation='hadamard'. It must be absent"),
        ({"activation": {"mode": "w4afp8"}}, {}, "with activation={'mode': 'w4afp8'}. It must be absent"),
    ],
)
def test_what_cannot_be_taken_over_is_named(changes, asked, message) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64, **changes}}
    usual = {"qformat": QFormat.INT4_GPTQ, "group_size": 64, "kv_cache": KvFormat.AUTO, "world_size": 1}
    with pytest.raises(UserError, match=message):
        raise UserError.of(import_faults(Path("/given"), config, **(usual | asked)))


def compressed(**weights):
    usual = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, **weights}
    return {"group_0": {"targets": ["Linear"], "weights": usual, "input_activations": None}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (AWQ | {"version": "gemv"}, "with version='gemv'. It can be 'gemm'"),
        (AWQ | {"modules_to_not_convert": ["mlp.down_proj"]}, r"modules_to_not_convert=\['mlp.down_proj'\]"),
        (AWQ | {"bits": 8}, "with bits=8. It can be 4"),
        (COMPRESSED | {"format": "marlin-24"}, "'marlin-24'. It can be 'pack-quantized', 'float-quantized'"),
        (COMPRESSED | {"config_groups": compressed(actorder="group")}, "actorder='group'. It can be False, 'weight'"),
        (COMPRESSED | {"config_groups": compressed(), "transform_config": {"R1": 1}}, "transform_config={'R1': 1}"),
        (
            COMPRESSED | {"config_groups": compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "24-bitmask",
        ),
        (COMPRESSED | {"config_groups": compressed(num_bits=8)}, "num_bits=8. It can be 4"),
        (
            COMPRESSED | {"config_groups": compressed(strategy="tensor")},
            "strategy='tensor'. It can be 'group', 'channel'",
        ),
        (COMPRESSED | {"config_groups": []}, "number of different config_groups=0. It can be 1"),
        (COMPRESSED | {"config_groups": {"g": {"targets": ["Linear"], "weights": "int4"}}}, "weights='int4'"),
        (COMPRESSED | {"config_groups": compressed(), "kv_cache_scheme": "fp8"}, "kv_cache_scheme='fp8'"),
        (AWQ | {"group_size": 32}, "in groups of 32. Set quant.group_size=32"),
        (COMPRESSED | {"config_groups": compressed(group_size=128)}, "in groups of 128. Set quant.group_size=128"),
    ],
)
def test_what_other_kinds_cannot_be_is_named(block, message) -> None:
    asked = {"qformat": QFormat.INT4_GPTQ, "group_size": 64, "kv_cache": KvFormat.AUTO, "world_size": 1}
    with pytest.raises(UserError, match=message):
        raise UserError.of(import_faults(Path("/given"), {"quantization_config": block}, **asked))


FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
IN_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP8, "input_activations": FP8}},
    "ignore": ["lm_head"],
}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
AWQ_64 = {"quant_algo": "W4A16_AWQ", "group_size": 64, "has_zero_point": False, "pre_quant_scale": True}


def in_fp8(weights=FP8, inputs=FP8, **more):
    return (
        IN_FP8
        | {"config_groups": {"": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}}
        | more
    )


@pytest.mark.parametrize(
    ("block", "asked", "message"),
    [
        (in_fp8(inputs=FP8 | {"dynamic": True}), {}, r"input_activations\.dynamic=True. It can be False"),
        (in_fp8(weights=FP8 | {"strategy": "channel"}), {}, r"weights\.strategy='channel'. It can be 'tensor'"),
        (in_fp8(kv_cache_scheme=FP8 | {"num_bits": 4}), {}, r"kv_cache_scheme\.num_bits=4. It can be 8"),
        (in_fp8(ignore=["model.layers.0.mlp.up_proj"]), {}, r"ignore=\['model.layers.0.mlp.up_proj'\]"),
        (
            in_fp8(ignore=["re:.*block_sparse_moe.gate", "model.layers.3.mlp.gate", "model.layers.0.mlp.up_proj"]),
            {},
            r"ignore=\['model.layers.0.mlp.up_proj'\]",  # routers stay in 16 bit anyway
        ),
        (in_fp8(inputs=None), {}, r"input_activations=None. It must be an object"),
        (AUTO_FP8 | {"activation_scheme": "dynamic"}, {}, "activation_scheme='dynamic'. It can be 'static'"),
        (AUTO_FP8 | {"weight_block_size": [128, 128]}, {}, r"weight_block_size=\[128, 128\]. It must be absent"),
        (
            MODELOPT | {"quant_algo": "NVFP4_AWQ"},
            {},
            "quant_algo='NVFP4_AWQ'. It can be 'FP8', 'W8A8_SQ_PER_CHANNEL', ",
        ),
        (MODELOPT | {"quant_algo": "FP8_PB_WO"}, {}, "quant_algo='FP8_PB_WO'. It can be 'FP8', "),
        (MODELOPT | {"quant_algo": "W8A16"}, {}, "quant_algo='W8A16'. It can be 'FP8', "),
        (MODELOPT | {"quant_algo": "NVFP4", "group_size": 32}, {}, "group_size=32. It can be 16"),
        (
            MODELOPT | {"quant_algo": "NVFP4", "group_size": 16},
            {},
            "are used unchanged: FP4 .*groups of 16. Set quant=nvfp4, or",
        ),
        (MODELOPT | AWQ_64 | {"has_zero_point": True}, {}, "has_zero_point=True. It must be absent"),
        (MODELOPT | AWQ_64 | {"group_size": 48}, {}, "group_size=48. It can be 16, 32"),
        (MODELOPT | AWQ_64, {}, "quant=fp8 would quantize it again.*Set quant=int4_awq quant.group_size=64"),
        (
            MODELOPT | AWQ_64 | {"quant_algo": "W4A8_AWQ"},
            {"qformat": QFormat.W4A8_AWQ},
            "in groups of 64. Set quant.group_size=64",
        ),
        (
            MODELOPT | {"quant_algo": "W8A8_SQ_PER_CHANNEL"},
            {},
            "INT8 weights and .* SmoothQuant. Set quant=int8_sq, or",
        ),
        (MODELOPT | {"kv_cache_scheme": FP8 | {"type": "int"}}, {}, "kv_cache_quant_algo={.*It can be 'FP8'"),
        (
            AUTO_FP8,
            {"qformat": QFormat.INT8_SQ},
            "are used unchanged: FP8 with one scale per linear. Set quant=fp8, or",
        ),
        (
            AUTO_FP8,
            {"kv_cache": KvFormat.FP8},
            "without scales for kv_cache=fp8. They .* not rounded. Set kv_cache=auto",
        ),
        (
            MODELOPT | {"kv_cache_scheme": FP8},
            {"kv_cache": KvFormat.INT8},
            "without scales for kv_cache=int8. They .* Set kv_cache=fp8 or auto",
        ),
    ],
)
def test_what_fp8_cannot_be_is_named(block, asked, message) -> None:
    usual = {"qformat": QFormat.FP8, "group_size": 128, "kv_cache": KvFormat.AUTO, "world_size": 1}
    assert import_faults(Path("/given"), {"quantization_config": MODELOPT}, **usual) == []
    with pytest.raises(UserError, match=message):
        raise UserError.of(import_faults(Path("/given"), {"quantization_config": block}, **(usual | asked)))


def test_int4_of_modelopt_without_scales_for_activations_is_no_awq(tmp_path) -> None:
    """ModelOpt declares them for all; what is in the folder counts, once it has weights."""
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    asked = {"qformat": QFormat.FP8, "group_size": 128, "kv_cache": KvFormat.AUTO, "world_size": 1}
    (fault,) = import_faults(tmp_path, {"quantization_config": MODELOPT | AWQ_64}, **asked)
    assert fault.todo.startswith("Set quant=int4_gptq quant.group_size=64")


def modelopts(source: Path, out: Path) -> Path:
    """ModelOpt's own export of a model in FP8 with an FP8 cache, as a Hugging Face folder."""
    texts = ["the moon of it is small", "a star"] * 8
    quantize(source, out, quant_spec(QFormat.FP8, KvFormat.FP8), texts, CALIBRATION, layout="hugging_face")
    return out


def rewritten(source: Path, out: Path, block: dict[str, Any] | None, rename: dict[str, str] | None = None) -> Path:
    """The same tensors under the names and with the configuration of another library."""
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = block
    if block is None:  # as ModelOpt's first exports
        del config["quantization_config"]
    else:
        (out / "hf_quant_config.json").unlink()
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for old, new in (rename or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("kind", ["llama", "tied", "gemma"])
def test_a_folder_in_fp8_becomes_modelopts_own_checkpoint(kind, models, tmp_path) -> None:
    """As ModelOpt writes both: equal scales; weights of the folder, but for q, k and v, which get a common scale."""
    folder = modelopts(models[kind], tmp_path / "given")
    texts = ["the moon of it is small", "a star"] * 8
    spec = quant_spec(QFormat.FP8, KvFormat.FP8)
    quantize(models[kind], tmp_path / "expected", spec, texts, CALIBRATION)
    quantize(folder, tmp_path / "out", spec, (), CALIBRATION)
    assert verify(tmp_path / "out") == []
    ours, theirs = (TensorFile(tmp_path / each / "rank0.safetensors") for each in ("out", "expected"))
    given = load_file(folder / "model.safetensors")
    for name in theirs:
        if "mlp.fc" in name or "mlp.gate" in name:
            continue  # ModelOpt gives gate and up one scale; TensorRT-LLM does so itself where it needs that
        a, b = (each[name].astype(np.float32) for each in (ours, theirs))
        if name.endswith((".qkv.weight", ".dense.weight", ".proj.weight")):
            np.testing.assert_allclose(a, b, rtol=1 / 8, atol=2**-8, err_msg=name)  # one step of FP8
        else:
            assert (a == b).all(), name
    for layer in range(2):
        for part, module in (("fc", "gate"), ("gate", "up")):
            stored = ours[f"transformer.layers.{layer}.mlp.{part}.weight"]
            source = given[f"model.layers.{layer}.mlp.{module}_proj.weight"]
            assert stored.tobytes() == source.view(torch.uint8).numpy().tobytes()
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "expected")]
    assert {**configs[0], "producer": None} == {**configs[1], "producer": None}


def test_the_same_tensors_of_each_library_give_the_same_checkpoint(models, tmp_path) -> None:
    folder = modelopts(models["llama"], tmp_path / "modelopt")
    short = {"k_proj.k_scale": "k_scale", "v_proj.v_scale": "v_scale"}
    given = {
        "modelopt": (folder, KvFormat.FP8),
        "first": (rewritten(folder, tmp_path / "first", None), KvFormat.FP8),
        "llm-compressor": (
            rewritten(folder, tmp_path / "ct", IN_FP8 | {"kv_cache_scheme": FP8}, short),
            KvFormat.FP8,
        ),
        "modelopt, 16-bit cache": (folder, KvFormat.AUTO),
        "AutoFP8": (rewritten(folder, tmp_path / "auto", AUTO_FP8), KvFormat.AUTO),
    }
    written: dict[KvFormat, set[bytes]] = {}
    for name, (source, cache) in given.items():
        quantize(source, tmp_path / "out" / name, quant_spec(QFormat.FP8, cache), (), CALIBRATION)
        assert verify(tmp_path / "out" / name) == [], name
        written.setdefault(cache, set()).add((tmp_path / "out" / name / "rank0.safetensors").read_bytes())
    assert {cache: len(files) for cache, files in written.items()} == {KvFormat.FP8: 1, KvFormat.AUTO: 1}


@pytest.mark.parametrize(("kind", "tp", "pp"), [("tied", 2, 2), ("gemma", 2, 1)])
def test_a_folder_in_fp8_becomes_a_checkpoint_of_several_ranks(kind, tp, pp, models, tmp_path) -> None:
    folder, spec = modelopts(models[kind], tmp_path / "given"), quant_spec(QFormat.FP8, KvFormat.FP8)
    quantize(folder, tmp_path / "whole", spec, (), CALIBRATION)
    quantize(folder, tmp_path / "parted", spec, (), CALIBRATION, tp_size=tp, pp_size=pp)
    assert verify(tmp_path / "parted") == []
    whole, parted = (Checkpoint(tmp_path / each) for each in ("whole", "parted"))
    assert set(whole) == set(parted)
    assert len(parted.ranks) == tp * pp
    for name in whole:
        np.testing.assert_array_equal(parted.tensor(name), whole.tensor(name), err_msg=name)


def test_a_head_in_fp8_is_not_read_as_if_it_were_16_bit(models, tmp_path) -> None:
    folder = rewritten(modelopts(models["llama"], tmp_path / "modelopt"), tmp_path / "auto", AUTO_FP8)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"auto' is .*with 'lm_head.weight' of type F8_E4M3.* Give the original"):
        quantize(folder, tmp_path / "out", quant_spec(QFormat.FP8), (), CALIBRATION)


OLD = modelopt_door.VERSION.startswith("0.37")
FORMATS_OF_MODELOPT = [
    (QFormat.INT4_AWQ, "llama"),
    pytest.param(QFormat.INT4_AWQ, "gemma", marks=pytest.mark.skipif(OLD, reason="0.37 loses scales of Gemma")),
    (QFormat.W4A8_AWQ, "llama"),
    (QFormat.INT8_SQ, "llama"),
    (QFormat.INT8_SQ, "gemma"),
    pytest.param(QFormat.INT4_RTN, "tied", marks=pytest.mark.skipif(OLD, reason="0.37 cannot export it as a folder")),
    pytest.param(
        QFormat.NVFP4, "llama", marks=pytest.mark.skipif(OLD, reason="needs CUDA with nvidia-modelopt before 0.47")
    ),
]


def given_and_expected(source: Path, out: Path, spec: QuantSpec, texts: list[str]) -> tuple[Path, Path]:
    """ModelOpt's two exports of a model that it calibrated: as a Hugging Face folder, and for TensorRT-LLM."""
    for name, layout in (("given", "hugging_face"), ("expected", "tensorrt_llm")):
        quantize(source, out / name, spec, texts, CALIBRATION, layout=layout)
    return out / "given", out / "expected"


@pytest.mark.parametrize(("qformat", "kind"), FORMATS_OF_MODELOPT)
def test_a_folder_of_modelopt_becomes_its_own_checkpoint(qformat, kind, models, texts, tmp_path) -> None:
    """The same bytes as ModelOpt's other export, but for what its folders hold in another way.

    There, scales of AWQ's activations are part of the norm before q, k and v, and gate and up have common ones.
    """
    cache = KvFormat.AUTO if qformat is QFormat.INT8_SQ else KvFormat.FP8
    spec, step = quant_spec(qformat, cache, group_size=64), {}
    if FORMATS[qformat].tuning == "awq":
        step = {"awq_alpha_step": 0.5}  # a short search for scales
    folder, expected = given_and_expected(
        models[kind], tmp_path, quant_spec(qformat, cache, group_size=64, **step), texts
    )
    taken = quant_spec(QFormat.INT4_GPTQ, cache, group_size=64) if qformat is QFormat.INT4_RTN else spec
    quantize(folder, tmp_path / "out", taken, (), CALIBRATION)
    assert verify(tmp_path / "out") == []
    ours, theirs = (TensorFile(path / "rank0.safetensors") for path in (tmp_path / "out", expected))
    assert ours.keys() == theirs.keys()
    differ = {name for name in ours if ours[name].tobytes() != theirs[name].tobytes()}
    smoothed = FORMATS[qformat].tuning is not None
    assert not {name for name in differ if not (smoothed and any(part in name for part in CHANGED))}
    given = load_file(folder / "model.safetensors")
    for layer in range(2):
        for part, module in (("fc", "gate"), ("gate", "up")):
            stored = ours[f"transformer.layers.{layer}.mlp.{part}.weight"]
            source = given[f"model.layers.{layer}.mlp.{module}_proj.weight"]
            assert stored.tobytes() == source.view(torch.uint8).numpy().tobytes()
        if FORMATS[qformat].tuning == "awq":
            at = f"transformer.layers.{layer}"
            assert (ours[f"{at}.attention.qkv.prequant_scaling_factor"] == 1).all()
            norm, scale = (
                theirs[f"{at}.{name}"].astype(np.float32)
                for name in ("input_layernorm.weight", "attention.qkv.prequant_scaling_factor")
            )
            found = ours[f"{at}.input_layernorm.weight"].astype(np.float32)
            # Gemma's norms are stored less one, which is one rounding more
            np.testing.assert_allclose(found, norm * scale, rtol=2**-7 if kind == "gemma" else 2**-8)
    configs = [json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", expected)]
    assert {**configs[0], "producer": None} == {**configs[1], "producer": None}


CHANGED = ("input_layernorm", "post_layernorm", "qkv.prequant_scaling_factor", "mlp.fc.", "mlp.gate.")


def test_a_mix_of_modelopt_keeps_the_format_of_each_linear(texts, tmp_path) -> None:
    """quant_cfg.json is that of ModelOpt's own export for TensorRT-LLM; linears have the bytes of the folder."""
    source = write_model(tmp_path / "model", "llama", num_hidden_layers=1)
    tuning = {"group_size": 64, "awq_alpha_step": 0.5}
    spec = mix_spec((QFormat.FP8, QFormat.INT4_AWQ), 6.0, KvFormat.FP8, texts=4, **tuning)
    facts = quantize(source, tmp_path / "expected", spec, texts, CALIBRATION)
    task = QuantizeTask(look_at(source), spec, texts, CALIBRATION, Split(), "bfloat16", "cpu", "tensorrt_llm")
    model, _, _ = simulated(task, SilentProgress())
    with muted():
        modelopt_door.export_unified(model, torch.bfloat16, tmp_path / "given")
    correct_unified(tmp_path / "given", json.loads((source / "config.json").read_text()), "bfloat16")
    shutil.copy(source / "tokenizer.json", tmp_path / "given")
    assert len(set(facts["formats"].values())) > 1
    exact = math.ceil(100 * facts["search"]["effective_bits"]) / 100
    used = tuple(QFormat(name) for name in sorted(set(facts["formats"].values()) - {"none"}))
    with pytest.raises(UserError, match=rf"Set quant.effective_bits={exact:g} quant.candidates=\[{','.join(used)}\]"):
        quantize(tmp_path / "given", tmp_path / "out", spec, (), CALIBRATION)
    taken = mix_spec(used, exact, KvFormat.FP8, **tuning)
    assert quantize(tmp_path / "given", tmp_path / "out", taken, (), CALIBRATION)["formats"] == facts["formats"]
    assert verify(tmp_path / "out") == []
    ours, theirs = (json.loads((tmp_path / each / "quant_cfg.json").read_text()) for each in ("out", "expected"))
    assert ours == theirs
    file, given = TensorFile(tmp_path / "out" / "rank0.safetensors"), load_file(tmp_path / "given/model.safetensors")
    for module, name in (("dense", "self_attn.o"), ("fc", "mlp.gate"), ("gate", "mlp.up"), ("proj", "mlp.down")):
        stored = file[f"transformer.layers.0.{'attention' if module == 'dense' else 'mlp'}.{module}.weight"]
        assert stored.tobytes() == given[f"model.layers.0.{name}_proj.weight"].view(torch.uint8).numpy().tobytes()
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "expected")]
    assert {**configs[0], "producer": None} == {**configs[1], "producer": None}


@pytest.mark.parametrize("version", ["0.37.0", None])
def test_scales_that_an_old_modelopt_lost_are_named(version) -> None:
    """Found with 0.37: weights divided by scales that its norms of Gemma do not have."""
    producer = {"producer": {"name": "modelopt", "version": version}} if version else {}
    block = MODELOPT | AWQ_64 | {"quant_algo": "W4A8_AWQ"} | producer
    config = {"architectures": ["GemmaForCausalLM"], "quantization_config": block}
    usual = {"qformat": QFormat.W4A8_AWQ, "group_size": 64, "kv_cache": KvFormat.AUTO, "world_size": 1}
    with pytest.raises(UserError, match=rf"by ModelOpt {version}, whose AWQ folders of Gemma lack scales in the norms"):
        raise UserError.of(import_faults(Path("/given"), config, **usual))
    newer = block | {"producer": {"name": "modelopt", "version": "0.47.0"}}
    assert import_faults(Path("/given"), config | {"quantization_config": newer}, **usual) == []
    assert import_faults(Path("/given"), config | {"architectures": ["LlamaForCausalLM"]}, **usual) == []


Q, K, UP = (f"model.layers.0.{name}_proj" for name in ("self_attn.q", "self_attn.k", "mlp.up"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({}, "number of quantized_layers=0. It can be 1"),
        ({"lm_head": {"quant_algo": "FP8"}}, "quantized_layers='lm_head'. It must be absent"),
        ({UP: {"quant_algo": "NVFP4", "group_size": 16}}, rf"{UP}.quant_algo='NVFP4'. It can be 'FP8', 'W8A8_SQ"),
        ({Q: {"quant_algo": "FP8"}}, rf"{K}.quant_algo=None. It can be 'FP8'"),
        ({UP: {"quant_algo": "FP8"}}, rf"{UP}.quant_algo='FP8'. It must be absent"),
        ({UP: AWQ_64, Q: AWQ_64 | {"group_size": 128}}, "quantized_layers.group_size=128. It can be 64"),
    ],
)
def test_a_mix_that_tensorrt_llm_does_not_compute_is_named(layers, message) -> None:
    block = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    usual = {"qformat": QFormat.AUTO, "group_size": 64, "kv_cache": KvFormat.AUTO, "world_size": 1}
    with pytest.raises(UserError, match=message):
        raise UserError.of(import_faults(Path("/given"), {"quantization_config": block}, **usual))


@pytest.mark.parametrize(
    ("write", "symmetric"), [(write_awq, False), (write_compressed, False), (write_compressed, True)]
)
@pytest.mark.parametrize("kind", ["llama", "tied", "gemma"])
def test_a_folder_of_another_kind_gives_the_checkpoint_of_a_gptq_folder(
    kind, write, symmetric, models, tmp_path
) -> None:
    """The same codes, scales and zero points packed by each: equal files, apart from the library's name."""
    options = {"symmetric": symmetric} if write is write_compressed else {}
    folder = write(models[kind], tmp_path / "given", group=64, **options)
    gptq = write_gptq(models[kind], tmp_path / "gptq", group=64, symmetric=symmetric)
    for source, out in ((folder, "out"), (gptq, "expected")):
        quantize(source, tmp_path / out, SPEC, (), CALIBRATION)
    assert verify(tmp_path / "out") == []
    files = [tmp_path / each / "rank0.safetensors" for each in ("out", "expected")]
    assert files[0].read_bytes() == files[1].read_bytes()
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "expected")]
    assert (
        configs[0]["producer"]["version"]
        == json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    )
    assert {**configs[0], "producer": None} == {**configs[1], "producer": None}


def test_a_plan_says_what_to_set(models, tmp_path) -> None:
    from pipelines.engines.registry import ENGINES
    from pipelines.plan.deployment import Deployment
    from pipelines.plan.weights_checks import given_faults
    from pipelines.settings.compose import load
    from tests.unit.core.test_machine import MACHINE

    folder = write_gptq(models["llama"], tmp_path / "given", group=64)
    words = [f"model.path={folder}", "quant=int4_gptq", "quant.group_size=64"]
    engines = {name: ENGINES[name] for name in ENGINES}
    build = next(engine for engine in engines.values() if engine.writes_engine)
    assert [*given_faults(Deployment(load(words), "build", build, MACHINE))] == []
    (fault,) = given_faults(Deployment(load(words), "evaluate", build, MACHINE))
    assert "the 16-bit model to compare it with is not known" in str(fault)
    assert [*given_faults(Deployment(load([*words, "eval.baseline=skip"]), "evaluate", build, MACHINE))] == []
    (fault,) = given_faults(Deployment(load(words), "diagnose", build, MACHINE))
    assert "is already quantized: make diagnose compares a checkpoint with its 16-bit model" in str(fault)
    (fault,) = given_faults(Deployment(load([*words, "quant.int4_scales=mse"]), "build", build, MACHINE))
    assert "is already quantized; quant.int4_scales=mse has no effect" in str(fault)
    shutil.rmtree(folder)


def test_the_plan_gives_texts_to_what_is_calibrated_alone(models, tmp_path) -> None:
    """The stage imports a folder without texts; a 16-bit draft model beside it gets them."""
    given, plain = write_gptq(models["llama"], tmp_path / "given", group=64), models["llama"]
    int4, draft = ["quant=int4_gptq", "quant.group_size=64"], "speculative=draft_target"
    words = [*int4, draft, f"model.path={given}", f"speculative.draft.path={plain}", "speculative.draft_qformat=fp8"]
    nodes = {step.node.id: step.node for step in plan(tmp_path, words, "build").steps}
    assert {name: [*nodes[name].inputs] for name in ("quantize", "draft.quantize")} == {
        "quantize": ["model"],
        "draft.quantize": ["model", "calibration"],
    }
    facts = nodes["quantize"].stage.run({"model": given}, tmp_path / "out", SilentProgress())
    assert facts["calibration"]["sequences"] == 0
    words = [*int4, draft, f"model.path={plain}", f"speculative.draft.path={given}"]
    nodes = {step.node.id: step.node for step in plan(tmp_path, words, "build").steps}
    assert [*nodes["quantize"].inputs, *nodes["draft.quantize"].inputs] == ["model", "calibration", "model"]


@pytest.mark.parametrize("cache", [KvFormat.AUTO, KvFormat.FP8])
def test_what_an_import_does_not_read_is_not_in_its_key(cache, models, tmp_path) -> None:
    """Neither texts nor ModelOpt, with the folder's own scales of the cache either; it takes a tensor at a time."""
    folder = modelopts(models["llama"], tmp_path / "given")
    shutil.copy(models["llama"] / "tokenizer.json", folder)
    words = [f"model.path={folder}", "quant=fp8", f"kv_cache={cache}"]
    one, other = (plan(tmp_path, [*words, f"calibration.size={size}"], "build") for size in (16, 32))
    assert "calibration text: none, because the model is already quantized" in one.notes
    assert any(note.startswith("writing the checkpoint needs about") for note in one.notes)
    ours, theirs = ({step.node.id: step for step in each.steps}["quantize"] for each in (one, other))
    assert ours.key == theirs.key
    assert (ours.node.stage.libraries, ours.node.stage.needs) == ((), ("torch",))
    facts = ours.node.stage.run({"model": folder}, tmp_path / "out", SilentProgress())
    assert (facts["kv_cache"], facts["calibration"]["sequences"]) == (cache.value, 0)
