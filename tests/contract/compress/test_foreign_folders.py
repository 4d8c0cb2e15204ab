"""Folders as other quantizers write them today: the weights that their libraries compute with, or a refusal at once."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.checkpoint.given import import_faults
from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.checkpoint.verify import verify
from pipelines.compress.quantizing import quantize
from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.settings.model import BUNDLED
from tests.contract.compress.conftest import CALIBRATION
from tests.support.packed_folder import awq_order, pack
from tests.support.specs import quant_spec

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

SOURCE = BUNDLED / "models" / "tiny_llama"
GROUP = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
Array = np.ndarray[Any, Any]
Written = tuple[dict[str, Any], Array]
"""Tensors of a linear, and the weight [O, I] that they mean."""


def signed(weight: Array, group: int = GROUP) -> tuple[Array, Array, Array]:
    """Round as AutoRound does: the largest value gets -8 and its sign goes into the scale."""
    grouped = weight.reshape(len(weight), -1, group)
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(2)[..., None], 2)
    scales = (largest / -8).astype(np.float16)
    codes = np.clip(np.rint(grouped / scales.astype(np.float32)), -8, 7)
    value = (codes * scales.astype(np.float32)).reshape(weight.shape)
    return codes.reshape(weight.shape).astype(np.int64) + 8, scales[..., 0], value


def with_points(weight: Array, group: int = GROUP) -> tuple[Array, Array, Array, Array]:
    """Round with zero points, some of which are 0: groups of positive values alone."""
    grouped = weight.reshape(len(weight), -1, group).copy()
    grouped[::3] = np.abs(grouped[::3])
    low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
    scales = np.maximum((high - low) / 15, 1e-6).astype(np.float16)
    points = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 15)
    codes = np.clip(np.rint(grouped / scales.astype(np.float32)[..., None]) + points[..., None], 0, 15)
    value = ((codes - points[..., None]) * scales.astype(np.float32)[..., None]).reshape(weight.shape)
    return codes.reshape(weight.shape).astype(np.int64), points.astype(np.int64), scales, value


def auto_round(weight: Array) -> Written:
    codes, scales, value = signed(weight)
    zeros = np.full((scales.shape[1], len(weight) // 8), 0x77777777, np.int32)
    return {"qweight": pack(codes).T, "qzeros": zeros, "scales": scales.T}, value


def auto_round_awq(weight: Array) -> Written:
    codes, scales, value = signed(weight)
    points = np.full((scales.shape[1], len(weight)), 8)
    return {"qweight": pack(awq_order(codes.T)), "qzeros": pack(points), "scales": scales.T}, value


def gptq_with_borrow(weight: Array) -> Written:
    """The words as GPTQModel packs them: zero points first, then 0x11111111 less."""
    codes, points, scales, value = with_points(weight)
    assert (points == 0).any()
    zeros = (pack(points.T).view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    order = np.arange(weight.shape[1], dtype=np.int32) // GROUP
    return {"qweight": pack(codes).T, "qzeros": zeros, "scales": scales.T, "g_idx": order}, value


def gptq_v2(weight: Array) -> Written:
    codes, points, scales, value = with_points(weight)
    return {"qweight": pack(codes).T, "qzeros": pack(points.T), "scales": scales.T}, value


def gptq_of_rows(weight: Array) -> Written:
    codes, scales, value = signed(weight, weight.shape[1])
    zeros = np.full((1, len(weight) // 8), 0x77777777, np.int32)
    order = np.zeros(weight.shape[1], np.int32)
    return {"qweight": pack(codes).T, "qzeros": zeros, "scales": scales.T, "g_idx": order}, value


def compressed_of_rows(weight: Array) -> Written:
    codes, scales, value = signed(weight, weight.shape[1])
    return {"weight_packed": pack(codes), "weight_scale": scales, "weight_shape": np.array(weight.shape)}, value


def fp8_of_transformers(weight: Array) -> Written:
    scale = torch.tensor(1 / 128, dtype=torch.bfloat16)  # exact, and the same for q, k and v: nothing is rounded anew
    stored = (torch.from_numpy(weight) / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    leaves = {"weight": stored, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.05).bfloat16()}
    return leaves, (stored.float() * scale.float()).numpy()


def int8_of_compressed(weight: Array) -> Written:
    scales = (np.abs(weight).max(1, keepdims=True) / 127.5).astype(np.float32)
    scales = torch.from_numpy(scales).bfloat16()
    codes = np.clip(np.rint(weight / scales.float().numpy()), -128, 127).astype(np.int8)
    return {"weight": codes, "weight_scale": scales, "input_scale": np.array([0.03], np.float32)}, (
        codes * scales.float().numpy()
    )


def nvfp4_of_compressed(weight: Array) -> Written:
    whole = np.float32(1024)  # 448 * 6 / largest, rounded here; one for q, k and v
    grouped = weight.reshape(len(weight), -1, 16)
    scales = torch.from_numpy(np.abs(grouped).max(2) / 6 * whole).to(torch.float8_e4m3fn)
    scaled = grouped * whole / np.maximum(scales.float().numpy(), 1e-9)[..., None]
    codes = np.abs(scaled[..., None] - E2M1).argmin(-1).reshape(weight.shape).astype(np.uint8)
    value = E2M1[codes].reshape(grouped.shape) * (scales.float().numpy() / whole)[..., None]
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    leaves = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": np.array([whole])}
    return leaves | {"input_global_scale": np.array([300], np.float32)}, value.reshape(weight.shape)


def folder(
    out: Path, write: Any, block: dict[str, Any] | None, config: dict[str, Any] | None = None
) -> dict[str, Array]:
    """Write tiny_llama with other linears; return what these mean."""
    tensors, values = {}, {}
    for name, tensor in load_file(SOURCE / "model.safetensors").items():
        if not name.endswith("_proj.weight") or write is None:
            tensors[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        leaves, values[stem] = write(tensor.float().numpy())
        for leaf, each in leaves.items():
            kept = each if isinstance(each, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(each))
            tensors[f"{stem}.{leaf}"] = kept.contiguous()
    shutil.copytree(SOURCE, out, ignore=shutil.ignore_patterns("*.safetensors"))
    raw = json.loads((SOURCE / "config.json").read_text()) | (config or {})
    (out / "config.json").write_text(json.dumps(raw | ({"quantization_config": block} if block else {})))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return values


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"}
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
IN_INT8 = compressed("int-quantized", INT8 | {"strategy": "channel"}, INT8 | {"strategy": "tensor"})
IN_NVFP4 = compressed("nvfp4-pack-quantized", FP4 | {"dynamic": False}, FP4 | {"dynamic": "local"})
OF_ROWS = compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}, None)
OF_NAMES = compressed("pack-quantized", OF_ROWS["config_groups"]["group_0"]["weights"], None) | {"ignore": []}
OF_NAMES["config_groups"]["group_0"]["targets"] = ["re:.*_proj$"]
EQUAL = OF_ROWS | {
    "config_groups": {
        part: OF_NAMES["config_groups"]["group_0"] | {"targets": [f"re:.*{part}.*"]} for part in ("self_attn", "mlp")
    }
}
RIGHT = {
    "auto-round as auto_gptq": (auto_round, GPTQ | {"provider": "auto-round", "lm_head": False}, QFormat.INT4_GPTQ),
    "auto-round": (auto_round, AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, QFormat.INT4_GPTQ),
    "auto-round, a layer by its name": (
        auto_round,
        AUTO_ROUND | {"extra_config": {"down_proj": {"bits": 4, "sym": True, "data_type": "int"}}},
        QFormat.INT4_GPTQ,
    ),
    "auto-round v2": (gptq_v2, AUTO_ROUND | {"packing_format": "auto_round:gptqmodel"}, QFormat.INT4_GPTQ),
    "auto-round as awq": (auto_round_awq, AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, QFormat.INT4_GPTQ),
    "zero points that borrow": (gptq_with_borrow, GPTQ | {"sym": False}, QFormat.INT4_GPTQ),
    "gptq_v2": (gptq_v2, GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, QFormat.INT4_GPTQ),
    "one scale for a row": (gptq_of_rows, GPTQ | {"group_size": -1}, QFormat.INT4_GPTQ),
    "compressed-tensors, rows": (compressed_of_rows, OF_ROWS, QFormat.INT4_GPTQ),
    "compressed-tensors, names": (compressed_of_rows, OF_NAMES, QFormat.INT4_GPTQ),
    "compressed-tensors, two equal groups": (compressed_of_rows, EQUAL, QFormat.INT4_GPTQ),
    "fp8 of Transformers": (fp8_of_transformers, FP8 | {"modules_to_not_convert": ["lm_head"]}, QFormat.FP8),
    "int8 of compressed-tensors": (int8_of_compressed, IN_INT8, QFormat.INT8_SQ),
    "nvfp4 of compressed-tensors": (nvfp4_of_compressed, IN_NVFP4, QFormat.NVFP4),
}
MODULES = {"attention.dense": "self_attn.o_proj", "mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj"}
MODULES |= {"mlp.proj": "mlp.down_proj"}


@pytest.mark.parametrize("name", RIGHT)
def test_a_checkpoint_has_the_weights_that_a_folder_means(name, tmp_path) -> None:
    write, block, qformat = RIGHT[name]
    values = folder(tmp_path / "given", write, block)
    group = GROUP if block.get("group_size") == GROUP else 128
    quantize(tmp_path / "given", tmp_path / "out", quant_spec(qformat, group_size=group), (), CALIBRATION)
    assert verify(tmp_path / "out") == []
    checkpoint = Checkpoint(tmp_path / "out")
    for layer in range(checkpoint.config.num_hidden_layers):
        found = {part: dequantize(checkpoint, f"transformer.layers.{layer}.{part}") for part in MODULES}
        expected = {part: values[f"model.layers.{layer}.{stem}"] for part, stem in MODULES.items()}
        found["qkv"] = dequantize(checkpoint, f"transformer.layers.{layer}.attention.qkv")
        expected["qkv"] = np.concatenate([values[f"model.layers.{layer}.self_attn.{x}_proj"] for x in "qkv"])
        for part, each in expected.items():
            # zero points are stored times the scale, in bfloat16
            points = 2**-8 * float(np.abs(each).max()) if write in (gptq_with_borrow, gptq_v2) else 0
            np.testing.assert_allclose(found[part], each, rtol=1e-6, atol=points + 1e-7, err_msg=part)


def blocks_fp8(weight: Array) -> Written:
    leaves, value = fp8_of_transformers(weight)
    return {"weight": leaves["weight"], "weight_scale_inv": torch.ones(len(weight) // 128 + 1, 6)}, value


def quanto(weight: Array) -> Written:
    return {"weight._data": weight.astype(np.int8), "weight._scale": np.ones((len(weight), 1), np.float32)}, weight


def mlx(weight: Array) -> Written:
    codes, scales, value = signed(weight)
    return {"weight": pack(codes).view(np.uint32), "scales": scales, "biases": -8 * scales}, value


UNDECLARED = {
    "quanto": (quanto, None, r"'.*_proj.weight._data' of type I8.*written by optimum-quanto"),
    "MLX without a block": (mlx, None, r"'.*_proj.weight' of type U32.*written by MLX"),
    "GPTQ without a block": (gptq_v2, None, r"qweight' of type I32, and nothing says.*AutoGPTQ or AutoAWQ"),
    "FP8 without a block": (fp8_of_transformers, None, r"of type F8_E4M3, and nothing says.*an FP8 library"),
}
DECLARED = {
    "MLX": (mlx, {"group_size": 32, "bits": 4}, {"quantization": {"group_size": 32, "bits": 4}}, "quant_method='mlx'"),
    "old bitsandbytes": (quanto, {"load_in_8bit": True}, {}, "quant_method='bitsandbytes'"),
    "8 bits": (auto_round, AUTO_ROUND | {"bits": 8}, {}, "bits=8. It can be 4"),
    "MXFP8": (auto_round, AUTO_ROUND | {"bits": 8, "data_type": "mx_fp"}, {}, "data_type='mx_fp'. It can be 'int'"),
    "a layer in 8 bits": (
        auto_round, AUTO_ROUND | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}}, {},
        r"extra_config.model.layers.0.mlp.up_proj.bits=8. It can be 4\.",
    ),
    "a layer in other groups": (
        auto_round, AUTO_ROUND | {"extra_config": {"down_proj": {"bits": 4, "group_size": 16}}}, {},
        r"extra_config.down_proj.group_size=16. It can be 32\.",
    ),
    "a layer left out": (
        lambda weight: ({"weight": weight}, weight), GPTQ, {}, "but lacks the tensor '.*qweight'. It has weight",
    ),
    "a layer not among the targets": (
        lambda weight: ({"weight": weight}, weight), OF_NAMES, {}, "lacks the tensor '.*weight_packed'. It has weight",
    ),
    "FP8 in blocks": (blocks_fp8, FP8 | {"weight_block_size": [128, 128]}, {}, r"weight_block_size=\[128, 128\]"),
    "FP8 in INT8": (int8_of_compressed, FP8, {}, "'.*q_proj.weight' is I8. It can be F8_E4M3"),
    "another group": (auto_round, AUTO_ROUND | {"group_size": 64}, {}, r"qzeros' has the shape \[8, 32\]"),
    "two groups": (
        compressed_of_rows,
        EQUAL | {"config_groups": EQUAL["config_groups"] | {"mlp": {"targets": ["Linear"], "weights": INT8}}},
        {}, "number of different config_groups=2. It can be 1",
    ),
    "dynamic INT8": (
        int8_of_compressed,
        compressed("int-quantized", INT8 | {"strategy": "channel"}, INT8 | {"strategy": "token", "dynamic": True}),
        {}, "input_activations.strategy='token'. It can be 'tensor'",
    ),
    "a text": (None, "gptq", {}, "quantization_config='gptq'. It must be an object"),
}  # fmt: skip


def refusal(given: Path) -> str:
    config = json.loads((given / "config.json").read_text())
    usual = {"qformat": QFormat.INT4_GPTQ, "group_size": GROUP, "kv_cache": KvFormat.AUTO, "world_size": 1}
    try:
        return str(UserError.of(import_faults(given, config, **usual)))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", [*UNDECLARED, *DECLARED])
def test_what_cannot_be_taken_over_is_refused_by_its_name(name, tmp_path) -> None:
    write, block, message = UNDECLARED[name] if name in UNDECLARED else (*DECLARED[name][:2], DECLARED[name][3])
    folder(tmp_path / "given", write, block, DECLARED[name][2] if name in DECLARED else None)
    assert re.search(message, found := refusal(tmp_path / "given")), found
    if name in UNDECLARED:
        with pytest.raises(UserError, match="nothing says how it is quantized"):
            quantize(tmp_path / "given", tmp_path / "out", quant_spec(QFormat.NONE), (), CALIBRATION)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("write", "block", "added", "message"),
    [
        (auto_round, GPTQ, "mlp.up_proj.weight", r"up_proj\.weight' and '.*up_proj\.qweight', two forms of one tensor"),
        (fp8_of_transformers, FP8, "mlp.up_proj.weight_scale", r"weight_scale' and '.*up_proj\.weight_scale_inv', two"),
        (fp8_of_transformers, FP8, "self_attn.k_scale", r"attn\.k_scale' and '.*attn\.k_proj\.k_scale', two"),
        (
            None,
            None,
            "self_attn.q_proj.weight",
            r"holds one tensor twice: '.*q_proj\.weight' in a\.safetensors, '.*b\.",
        ),
    ],
)
def test_two_forms_of_one_tensor_are_refused(write, block, added, message, tmp_path) -> None:
    """None of them is taken in silence; of 16 bit without an index, every file is read."""
    given = tmp_path / "given"
    folder(given, write, block)
    more = {f"model.layers.0.{added}": torch.ones(1)}
    if write is None:
        (given / "model.safetensors").rename(given / "a.safetensors")
        save_file(more, given / "b.safetensors")
    else:
        scales = {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)} if added.endswith("k_scale") else {}
        save_file(load_file(given / "model.safetensors") | more | scales, given / "model.safetensors")
    assert re.search(message, found := refusal(given)), found
    assert "Remove the one that is not meant" in found
    with pytest.raises(UserError, match=message):
        quantize(
            given,
            tmp_path / "out",
            quant_spec({auto_round: QFormat.INT4_GPTQ, fp8_of_transformers: QFormat.FP8}.get(write, QFormat.NONE)),
            (),
            CALIBRATION,
        )


def test_files_beside_config_json_declare_too(tmp_path) -> None:
    """AutoGPTQ before 0.5 and AutoAWQ before 0.1.7; quanto's list of linears; a head in 4 bits that none declares."""
    for name, block, write in (
        ("quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False}, gptq_v2),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"},
            auto_round_awq,
        ),
    ):
        values = folder(tmp_path / name, write, None)
        (tmp_path / name / name).write_text(
            json.dumps(block | ({"checkpoint_format": "gptq_v2"} if "bits" in block else {}))
        )
        quantize(
            tmp_path / name, tmp_path / f"{name}.out", quant_spec(QFormat.INT4_GPTQ, group_size=GROUP), (), CALIBRATION
        )
        found = dequantize(Checkpoint(tmp_path / f"{name}.out"), "transformer.layers.1.mlp.proj")
        np.testing.assert_allclose(found, values["model.layers.1.mlp.down_proj"], atol=1e-2)
    folder(tmp_path / "quanto", None, None)
    (tmp_path / "quanto/quanto_qmap.json").write_text("{}")
    assert "quant_method='quanto'" in refusal(tmp_path / "quanto")
    folder(tmp_path / "head", auto_round, AUTO_ROUND)
    tensors = load_file(tmp_path / "head/model.safetensors")
    tensors["lm_head.qweight"] = torch.zeros(8, 8, dtype=torch.int32)
    save_file(tensors, tmp_path / "head/model.safetensors")
    assert "with 'lm_head.qweight' of type I32" in refusal(tmp_path / "head")


def test_cache_scales_beside_nvfp4_linears_are_read(tmp_path) -> None:
    """compressed-tensors' converter keeps the names that ModelOpt gave them, in k_proj and v_proj."""
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    folder(tmp_path / "given", nvfp4_of_compressed, IN_NVFP4 | {"kv_cache_scheme": cache})
    tensors = load_file(tmp_path / "given/model.safetensors")
    stems = {name.rpartition(".")[0] for name in tensors if "k_proj." in name or "v_proj." in name}
    more = {f"{stem}.{stem[-6]}_scale": torch.tensor(1.5 if stem.endswith("k_proj") else 2.5) for stem in stems}
    save_file(tensors | more, tmp_path / "given/model.safetensors", metadata={"format": "pt"})
    quantize(tmp_path / "given", tmp_path / "out", quant_spec(QFormat.NVFP4, KvFormat.FP8), (), CALIBRATION)
    assert verify(tmp_path / "out") == []
    name = "transformer.layers.1.attention.{}_cache_scaling_factor"
    found = [float(Checkpoint(tmp_path / "out").tensor(name.format(each))[0]) for each in ("k", "v", "kv")]
    assert found == [1.5, 2.5, 2.5]
