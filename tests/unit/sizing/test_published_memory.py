"""The published memory of an engine: LLaMA-7B at 16 bit with 20,480 tokens of KV cache."""

import json
from dataclasses import replace

import pytest

from pipelines.domain.formats import QFormat
from pipelines.domain.units import MIB
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.memory import device_memory
from pipelines.predict.performance.models import model_named
from pipelines.predict.performance.performance import Setup
from tests.conftest import REFERENCE

CASE = json.loads((REFERENCE / "seed_cases.json").read_text())["engine_memory_mib"]


def test_the_kv_cache_and_the_weights_are_the_published_ones():
    setup = Setup(model_named("llama-2-7b"), gpu_named("a100_sxm_80gb"), QFormat.NONE)
    sizes = replace(setup.sizes(max_batch_size=8), max_kv_tokens=CASE["kv_tokens"])
    memory = device_memory(sizes, 80e9)
    assert memory.kv_token_bytes == CASE["kv_bytes_per_token"]
    assert memory.kv_pool / MIB == CASE["kv"]
    assert memory.weights / MIB == pytest.approx(CASE["weights"], rel=0.001)


def test_the_published_total_is_its_parts_but_for_rounding():
    """8,384.07 + 12,858.21 + 10,240 = 31,482.28; published as 31,482.27."""
    total = CASE["activation"] + CASE["weights"] + CASE["kv"]
    assert round(total, 2) == 31482.28
    assert total == pytest.approx(CASE["total"], abs=0.011)
