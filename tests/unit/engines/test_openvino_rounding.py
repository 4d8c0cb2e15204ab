"""Rounding inside the graph, code by code, through a saved file as an engine has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

ov = pytest.importorskip("openvino")

from openvino import opset13 as op  # noqa: E402 - after the skip

from pipelines.engines.openvino.weights import round_e4m3, to_fp8, to_int8, to_nvfp4  # noqa: E402

PRECISIONS = ["f32", "bf16"]
Graph = Callable[[Any], Any]


def run(graph: Graph, values: np.ndarray, folder: Path, precision: str) -> np.ndarray:
    """Save, read, compile and run a graph of one input [B, T, I]."""
    x = op.parameter([-1, -1, values.shape[-1]], ov.Type.f32)
    ov.save_model(ov.Model([graph(x)], [x]), folder / "m.xml", compress_to_fp16=False)
    properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1}
    compiled = ov.Core().compile_model(folder / "m.xml", "CPU", properties)
    return np.asarray(compiled(values.astype(np.float32))[0])


def e4m3(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def awkward_values() -> np.ndarray:
    """Every E4M3 value, every tie between two, both one float32 step to either side, and random values."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.unique(codes[np.isfinite(codes)])
    exact = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, [464.0, 465.0, 1e6, -1e6]]).astype(np.float32)
    near = [np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
    random = np.random.default_rng(0)
    drawn = random.normal(size=4096) * np.exp2(random.integers(-12, 10, size=4096))
    return np.resize(np.concatenate([exact, *near, drawn]), (1, 88, 64)).astype(np.float32)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_e4m3_is_exact(precision: str, tmp_path: Path) -> None:
    """The same code as ml_dtypes for every value, also where the rest of the graph computes in bf16."""
    values = awkward_values()
    np.testing.assert_array_equal(run(round_e4m3, values, tmp_path, precision), e4m3(values))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fp8_rounds_to_multiples_of_the_scale(precision: str, tmp_path: Path) -> None:
    values, scale = awkward_values(), np.float32(0.0371)
    expected = e4m3(values * (np.float32(1) / scale)) * scale
    np.testing.assert_array_equal(run(lambda x: to_fp8(x, scale), values, tmp_path, precision), expected)


def test_int8_has_256_levels(tmp_path: Path) -> None:
    """Scale 0.5: 0.3 -> 0.5, 0.2 -> 0, 100 -> 63.5 (127), -100 -> -64 (-128)."""
    values = np.array([[[0.3, 0.2, 100, -100]]])
    assert run(lambda x: to_int8(x, np.float32(0.5)), values, tmp_path, "f32").tolist() == [[[0.5, 0.0, 63.5, -64.0]]]


def test_nvfp4_scales_each_block_to_6(tmp_path: Path) -> None:
    """Tensor scale 1. Block 1 has 12: scale 2, so 12 -> 6, 5 -> 2.5 -> 2 (tie to even), -1 -> -0.5, 0.4 -> 0.2 -> 0.

    Block 2 has 0.6: scale 0.1 is 0.1015625 in E4M3; 0.6 / it = 5.9 -> 6 -> 0.609375, 0.05 -> 0.49 -> 0.5 of it.
    Block 3 is zero: its scale is taken as 1.
    """
    blocks = np.zeros((1, 1, 48))
    blocks[0, 0, :4] = [12, 5, -1, 0.4]
    blocks[0, 0, 16:18] = [0.6, 0.05]
    found = run(lambda x: to_nvfp4(x, np.float32(1)), blocks, tmp_path, "f32")[0, 0]
    assert found[:4].tolist() == [12.0, 4.0, -1.0, 0.0]
    assert found[16:18].tolist() == [0.609375, 0.05078125]
    assert not found[18:].any()
