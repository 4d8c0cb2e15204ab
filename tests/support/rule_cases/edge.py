"""Cases of the rules about TensorRT Edge-LLM."""

from typing import Any

from pipelines.domain.formats import KvFormat
from pipelines.domain.rotary import Rotary
from tests.support.rule_cases.words import ADAPTER, AWQ, FP8, GEMMA, LLAMA, MISTRAL, SERVED, W4A8, Case


def edge(**given: Any) -> dict[str, Any]:
    return {"engine": "tensorrt_edge", **given}


CASES = {
    "edge-formats": Case(
        edge(qformat=W4A8),
        r"does not support quant=w4a8_awq: its exporter leaves out most .*It supports none, fp8, int8_sq, int4_awq,",
        {"qformat": FP8},
    ),
    "edge-gpus": Case(edge(sm=9.0), r"no kernels for compute capability 9\.0: .*8\.7 \(Jetson Orin\)", {"sm": 12.0}),
    "edge-families": Case(
        edge(shape=GEMMA),
        "does not support GemmaForCausalLM: .* Llama, Mistral, Phi-3, Qwen2 and Qwen3",
        {"shape": LLAMA},
    ),
    "edge-has-no-windows": Case(
        edge(shape=MISTRAL),
        r"attention window of 4096 tokens, but sequences of up to 8192 .* its exporter leaves out the window",
        {"build": {"max_seq_len": 4096}},
    ),
    "edge-rotates-whole-heads": Case(
        edge(rotary=Rotary("default", 0.5)),
        r"\(partial_rotary_factor=0\.5\); the graphs",
        {"rotary": Rotary("default", 1.0)},
    ),
    "edge-int4-in-groups-of-128": Case(
        edge(qformat=AWQ, group_size=64), r"quant\.group_size=64 of quant=int4_awq is not", {"group_size": 128}
    ),
    "edge-kv-cache": Case(
        edge(qformat=AWQ, kv_format=KvFormat.FP8),
        "does not support kv_cache=fp8 with quant=int4_awq: its exporter leaves out the scales",
        {"qformat": FP8},
    ),
    "edge-features": Case(
        edge(adapters={7: ADAPTER}, build=SERVED),
        r"does not support lora\.adapters=7\. .* Set lora=none",
        {"adapters": {}, "build": {"lora_plugin": None, "lora_target_modules": None}},
    ),
    "edge-reads-limits": Case(
        edge(build={"gemm_plugin": "auto", "max_input_len": 2048}),
        r"does not support build\.gemm_plugin=auto: .*it reads max_batch_size, max_input_len, max_seq_len\.",
        {"build": {"gemm_plugin": None}},
    ),
}
