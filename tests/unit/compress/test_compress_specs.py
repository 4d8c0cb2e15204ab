"""What formats read of the settings, and what importing the package costs."""

import pytest

from pipelines.compress.config import CalibrationSettings
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.settings.compose import load


@pytest.mark.parametrize(
    "words",
    [
        ["quant.group_size=0"],
        ["quant.smoothquant_alpha=1.5"],
        ["quant.awq_alpha_step=0"],
        ["calibration.seq_len=0"],
        ["sparsity.method=random"],
    ],
)
def test_values_out_of_range_are_refused_by_name(words) -> None:
    with pytest.raises(UserError, match=words[0].partition("=")[0]):
        load(words)


def test_groups_are_the_formats() -> None:
    """AWQ has the given group, NVFP4 always 16, FP8 none."""
    assert FORMATS[QFormat.INT4_AWQ].weights.group_size(64) == 64
    assert FORMATS[QFormat.NVFP4].weights.group_size(64) == 16
    assert FORMATS[QFormat.FP8].weights.group_size(64) == 0


def test_awq_uses_32_texts_at_most() -> None:
    assert CalibrationSettings(size=512).sequences_for(QFormat.INT4_AWQ) == 32
    assert CalibrationSettings(size=8).sequences_for(QFormat.W4A8_AWQ) == 8
    assert CalibrationSettings(size=512).sequences_for(QFormat.FP8) == 512
