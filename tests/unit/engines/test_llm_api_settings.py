"""A file of NVIDIA's gives values to our settings, or contradicts them and is refused."""

import pytest
import yaml

from pipelines.domain.errors import UserError
from pipelines.engines.tensorrt_llm.llm_api import LlmApiOptions, doubts, merged, tables_of
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.unit.core.test_machine import MACHINE

ENGINE = "engine=tensorrt_llm_llmapi"
OPTIONS = {
    "tensor_parallel_size": 4,
    "max_batch_size": 16,
    "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.8, "enable_partial_reuse": False},
    "moe_config": {"backend": "TRTLLM"},
    "trust_remote_code": True,
}


@pytest.fixture
def nvidias(tmp_path):
    path = tmp_path / "nvidias.yaml"
    path.write_text(yaml.safe_dump(OPTIONS))
    return path


def test_the_values_of_a_file_become_settings_where_there_are_any(nvidias):
    settings = load([ENGINE, f"llm_api.file={nvidias}", "llm_api.extra={moe_config: {max_num_tokens: 64}}"])
    assert (settings.build.tp_size, settings.build.max_batch_size) == (4, 16)
    assert settings.build.given("max_batch_size")  # no advice and no load changes it
    assert (settings.kv_cache.dtype, settings.triton.kv_cache_free_gpu_mem_fraction) == ("fp8", 0.8)
    asked = LlmApiOptions("1.3.0rc3", settings.llm_api.of_file, settings.llm_api.extra)
    assert asked.others == {
        "kv_cache_config": {"enable_partial_reuse": False},
        "moe_config": {"backend": "TRTLLM", "max_num_tokens": 64},
    }


def test_a_setting_and_a_file_that_differ_are_refused_and_neither_wins(nvidias):
    words = [ENGINE, f"llm_api.file={nvidias}", "build.max_batch_size=8", "parallel=tp2"]
    with pytest.raises(UserError) as error:
        load(words)
    assert sorted(fault.message for fault in error.value.faults) == [
        "llm_api.file sets max_batch_size=16, but build.max_batch_size=8 is given.",
        "llm_api.file sets tensor_parallel_size=4, but build.tp_size=2 is given.",
    ]
    assert load([ENGINE, f"llm_api.file={nvidias}", "build.max_batch_size=16"]).build.max_batch_size == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "holds a list"),
        ("{a: [", r"is not valid YAML: line 1, column 6: [^\"]*$"),
        (None, "is not a file"),
        ("", "holds a NoneType"),
    ],
)
def test_a_file_that_holds_no_options_is_refused(tmp_path, content, message):
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        load([ENGINE, f"llm_api.file={path}"])


def test_what_is_stored_without_such_options_is_as_before():
    settings = load([ENGINE])
    assert "llm_api" not in settings.model_dump()
    assert "llm_api" in load([ENGINE, "llm_api.extra={stream_interval: 5}"]).model_dump()


@pytest.mark.parametrize(
    ("version", "judges"),
    [
        ("1.2.0", ["1.2.1"]),
        ("1.2.1", ["1.2.1"]),
        ("1.2.2", ["1.2.1"]),
        ("1.3.0rc1", ["1.2.1", "1.3.0rc3"]),
        ("1.3.0rc3", ["1.3.0rc3"]),
        ("1.3.0rc20", ["1.3.0rc3", "1.3.0rc24"]),
        ("1.3.0", ["1.3.0rc24", "1.4"]),
        ("1.4.0rc2", ["1.4"]),
        (None, ["1.2.1", "1.3.0rc3", "1.3.0rc24", "1.4"]),
    ],
)
def test_a_version_is_judged_by_its_table_or_its_neighbours(version, judges):
    assert [table.version for table in tables_of(version)] == judges


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("1.2.0", "judged by the options of TensorRT-LLM 1.2.1, because there is no table of 1.2.0"),
        (
            "1.3.0rc29",
            "judged by the options of TensorRT-LLM 1.3.0rc24 and 1.4, because there is no table of 1.3.0rc29",
        ),
        ("1.2.1", None),
    ],
)
def test_the_plan_names_the_tables_that_judge_where_there_is_no_own(tmp_path, version, line):
    image = f"image.base_llm_api=nvcr.io/nvidia/tensorrt-llm/release:{version}"
    options = "llm_api.extra={stream_interval: 5}"
    plan = make_plan(load([ENGINE, "model=llama_3_1_8b", image, options]), "build", Store(tmp_path), MACHINE)
    assert [note.removeprefix("llm_api: ") for note in plan.notes if note.startswith("llm_api:")] == [line] * bool(line)


def test_what_versions_before_and_after_take_differently_is_in_doubt():
    options = {"kv_cache_config": {"sink_token_length": 4, "disk_cache_path": "/x"}, "stream_interval": 5}
    of_both = [
        ("1.3.0rc3", False, ["kv_cache_config.disk_cache_path"]),
        ("1.3.0rc24", True, ["kv_cache_config.sink_token_length"]),
    ]
    assert doubts(options, "1.3.0rc20") == of_both
    assert doubts(options, "1.4") == []


def test_groups_are_merged_and_lists_are_not():
    assert merged({"a": {"b": 1, "c": [1]}}, {"a": {"c": [2]}, "d": 3}) == {"a": {"b": 1, "c": [2]}, "d": 3}
