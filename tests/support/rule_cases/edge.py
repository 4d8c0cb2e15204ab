"""Cases of the rules about TensorRT Edge-LLM."""

from __future__ import annotations

from typing import Any

from pipelines.domain.formats import KvFormat
from tests.support.rule_cases.words import ADAPTER, AWQ, FP8, GEMMA, LLAMA, LLAVA, LOOKAHEAD, SERVED, W4A8, Case


def edge(**given: Any) -> dict[str, Any]:
    return {"engine": "edge", **given}


LOOKS_AHEAD = {"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 83}
CASES = {
    "edge-formats": Case(
        edge(qformat=W4A8),
        r"does not support quant=w4a8_awq: its exporter leaves out most .*It supports none, fp8, int8_sq, int4_awq,",
        {"qformat": FP8},
    ),
    "edge-gpus": Case(edge(sm=9.0), r"no kernels for compute capability 9\.0: .*8\.7 \(Jetson Orin\)", {"sm": 12.0}),
    "edge-families": Case(
        edge(shape=GEMMA), "does not support GemmaForCausalLM: .* Llama, Mistral, Qwen2 and Qwen3", {"shape": LLAMA}
    ),
    "edge-int4-in-groups-of-128": Case(
        edge(qformat=AWQ, group_size=64), r"quant\.group_size=64 of quant=int4_awq is not", {"group_size": 128}
    ),
    "edge-kv-cache": Case(
        edge(qformat=AWQ, kv_format=KvFormat.FP8),
        "does not support kv_cache=fp8 with quant=int4_awq: its exporter leaves out the scales",
        {"qformat": FP8},
    ),
    "edge-takes-one-rank": Case(
        edge(build={"tp_size": 2}), "exported for one GPU, not for tp_size=2 and pp_size=1", {"build": {"tp_size": 1}}
    ),
    "edge-has-no-sparsity": Case(edge(sparsity="magnitude"), "does not support sparsity=", {"sparsity": "none"}),
    "edge-drafts-nothing": Case(
        edge(speculation="lookahead", build=LOOKS_AHEAD, triton={"decoding_mode": "lookahead", **LOOKAHEAD}),
        "speculative=lookahead is not supported by engine=tensorrt_edge",
        {
            "speculation": "none",
            "build": {"speculative_decoding_mode": None, "max_draft_len": 0},
            "triton": {"decoding_mode": None},
        },
    ),
    "edge-has-no-adapters": Case(
        edge(adapters={7: ADAPTER}, build=SERVED),
        "lora.adapters has 7, .* exported without adapters",
        {"adapters": {}, "build": {"lora_plugin": None, "lora_target_modules": None}},
    ),
    "edge-sees-no-images": Case(
        edge(images=LLAVA, build={"max_prompt_embedding_table_size": 4608}),
        "does not support multimodal=llava",
        {"images": None, "build": {"max_prompt_embedding_table_size": 0}},
    ),
    "edge-builds-on-the-device": Case(
        edge(build={"gemm_plugin": "auto", "max_input_len": 2048}),
        r"does not support build\.gemm_plugin=auto: .*It reads max_batch_size, max_input_len, max_seq_len\.",
        {"build": {"gemm_plugin": None}},
    ),
}
