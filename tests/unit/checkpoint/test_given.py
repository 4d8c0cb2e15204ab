"""Tensors of folders that other libraries quantized mean what these libraries compute with them."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.checkpoint.declarations import quantization_of
from pipelines.checkpoint.packings import Fp8Linear, decode_fp8, decode_int4, decode_modelopt, fused_fp8, kv_scales
from pipelines.checkpoint.tensors import TensorFile
from pipelines.domain.errors import UserError
from tests.support.packed_folder import awq_order, pack

PACKED = Path(__file__).parent / "gptq"
"""Packed by AutoGPTQ 0.7.1, whose own layer computed the weights."""


def weights(linear) -> np.ndarray:
    """Return the weight [O, I]: (code + 8 - zero point) * scale."""
    out, groups = linear.scales.shape
    codes = linear.codes.astype(np.float32).reshape(out, groups, -1) + 8 - linear.points[..., None]
    return (codes * linear.scales[..., None]).reshape(out, -1)


@pytest.mark.parametrize("name", ["symmetric", "zero_points"])
def test_a_decoded_linear_is_what_autogptq_computes_with(name) -> None:
    file = TensorFile(PACKED / f"{name}.safetensors")
    linear = decode_int4(file, "linear", "gptq")
    np.testing.assert_allclose(weights(linear), file["computed"], atol=1e-5)
    assert (linear.points == 8).all() == (name == "symmetric")


@pytest.mark.parametrize("name", ["auto_round", "gptqmodel"])
def test_a_linear_of_a_real_folder_is_what_its_library_computes_with(name) -> None:
    """AutoRound 0.16.1, with scales of either sign, and GPTQModel 7.6.0, from folders that `make test-peers` made."""
    file = TensorFile(PACKED / f"{name}.safetensors")
    linear = decode_int4(file, "linear", "gptq")
    np.testing.assert_allclose(weights(linear), file["computed"], atol=1e-6)
    assert (linear.points == 8).all() == (name == "auto_round")
    assert (file["linear.scales"] < 0).any() == (name == "auto_round")


@pytest.mark.parametrize("name", ["symmetric", "zero_points"])
def test_the_packing_of_our_tests_is_that_of_autogptq(name) -> None:
    file = TensorFile(PACKED / f"{name}.safetensors")
    linear = decode_int4(file, "linear", "gptq")
    assert (file["linear.qweight"] == pack(linear.codes.view(np.uint8) + np.uint8(8)).T).all()
    assert (pack(linear.points.T.astype(int) - 1) == file["linear.qzeros"]).all()


OTHERS = Path(__file__).parent
"""awq and compressed_tensors: packed and unpacked by AutoAWQ 0.2.9 and compressed-tensors 0.20."""


@pytest.mark.parametrize(
    ("method", "name"),
    [("awq", "zero_points"), ("compressed-tensors", "symmetric"), ("compressed-tensors", "zero_points")],
)
def test_a_linear_of_another_kind_is_what_its_library_computes_with(method, name) -> None:
    """AutoAWQ unpacks to float16."""
    file = TensorFile(OTHERS / method.replace("-", "_") / f"{name}.safetensors")
    linear = decode_int4(file, "linear", "awq" if method == "awq" else "pack-quantized")
    np.testing.assert_allclose(weights(linear), file["computed"], atol=1e-3 if method == "awq" else 1e-6)
    assert (linear.points == 8).all() == (name == "symmetric")


def test_the_packing_of_our_tests_is_that_of_autoawq_and_compressed_tensors() -> None:
    file = TensorFile(OTHERS / "awq/zero_points.safetensors")
    linear = decode_int4(file, "linear", "awq")
    codes = linear.codes.view(np.uint8) + np.uint8(8)
    assert (file["linear.qweight"] == pack(awq_order(codes.T))).all()
    assert (file["linear.qzeros"] == pack(awq_order(linear.points.T))).all()
    file = TensorFile(OTHERS / "compressed_tensors/zero_points.safetensors")
    linear = decode_int4(file, "linear", "pack-quantized")
    assert (file["linear.weight_packed"] == pack(linear.codes.view(np.uint8) + np.uint8(8))).all()
    assert (file["linear.weight_zero_point"] == pack(linear.points.T).T).all()


def test_tensors_that_do_not_go_together_are_named() -> None:
    file = TensorFile(OTHERS / "awq/zero_points.safetensors")
    tensors = dict(file) | {"linear.scales": file["linear.scales"][:, :8]}
    with pytest.raises(UserError, match=r"'linear' do not match: 32 x 64 weights, scales \[8, 2\]"):
        decode_int4(tensors, "linear", "awq")


def test_the_second_version_stores_zero_points_as_they_are() -> None:
    file = TensorFile(PACKED / "symmetric.safetensors")
    tensors = dict(file) | {"linear.qzeros": file["linear.qzeros"] + np.int32(0x11111111)}
    linear = decode_int4(tensors, "linear", "gptq_v2")
    np.testing.assert_allclose(weights(linear), file["computed"], atol=1e-5)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(UserError, match=r"lacks the tensor 'linear\.scales'"):
        decode_int4(
            {"linear.qweight": np.zeros((8, 8), np.int32), "linear.qzeros": np.zeros((1, 1), np.int32)},
            "linear",
            "gptq",
        )


def test_a_linear_in_fp8_is_what_compressed_tensors_computes_with() -> None:
    file = TensorFile(OTHERS / "compressed_tensors/fp8.safetensors")
    linear = decode_fp8(file, "linear")
    np.testing.assert_array_equal(linear.weight.astype(np.float32) * np.float32(linear.scale), file["computed"])
    assert linear.input_scale == pytest.approx(1 / 7)


def test_q_k_and_v_share_the_largest_scale() -> None:
    """The part that has it keeps its codes; the others are at most half a step of the common scale away."""
    codes = TensorFile(OTHERS / "compressed_tensors/fp8.safetensors")["linear.weight"]
    fused = fused_fp8([Fp8Linear(codes, 0.5, 0.25), Fp8Linear(codes, 2.0, 0.125)])
    assert (fused.scale, fused.input_scale) == (2.0, 0.25)
    rows = len(codes)
    assert (fused.weight[rows:].view(np.uint8) == codes.view(np.uint8)).all()
    values = codes.astype(np.float32) * 0.5
    np.testing.assert_allclose(fused.weight[:rows].astype(np.float32) * 2.0, values, rtol=1 / 16, atol=2.0 * 2**-10)


@pytest.mark.parametrize("names", [("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale")])
def test_scales_of_the_cache_are_at_least_one(names) -> None:
    tensors = {f"a.self_attn.{name}": np.array(value) for name, value in zip(names, (0.02, 1.5), strict=True)}
    assert kv_scales(tensors, "a.self_attn") == (1.0, 1.5)
    del tensors[f"a.self_attn.{names[1]}"]
    with pytest.raises(UserError, match=r"lacks the tensor 'a\.self_attn\.v_proj\.v_scale'. Set kv_cache=auto"):
        kv_scales(tensors, "a.self_attn")


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("weight", np.zeros((32, 64), np.float32), r"'linear\.weight' is float32; config\.json says"),
        ("weight_scale", np.ones((32, 1), np.float32), r"'linear\.weight_scale' holds 32 scales"),
    ],
)
def test_what_is_not_fp8_with_one_scale_is_named(leaf, value, message) -> None:
    file = TensorFile(OTHERS / "compressed_tensors/fp8.safetensors")
    with pytest.raises(UserError, match=message):
        decode_fp8(dict(file) | {f"linear.{leaf}": value}, "linear")


TYPES = {
    "weight": ("int8", (6, 4)),
    "weights_scaling_factor": ("float32", (12, 2)),
    "activation_scaling_factor": ("float32", (1,)),
    "prequant_scaling_factor": ("float16", (4,)),
}
"""Of q and k in one linear of a checkpoint, with 8 and 4 outputs of 4 inputs in groups of 2."""


def two_linears() -> dict[str, np.ndarray]:
    found = {}
    for name, out in (("q", 8), ("k", 4)):
        found[f"{name}.weight"] = np.arange(out * 2, dtype=np.uint8).reshape(out // 2, 4) + np.uint8(200)
        found[f"{name}.weight_scale"] = np.full((out, 2), out, np.float32)
        found[f"{name}.input_scale"] = np.array(0.5, np.float32)
        found[f"{name}.pre_quant_scale"] = np.array([1, 2, 3, 4], np.float32)
    return found


def test_linears_of_modelopt_are_joined() -> None:
    """Weights keep their bits, scales become what the checkpoint has, common ones are taken once."""
    given = two_linears()
    found = decode_modelopt(given, ("q", "k"), TYPES)
    assert found["weight"].tobytes() == given["q.weight"].tobytes() + given["k.weight"].tobytes()
    assert found["weights_scaling_factor"][:, 0].tolist() == [8.0] * 8 + [4.0] * 4
    assert found["activation_scaling_factor"].tolist() == [0.5]
    assert found["prequant_scaling_factor"].tolist() == [1, 2, 3, 4]
    assert {leaf: (found[leaf].dtype.name, found[leaf].shape) for leaf in found} == TYPES
    bare = {name: value for name, value in given.items() if "pre_quant" not in name}
    assert decode_modelopt(bare, ("q", "k"), TYPES)["prequant_scaling_factor"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k.input_scale", np.array(0.25, np.float32), r"'k\.input_scale' differs from 'q\.input_scale'"),
        ("k.pre_quant_scale", np.ones(4, np.float32), r"'k\.pre_quant_scale' differs from 'q\.pre_quant_scale'"),
        ("k.pre_quant_scale", None, r"lacks the tensor 'k\.pre_quant_scale'"),
        ("q.weight", np.zeros((4, 4), np.float32), r"'q\.weight' is float32; it must be int8"),
        (
            "q.weight_scale",
            np.ones((8, 1), np.float32),
            r"'q\.weight_scale' is \[8, 1\], which does not match \[12, 2\]",
        ),
        ("q.weight_scale", np.ones((12, 2), np.float32), r"'q\.weight_scale' is \[12, 2\]"),
    ],
)
def test_what_modelopt_would_not_write_is_named(name, value, message) -> None:
    given = two_linears()
    if value is None:
        del given[name]
    else:
        given[name] = value
        if name == "q.weight":
            given["k.weight"] = np.zeros((2, 4), np.float32)
    with pytest.raises(UserError, match=message):
        decode_modelopt(given, ("q", "k"), TYPES)


@pytest.mark.parametrize(
    ("config", "method"),
    [({}, "modelopt"), ({"quant_method": "fp8"}, "modelopt"), ({"quant_method": "compressed-tensors"}, None)],
)
def test_a_declaration_that_a_converter_left_behind_is_passed_over(tmp_path, config, method) -> None:
    """compressed-tensors 0.20.1 converts ModelOpt's NVFP4 and leaves hf_quant_config.json, which is true no more."""
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    block = quantization_of(tmp_path, {"quantization_config": config} if config else {})
    assert block is not None
    assert block["quant_method"] == (method or config["quant_method"])
