"""The arguments of the LLM API are those of TensorRT-LLM: names, defaults, and values that are among its choices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipelines.domain.errors import UserError
from triton_repo.llmapi import DraftTargetConfig, KvCacheConfig, LlmArgs, SchedulerConfig

REFERENCE = json.loads((Path(__file__).parent / "reference" / "llm_args.json").read_text())
CLASSES = {
    "LlmArgs": LlmArgs,
    "KvCacheConfig": KvCacheConfig,
    "SchedulerConfig": SchedulerConfig,
    "DraftTargetDecodingConfig": DraftTargetConfig,
}
ALWAYS_GIVEN = ("max_draft_len", "speculative_model")


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_is_one_of_the_librarys_with_its_default(name):
    fields = CLASSES[name].model_fields
    assert set(fields) <= set(REFERENCE[name])
    for field, info in fields.items():
        entry = REFERENCE[name][field]
        if "factory" in entry:
            assert info.default_factory is CLASSES[entry["factory"]]
        elif field not in ALWAYS_GIVEN:
            assert info.default == entry["default"], field


def test_words_are_among_the_librarys_choices():
    for policy in ("guaranteed_no_evict", "max_utilization"):
        word = SchedulerConfig.of(policy).capacity_scheduler_policy
        assert word in REFERENCE["SchedulerConfig"]["capacity_scheduler_policy"]["type"].split(" | ")


def test_what_is_written_is_read_back():
    whole = LlmArgs(
        max_seq_len=4096,
        kv_cache_config=KvCacheConfig(max_attention_window=(512, 4096), dtype="fp8"),
        speculative_config=DraftTargetConfig(max_draft_len=4, speculative_model="draft"),
    )
    text = whole.to_yaml()
    assert LlmArgs.from_yaml(text, "x") == whole
    assert yaml.safe_load(text)["kv_cache_config"]["max_attention_window"] == [512, 4096]
    assert "host_cache_size" not in text  # what has no value is left to the library


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: 0", "max_batch_size=0 is not valid"),
        ("kv_cache_config: {free_gpu_memory_fraction: 1.5}", r"free_gpu_memory_fraction=1\.5"),
        ("enable_trt_overlap: true", "enable_trt_overlap=True is not valid: extra inputs"),
        ("max_num_tokens: 512", "max_num_tokens=512 is less than max_input_len=1024"),
        ("[", "model.yaml is not valid YAML"),
    ],
)
def test_a_wrong_argument_is_named(text, message):
    with pytest.raises(UserError, match=message):
        LlmArgs.from_yaml(text, "model.yaml")
