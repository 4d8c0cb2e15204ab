"""NVIDIA's nearest tuned file is advice for the LLM API, and what is given wins."""

from pipelines.engines.registry import LLM_API
from pipelines.engines.tensorrt_llm.llm_api import complaints, split_fault, tuned_files
from pipelines.engines.tuning import advice, tuned
from pipelines.settings.compose import load

QWEN = ["engine=tensorrt_llm_llmapi", "model=hub", "model.hub_id=Qwen/Qwen3-235B-A22B"]
LONG = ["hardware=b200_sxm", "parallel=tp4", "workload.isl=8000", "workload.osl=1000", "benchmark.concurrency=60"]
NAME = "examples/configs/database/Qwen/Qwen3-235B-A22B/B200/8k1k_tp4_conc64.yaml"


def of(*words):
    settings = load([*QWEN, *words])
    return {each.word: each.line for each in advice(settings, LLM_API, None, settings.hardware)}


def test_the_nearest_file_is_shown_with_its_source_and_what_differs():
    advised = of(*LONG)
    assert list(advised) == [
        f"llm_api.tuned={NAME}",
        "kv_cache.dtype=fp8",
        "triton.kv_cache_free_gpu_mem_fraction=0.8",
    ]
    line = advised[f"llm_api.tuned={NAME}"]
    assert "4 B200, 8,192 in, 1,024 out, concurrency 64; here 8,000 in, 1,000 out, concurrency 60" in line
    assert "not taken, as they follow the load here: enable_chunked_prefill=True" in line
    assert f"({NAME}@a650379)" in line


def test_what_is_given_wins_and_plain_takes_none():
    assert list(of(*LONG, "llm_api.tuned=x.yaml", "kv_cache=int8")) == ["triton.kv_cache_free_gpu_mem_fraction=0.8"]
    assert of(*LONG, "tuning=plain") == {}
    settings = tuned(load([*QWEN, *LONG]), LLM_API, None, load([*QWEN, *LONG]).hardware)
    assert (settings.llm_api.tuned, settings.kv_cache.dtype) == (NAME, "fp8")
    assert not settings.llm_api.given("tuned")


def test_no_file_of_another_gpu_or_number_of_ranks_is_taken():
    assert of("hardware=h100_sxm", "parallel=tp4") == {}
    assert of("hardware=b200_sxm", "parallel=tp2") == {}
    assert next(iter(of("hardware=gb200", "parallel=tp4"))).split("/")[-2] == "GB200"


def test_every_copy_of_a_file_is_valid_for_the_newest_table():
    for each in tuned_files().values():
        assert not complaints(each.options, "1.4", "")
        assert not split_fault(each.options, each.gpus or 1, "")
        assert {"trust_remote_code", "model"}.isdisjoint(each.options)
