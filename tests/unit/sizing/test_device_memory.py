"""Memory of a TensorRT-LLM engine: against published logs, by hand, and what it means for requests."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.predict.performance.memory import (
    EngineSizes,
    activation_bytes,
    buffer_bytes,
    concurrency,
    device_memory,
    fits,
    rank_weight_bytes,
    what_fits,
)

LOGS = json.loads((Path(__file__).parents[2] / "reference" / "published_logs.json").read_text())["logs"]
LLAMA_8B = ModelShape("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256, 131072, tie_word_embeddings=False)
GEMMA_2B = ModelShape("GemmaForCausalLM", 18, 2048, 8, 1, 256, 16384, 256000, 8192, tie_word_embeddings=True)
H100 = 81559 * 2**20


def deployed(log):
    names = (
        "tp_size",
        "max_batch_size",
        "max_num_tokens",
        "max_seq_len",
        "gather_context_logits",
        "parallel_embedding",
    )
    shape = ModelShape(architecture="LlamaForCausalLM", **log["shape"])
    return EngineSizes(
        shape, QFormat(log["qformat"]), KvFormat(log["kv_format"]), **{name: log[name] for name in names}
    )


def logged(what):
    return [pytest.param(log, log[what], id=log["model"]) for log in LOGS if log[what] is not None]


@pytest.mark.parametrize(("log", "bytes_logged"), logged("weights"))
def test_weights_are_those_that_trtllm_build_logs(log, bytes_logged):
    assert rank_weight_bytes(deployed(log)) == pytest.approx(bytes_logged, rel=1e-3)


@pytest.mark.parametrize(("log", "bytes_logged"), logged("activations"))
def test_activations_are_within_a_fifth_of_every_published_log(log, bytes_logged):
    assert activation_bytes(deployed(log)) == pytest.approx(bytes_logged, rel=0.2)


@pytest.mark.parametrize(("log", "bytes_logged"), logged("buffers"))
def test_buffers_are_within_a_quarter_of_the_two_published_logs(log, bytes_logged):
    assert buffer_bytes(deployed(log)) == pytest.approx(bytes_logged, rel=0.25)


def test_user_buffers_of_split_engines_are_in_the_sum():
    """Llama-3.1-8B, 8,192 tokens: 2 x 8,192 x 4,096 x 2 bytes = 128 MiB on each rank, none on a single one."""
    alone = EngineSizes(LLAMA_8B, QFormat.FP8, user_buffers=True)
    split = replace(alone, tp_size=2)
    without = device_memory(replace(split, user_buffers=False), H100)
    assert device_memory(split, H100).buffers - without.buffers == 128 * 2**20
    assert device_memory(alone, H100) == device_memory(replace(alone, user_buffers=False), H100)


def test_one_token_of_kv_cache():
    """2 (K, V) x 32 layers x 8 KV heads x 128 x 2 bytes = 131,072."""
    assert EngineSizes(LLAMA_8B, QFormat.NONE).kv_token_bytes == 131072
    assert EngineSizes(LLAMA_8B, QFormat.FP8, KvFormat.FP8).kv_token_bytes == 65536
    assert EngineSizes(LLAMA_8B, QFormat.NONE, tp_size=2, pp_size=2).kv_token_bytes == 32768


def test_kv_heads_are_duplicated_when_there_are_more_ranks():
    """Gemma 2B has one KV head: each of four ranks holds it, so KV does not shrink at all."""
    one, four = (EngineSizes(GEMMA_2B, QFormat.NONE, tp_size=ranks) for ranks in (1, 4))
    assert four.kv_token_bytes == one.kv_token_bytes == 2 * 18 * 256 * 2
    assert rank_weight_bytes(four) > rank_weight_bytes(one) / 4


def test_a_tied_head_is_held_once_unless_the_stages_are_apart():
    """Embedding = head = 2 x 256,000 x 2048 bytes; with two stages each of them has one of the two."""
    one, two = (rank_weight_bytes(EngineSizes(GEMMA_2B, QFormat.NONE, pp_size=stages)) for stages in (1, 2))
    table, rope = 2 * 256000 * 2048, 4 * 8192 * 256
    assert two - table - rope == pytest.approx((one - table - rope) / 2, rel=1e-3)


def test_the_pool_is_a_fraction_of_what_is_left_or_the_bound():
    """LLaMA-7B: 20,480 tokens x 524,288 bytes = 10,240 MiB."""
    llama_7b = replace(LLAMA_8B, num_key_value_heads=32, intermediate_size=11008, vocab_size=32000)
    free = EngineSizes(llama_7b, QFormat.NONE, max_batch_size=8, max_seq_len=2560)
    memory = device_memory(free, H100)
    assert memory.kv_pool == pytest.approx(0.9 * (H100 - memory.fixed))
    bound = device_memory(replace(free, max_kv_tokens=20480), H100)
    assert (bound.kv_pool, bound.kv_tokens) == (10240 * 2**20, 20480)


def test_requests_are_bound_by_the_kv_cache_or_by_the_batch():
    """20,480 tokens hold 8 requests of 2,560 tokens, and 11 of 1,850, which take 58 blocks of 32."""
    sizes = EngineSizes(LLAMA_8B, QFormat.NONE, max_batch_size=10, max_kv_tokens=20480)
    memory = device_memory(sizes, H100)
    eight, ten = (concurrency(sizes, memory, tokens) for tokens in (2560, 1850))
    assert (eight.requests, eight.binds) == (8, "KV cache")
    assert (ten.requests, ten.binds) == (10, "max_batch_size")


def test_a_window_bounds_what_a_long_request_holds():
    """Half of the layers hold 1,024 of 8,192 tokens: (16 x 1,024 + 16 x 8,192) x 4,096 bytes."""
    windowed = EngineSizes(LLAMA_8B, QFormat.NONE, windows=(1024, 8192))
    assert windowed.kv_request_bytes(8192) == (16 * 1024 + 16 * 8192) * 4096
    assert windowed.kv_request_bytes(64) == 64 * 32 * 4096


def test_what_does_not_fit_is_told_with_what_does():
    """Llama-3.1-8B at 16 bit has 15 GiB of weights; 24 GB leave no room for 2,048 requests' buffers beside them."""
    sizes = EngineSizes(LLAMA_8B, QFormat.NONE)
    assert not fits(sizes, 24e9, 2048)
    formats = (QFormat.NONE, QFormat.INT8_SQ, QFormat.INT4_AWQ)
    found = what_fits(sizes, 24e9, 2048, formats)
    assert found == ["build.max_batch_size=256", "build.tp_size=2", "quant=int8_sq", "quant=int4_awq"]


def test_more_ranks_and_lighter_formats_never_need_more():
    for shape in (LLAMA_8B, GEMMA_2B):
        sizes = [device_memory(EngineSizes(shape, QFormat.NONE, tp_size=ranks), H100).fixed for ranks in (1, 2, 4, 8)]
        assert sizes == sorted(sizes, reverse=True)
        bits = [rank_weight_bytes(EngineSizes(shape, q)) for q in (QFormat.NONE, QFormat.FP8, QFormat.INT4_AWQ)]
        assert bits == sorted(bits, reverse=True)


def test_what_is_streamed_makes_room_for_the_kv_pool():
    """The pool gets kv_fraction of every byte of weights that leaves the GPU."""
    whole = EngineSizes(LLAMA_8B, QFormat.NONE, max_batch_size=64)
    held, freed = device_memory(whole, H100), device_memory(replace(whole, gpu_weights_percent=0.25), H100)
    assert freed.weights == 0.25 * held.weights
    assert freed.streamed == 0.75 * held.weights
    assert freed.kv_pool - held.kv_pool == pytest.approx(0.9 * freed.streamed)
