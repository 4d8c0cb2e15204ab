"""Run-time options of the CPU engine, checked when they are made."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.domain.errors import UserError
from pipelines.engines.config import OpenVinoSettings
from pipelines.engines.limits import EngineLimits
from pipelines.engines.openvino.runtime import OpenVinoOptions
from pipelines.engines.openvino.serving_options import ServingOptions
from tests.support.engine_folders import write_engine
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec, tensorrt_llm

CHOSEN = {"inference_precision": "f32", "num_threads": 3, "kv_cache_bytes": 2**20, "kv_cache_precision": "u8"}
CHOSEN |= {"dynamic_quantization": "32"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference_precision": "bf61"}, r"inference_precision='bf61'.*Did you mean 'bf16'"),
        ({"kv_cache_precision": "fp8"}, r"kv_cache_precision='fp8'.*auto, f32, bf16, f16, u8, u4"),
        ({"dynamic_quantization": 64}, "dynamic_quantization='?64'?.*auto, off, 32, 128"),
        ({"num_threads": 0}, "engine.openvino.num_threads='0'.*greater than or equal to 1"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes='-1'"),
        ({"num_draft_tokens": 0}, "num_draft_tokens='0'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OpenVinoOptions.judged(options, "engine.openvino.")


def test_every_setting_reaches_the_server_through_the_repository(tmp_path: Path) -> None:
    """The settings are written as parameters and read from them by their names alone, so a new one needs no more."""
    run_time = OpenVinoSettings.model_fields.keys() - set(OpenVinoSettings.DECIDE_BYTES)
    assert CHOSEN.keys() == run_time, "give the new setting another value than its default"
    settings = OpenVinoSettings.model_validate(CHOSEN)
    spec = RepositorySpec("openvino", "model", "none", options=settings.model_dump())
    written = tensorrt_llm(TritonSettings(), EngineLimits.load(write_engine(tmp_path / "engine", "openvino")), spec)
    parameters = {name: {"string_value": value} for name, value in written.items()}
    read = ServingOptions.from_model_config({"parameters": parameters}, tmp_path).engine
    assert read.model_dump(include=set(CHOSEN)) == CHOSEN
