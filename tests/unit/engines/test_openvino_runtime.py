"""What an open engine decides before it loads anything."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openvino_genai")

from pipelines.checkpoint.config_json import CheckpointConfig, Quantization
from pipelines.domain.errors import UserError
from pipelines.engines.openvino.engine import generation_config
from pipelines.engines.openvino.memory import kv_fault, unheard
from pipelines.engines.openvino.runtime import (
    EngineFolder,
    OpenVinoOptions,
    arithmetic,
    check_request,
    dynamic_quantization,
    kv_block_bytes,
    kv_blocks,
    kv_precision,
    properties,
)
from pipelines.engines.port import BuildLimits, SamplingParams

GEMMA_2B = {
    "architecture": "GemmaForCausalLM", "dtype": "bfloat16", "num_hidden_layers": 18, "hidden_size": 2048,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_size": 256, "vocab_size": 256000,
    "max_position_embeddings": 8192, "rotary_base": 10000.0,
}  # fmt: skip
F32 = OpenVinoOptions(inference_precision="f32")


def config(kv: str | None = None) -> CheckpointConfig:
    return CheckpointConfig.parse(GEMMA_2B | {"quantization": {"kv_cache_quant_algo": kv}})


def folder(**limits: Any) -> EngineFolder:
    return EngineFolder(Path("engine"), config(), BuildLimits(**{**LIMITS, **limits}))


LIMITS = {"max_batch_size": 2, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 32}


def test_kv_block_of_gemma_2b() -> None:
    """2 * 18 layers * 1 head * 32 tokens * 256 * 4 bytes; u8 and u4 have 8 bytes more per channel and per token."""
    assert kv_block_bytes(config(), "f32") == 1_179_648
    assert kv_block_bytes(config(), "u8") == 18 * (2 * 32 * 256 + 8 * (256 + 32))
    assert kv_block_bytes(config(), "u4") == 18 * (32 * 256 + 8 * (256 + 32))


def test_the_kv_pool_suits_the_engine() -> None:
    """Gemma 2B at f32: 32 x 128 tokens are 128 blocks, 1 GiB holds 910 of them, and one request always fits."""
    assert kv_blocks(folder(), F32) == 128
    assert kv_blocks(folder(max_seq_len=8192), F32) == 910
    assert kv_blocks(folder(max_seq_len=32 * 1000), F32) == 1000
    assert kv_blocks(folder(), OpenVinoOptions(inference_precision="f32", kv_cache_bytes=3 * 1_179_648)) == 3


@pytest.mark.parametrize(("kv", "option", "expected"), [
    (None, "auto", "f32"), ("FP8", "auto", "u8"), ("INT8", "auto", "u8"), ("FP8", "f16", "f16"),
])  # fmt: skip
def test_kv_cache_follows_the_checkpoint(kv: str | None, option: str, expected: str) -> None:
    options = OpenVinoOptions(inference_precision="f32", kv_cache_precision=option)
    assert kv_precision(config(kv), options) == expected


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "f16")])
def test_an_unquantized_kv_cache_has_16_bits(monkeypatch: pytest.MonkeyPatch, has_bf16: bool, expected: str) -> None:
    monkeypatch.setattr("pipelines.engines.openvino.memory.native_bf16", lambda: has_bf16)
    assert kv_precision(config(), OpenVinoOptions()) == expected


@pytest.mark.parametrize(
    ("amx", "arithmetic", "kv", "used", "why"),
    [
        (True, "bf16", "auto", "bf16", None),
        (False, "bf16", "auto", "f32", None),
        (False, "auto", "f16", "f16", None),
        (False, "f32", "f16", "f16", None),
        (True, "auto", "f16", "f16", None),
        (True, "f32", "f16", "f16", None),
        (True, "f32", "u4", "u4", None),
        (True, "f32", "bf16", "bf16", "kv_cache_precision=bf16 does not go with inference_precision=f32"),
        (True, "auto", "f32", "f32", "kv_cache_precision=f32 does not go with inference_precision=auto"),
        (True, "bf16", "f32", "f32", "kv_cache_precision=f32 does not go with inference_precision=bf16"),
        (False, "auto", "bf16", "bf16", "kv_cache_precision=bf16 does not go with inference_precision=auto"),
        (False, "bf16", "f16", "f16", "kv_cache_precision=f16 does not go with inference_precision=bf16"),
    ],
)
def test_a_kv_cache_has_the_type_of_the_arithmetic_or_fewer_bits(amx, arithmetic, kv, used, why, processor) -> None:
    """OpenVINO's paged attention fails with "expect kvcache type f32" otherwise; of emulated bf16 it takes float32."""
    processor(vnni=True, amx=amx)
    options = OpenVinoOptions(inference_precision=arithmetic, kv_cache_precision=kv)
    assert kv_precision(config(), options) == used
    fault = kv_fault(options)
    assert (fault is None) == (why is None)
    assert fault is None or why in fault.message


@pytest.mark.parametrize(
    ("quant_algo", "precision", "asked", "group"),
    [
        ("W4A16_AWQ", "auto", "auto", 128),
        ("W8A16", "auto", "auto", 128),
        ("W4A16_AWQ", "f32", "auto", 0),
        ("W4A16_AWQ", "bf16", "auto", 0),
        ("W4A16_AWQ", "f32", 32, 32),
        ("W4A16_AWQ", "auto", "off", 0),
        (None, "auto", "auto", 0),
        (None, "auto", 128, 0),
        ("FP8", "auto", "auto", 0),
        ("W4A8_AWQ", "auto", 128, 0),
        ("W8A8_SQ_PER_CHANNEL", "auto", "auto", 0),
    ],
)
def test_activations_are_rounded_for_weight_only_formats(quant_algo, precision, asked, group, processor) -> None:
    """Other formats have scales for activations in the checkpoint, or want 16 bit; so does who names the arithmetic."""
    processor(vnni=True, amx=False)
    options = OpenVinoOptions(inference_precision=precision, dynamic_quantization=asked)
    model = replace(config(None), quantization=Quantization(quant_algo))
    assert dynamic_quantization(model, options) == group
    assert properties(model, options, "u8")["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == str(group)
    assert ("INT8 in groups of" in arithmetic(replace(folder(), config=model), options)) == bool(group)


@pytest.fixture
def processor(monkeypatch):
    """A processor of its own."""

    def has(*, vnni: bool, amx: bool) -> None:
        for name, value in {"has_vnni": vnni, "has_amx": amx, "native_bf16": amx}.items():
            monkeypatch.setattr(f"pipelines.engines.openvino.memory.{name}", lambda value=value: value)

    return has


@pytest.mark.parametrize(
    ("vnni", "amx", "precision", "words", "why"),
    [
        (True, False, "f32", "f32, activations rounded to INT8 in groups of 128", ""),
        (True, True, "f32", "f32, activations rounded to INT8 in groups of 128", ""),
        (True, True, "bf16", "bf16", "=128 has no effect on this processor: it has AMX and computes in bf16."),
        (True, True, "auto", "bf16", "=128 has no effect on this processor: it has AMX and computes in bf16."),
        (False, False, "auto", "f32", "=128 has no effect on this processor: it has no VNNI."),
    ],
)
def test_what_a_processor_does_not_round_is_not_said_to_be_rounded(vnni, amx, precision, words, why, processor) -> None:
    processor(vnni=vnni, amx=amx)
    options = OpenVinoOptions(inference_precision=precision, dynamic_quantization=128)
    model = replace(config(None), quantization=Quantization("W4A16_AWQ"))
    assert arithmetic(replace(folder(), config=model), options) == words
    assert unheard(options) == (f"engine.openvino.dynamic_quantization{why}" if why else "")
    assert unheard(OpenVinoOptions(inference_precision=precision)) == ""


def test_properties_of_a_16_bit_model() -> None:
    chosen = properties(config(None), OpenVinoOptions(inference_precision="bf16", num_threads=3), "u8")
    assert chosen == {
        "INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "u8", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "CPU_RUNTIME_CACHE_CAPACITY": "512",
        "INFERENCE_NUM_THREADS": 3,
    }  # fmt: skip


def test_kernels_are_kept_once() -> None:
    """OneDNN reads this when OpenVINO is imported; in a fresh process this package comes first."""
    code = (
        "import os, sys, pipelines.engines.openvino;"
        "print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'], 'openvino' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["0", "False"]


def test_a_prompt_longer_than_one_iteration_needs_chunking() -> None:
    """40 tokens do not fit max_num_tokens = 32 at once."""
    with pytest.raises(UserError, match=r"40 tokens.*max_num_tokens=32.*enable_chunked_context=true"):
        check_request(folder(), F32, 40, 1)
    check_request(folder(), OpenVinoOptions(enable_chunked_context=True), 40, 1)


def test_sampling_limits_are_translated() -> None:
    """top_k = 0 leaves genai's own default, which is all; seeds and stop tokens go through."""
    greedy = generation_config(SamplingParams(5))
    assert (greedy.do_sample, greedy.ignore_eos, greedy.max_new_tokens) == (False, True, 5)
    sampled = generation_config(SamplingParams(5, frozenset({3, 2}), temperature=0.5, top_k=7, top_p=0.9, seed=11))
    assert (sampled.do_sample, sampled.top_k, sampled.rng_seed) == (True, 7, 11)
    assert (sampled.ignore_eos, sampled.stop_token_ids, sampled.eos_token_id) == (False, {2, 3}, 2)


def test_an_engine_folder_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").touch()
    build = LIMITS | {"kv_cache_type": "PAGED", "plugin_config": {}}
    raw = {"pretrained_config": GEMMA_2B, "build_config": build, "engine": {"flavour": "openvino"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loaded = EngineFolder.load(tmp_path)
    assert loaded.limits == BuildLimits(**LIMITS)
    assert loaded.config.head_size == 256
