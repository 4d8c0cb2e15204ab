"""Run-time options of the CPU engine, checked when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.options import OpenVinoOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference_precision": "bf61"}, r"inference_precision='bf61'.*Did you mean 'bf16'"),
        ({"kv_cache_precision": "fp8"}, r"kv_cache_precision='fp8'.*auto, f32, bf16, f16, u8, u4"),
        ({"num_threads": 0}, "engine.openvino.num_threads='0'.*greater than or equal to 1"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes='-1'"),
        ({"num_draft_tokens": 0}, "num_draft_tokens='0'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OpenVinoOptions.judged(options, "engine.openvino.")
