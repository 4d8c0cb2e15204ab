"""Tensors of GPTQ folders mean what AutoGPTQ computes with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.checkpoint.given import decode
from pipelines.checkpoint.tensors import TensorFile
from pipelines.domain.errors import UserError
from tests.support.gptq_folder import pack

PACKED = Path(__file__).parent / "gptq"
"""Written by scripts/make_gptq_fixture.py with AutoGPTQ 0.7.1."""


def weights(linear) -> np.ndarray:
    """Return the weight [O, I]: (code + 8 - zero point) * scale."""
    out, groups = linear.scales.shape
    codes = linear.codes.astype(np.float32).reshape(out, groups, -1) + 8 - linear.points[..., None]
    return (codes * linear.scales[..., None]).reshape(out, -1)


@pytest.mark.parametrize("name", ["symmetric", "zero_points"])
def test_a_decoded_linear_is_what_autogptq_computes_with(name) -> None:
    file = TensorFile(PACKED / f"{name}.safetensors")
    linear = decode(file, "linear", {"quant_method": "gptq"})
    np.testing.assert_allclose(weights(linear), file["computed"], atol=1e-5)
    assert (linear.points == 8).all() == (name == "symmetric")


@pytest.mark.parametrize("name", ["symmetric", "zero_points"])
def test_the_packing_of_our_tests_is_that_of_autogptq(name) -> None:
    file = TensorFile(PACKED / f"{name}.safetensors")
    linear = decode(file, "linear", {"quant_method": "gptq"})
    assert (file["linear.qweight"] == pack(linear.codes.view(np.uint8) + np.uint8(8)).T).all()
    assert (pack(linear.points.T.astype(int) - 1) == file["linear.qzeros"]).all()


def test_the_second_version_stores_zero_points_as_they_are() -> None:
    file = TensorFile(PACKED / "symmetric.safetensors")
    tensors = dict(file) | {"linear.qzeros": file["linear.qzeros"] + np.int32(0x11111111)}
    linear = decode(tensors, "linear", {"quant_method": "gptq", "checkpoint_format": "gptq_v2"})
    np.testing.assert_allclose(weights(linear), file["computed"], atol=1e-5)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(UserError, match=r"lacks the tensor 'linear\.scales'"):
        decode(
            {"linear.qweight": np.zeros((8, 8), np.int32), "linear.qzeros": np.zeros((1, 1), np.int32)}, "linear", {}
        )
