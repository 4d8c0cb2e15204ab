"""Whatever the settings, the text that is written reads back as the same configuration and holds no placeholder."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.engines.limits import EngineLimits
from pipelines.engines.openvino.serving_options import ServingOptions
from pipelines.engines.registry import describe
from pipelines.settings.base import LARGEST
from tests.support.own_tensors import OWN
from triton_repo.config import TritonSettings
from triton_repo.generate import llmapi_config, parse, repository_configs, to_text
from triton_repo.parameters import RepositorySpec, setting_faults

LIMITS = EngineLimits(
    flavour="tensorrt_llm",
    version="1.2.1",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    logits_dtype="float32",
    quant_algo=None,
    vocab_size=1920,
    tp_size=1,
    pp_size=1,
    world_size=1,
    max_batch_size=8,
    max_input_len=64,
    max_seq_len=128,
    max_num_tokens=256,
    max_beam_width=4,
    gather_context_logits=False,
    gather_generation_logits=False,
    paged_context_fmha=True,
)
PLAIN_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1)
PATHS = st.none() | PLAIN_TEXT.filter(lambda text: text.strip() and "${" not in text)
COUNTS = st.integers(0, LARGEST)
SIZES = st.integers(1, LARGEST)
PROCESSES = st.integers(1, 1024)
GROUPS = st.none() | st.lists(st.lists(COUNTS, min_size=1).map(tuple), min_size=1).map(tuple)

ANY_SETTINGS = st.builds(
    TritonSettings,
    triton_max_batch_size=st.none() | SIZES,
    decoupled_mode=st.booleans(),
    max_queue_size=COUNTS,
    max_queue_delay_microseconds=COUNTS,
    preprocessing_instance_count=PROCESSES,
    bls_instance_count=PROCESSES,
    add_special_tokens=st.booleans(),
    accumulate_tokens=st.booleans(),
    batch_scheduler_policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    max_beam_width=st.none() | SIZES,
    kv_cache_free_gpu_mem_fraction=st.floats(0, 1, exclude_min=True),
    max_tokens_in_paged_kv_cache=st.none() | SIZES,
    max_attention_window_size=st.none() | st.lists(SIZES, min_size=1).map(tuple),
    sink_token_length=st.none() | COUNTS,
    gpu_device_ids=GROUPS,
    lora_prefetch_dir=PATHS,
    decoding_mode=st.sampled_from([None, "top_k", "medusa"]),
    xgrammar_tokenizer_info_path=PATHS,
)
SPECS = st.builds(
    RepositorySpec,
    flavour=st.sampled_from(["openvino", "tensorrt_llm"]),
    label=PLAIN_TEXT,
    variant=st.just("fp8"),
    enable_kv_cache_reuse=st.booleans(),
    enable_chunked_context=st.booleans(),
    options=st.dictionaries(st.sampled_from(["num_threads", "kv_cache_bytes"]), st.none() | SIZES),
)


@settings(max_examples=60)
@given(ANY_SETTINGS, SPECS, st.sampled_from(["float32", "float16", "bfloat16"]))
def test_every_text_reads_back_and_holds_no_placeholder(given_settings, spec, logits_dtype):
    limits = replace(LIMITS, logits_dtype=logits_dtype)
    for config in (
        *repository_configs(given_settings, limits, spec).values(),
        llmapi_config(given_settings),
    ):
        text = to_text(config)
        assert parse(text) == config
        assert "${" not in text


@pytest.mark.parametrize(
    ("flavour", "backend", "batch"), [("openvino", "python", 8), ("tensorrt_llm", "tensorrtllm", 8)]
)
def test_the_flavours_differ_in_the_backend(flavour, backend, batch):
    limits = replace(LIMITS, dtype="float16")  # the CPU engine's type of prompt tables
    configs = repository_configs(TritonSettings(), limits, RepositorySpec(flavour, "m", "none"))
    assert configs["tensorrt_llm"].backend == backend
    assert {config.max_batch_size for config in configs.values()} == {batch}
    cpu = repository_configs(TritonSettings(), limits, RepositorySpec("openvino", "m", "none"))
    for name in ("preprocessing", "postprocessing", "tensorrt_llm_bls"):
        for kind, ours, shared in (
            ("inputs", cpu[name].input, configs[name].input),
            ("outputs", cpu[name].output, configs[name].output),
        ):
            own = OWN.get(name, {}).get(kind, []) if flavour != "openvino" else []
            assert [tensor.name for tensor in ours[len(shared) :]] == [tensor["name"] for tensor in own]
            del ours[len(shared) :]
        if flavour != "openvino":
            configs[name].ClearField("dynamic_batching")
        assert configs[name] == cpu[name]


def test_decoupled_and_queue_reach_the_models():
    chosen = TritonSettings(decoupled_mode=False, max_queue_size=7, max_queue_delay_microseconds=50)
    configs = repository_configs(chosen, LIMITS, RepositorySpec("tensorrt_llm", "m", "none"))
    assert [configs[name].model_transaction_policy.decoupled for name in ("tensorrt_llm", "tensorrt_llm_bls")] == [
        False,
        False,
    ]
    batching = configs["tensorrt_llm"].dynamic_batching
    assert (batching.default_queue_policy.max_queue_size, batching.max_queue_delay_microseconds) == (7, 50)
    assert list(batching.preferred_batch_size) == [8]


def test_the_cpu_engine_bounds_its_queue_itself():
    """Triton's batcher may leave a request alone for half a second in front of a Python model."""
    chosen = TritonSettings(max_queue_size=7)
    configs = repository_configs(chosen, LIMITS, RepositorySpec("openvino", "m", "none"))
    assert not any(config.HasField("dynamic_batching") for config in configs.values())
    raw = {name: {"string_value": each.string_value} for name, each in configs["tensorrt_llm"].parameters.items()}
    assert ServingOptions.from_model_config({"parameters": raw}, Path("/repo")).max_queue_size == 7
    [fault] = setting_faults(TritonSettings(max_queue_delay_microseconds=50), describe("openvino"))
    assert "triton.max_queue_delay_microseconds=50 has no effect on engine=openvino" in str(fault)


def test_one_instance_per_group_of_gpus():
    chosen = TritonSettings(gpu_device_ids=((0, 1), (2, 3)))
    configs = repository_configs(chosen, LIMITS, RepositorySpec("tensorrt_llm", "m", "none"))
    assert configs["tensorrt_llm"].instance_group[0].count == 2
    assert configs["tensorrt_llm"].parameters["gpu_device_ids"].string_value == "0,1;2,3"


def test_ids_beyond_the_vocabulary_are_folded_on_the_cpu_alone():
    """The model reads the parameter; TensorRT-LLM has none."""
    chosen = TritonSettings(fold_token_ids=True)
    config = repository_configs(chosen, LIMITS, RepositorySpec("openvino", "m", "none"))["tensorrt_llm"]
    raw = {name: {"string_value": value.string_value} for name, value in config.parameters.items()}
    assert ServingOptions.from_model_config({"parameters": raw}, Path("/repo")).fold_token_ids
    config = repository_configs(TritonSettings(), LIMITS, RepositorySpec("openvino", "m", "none"))["tensorrt_llm"]
    assert "openvino_fold_token_ids" not in config.parameters
    (fault,) = setting_faults(chosen, describe("tensorrt_llm"))
    assert "fold_token_ids=true is not supported by engine=tensorrt_llm" in str(fault)
    assert setting_faults(chosen, describe("openvino")) == []
