"""Specs refuse what would be ignored, and say what was given."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipelines.compress import CalibrationSpec, QuantSpec, SparsitySpec
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, QFormat


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"qformat": QFormat.FP8, "group_size": 0}, "group_size=0"),
        ({"qformat": QFormat.FP8, "smoothquant_alpha": 0.5}, "smoothquant_alpha=0.5 does not apply to fp8"),
        ({"qformat": QFormat.INT8_SQ, "smoothquant_alpha": 1.5}, "smoothquant_alpha=1.5 is out of range"),
        ({"qformat": QFormat.FP8, "awq_alpha_step": 0.1}, "awq_alpha_step=0.1 does not apply to fp8"),
        ({"qformat": QFormat.INT4_AWQ, "awq_alpha_step": 0.0}, "awq_alpha_step=0.0 is out of range"),
    ],
)
def test_a_quant_spec_refuses(arguments, message) -> None:
    with pytest.raises(UserError, match=message):
        QuantSpec(**arguments)


def test_all_faults_come_at_once() -> None:
    with pytest.raises(UserError) as caught:
        QuantSpec(QFormat.FP8, group_size=-1, smoothquant_alpha=0.5)
    assert len(caught.value.faults) == 2


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(UserError, match=r"calibration\.seq_len=0 is too small"):
        CalibrationSpec(seq_len=0)


def test_an_unknown_sparsity_is_refused() -> None:
    with pytest.raises(UserError, match=r"sparsity\.method='random'"):
        SparsitySpec("random")  # type: ignore[arg-type]


def test_groups_are_the_formats() -> None:
    """AWQ has the given group, NVFP4 always 16, FP8 none."""
    assert FORMATS[QFormat.INT4_AWQ].weights.group_size(64) == 64
    assert FORMATS[QFormat.NVFP4].weights.group_size(64) == 16
    assert FORMATS[QFormat.FP8].weights.group_size(64) == 0


def test_awq_uses_32_texts_at_most() -> None:
    assert CalibrationSpec(size=512).sequences_for(QFormat.INT4_AWQ) == 32
    assert CalibrationSpec(size=8).sequences_for(QFormat.W4A8_AWQ) == 8
    assert CalibrationSpec(size=512).sequences_for(QFormat.FP8) == 512


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Planning imports it; torch would cost seconds."""
    heavy = "{'torch', 'transformers', 'modelopt', 'pyarrow', 'numpy'}"
    code = f"import sys, pipelines.compress; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
