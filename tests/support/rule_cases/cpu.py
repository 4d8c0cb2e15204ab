"""Cases of the rules about the CPU engine."""

from pipelines.domain.formats import QFormat
from tests.support.rule_cases.words import ADAPTER, AWQ, FP8, Case, kv

CASES = {
    "cpu-rounds-activations-of-weight-only-formats": Case(
        {"engine": "openvino", "qformat": FP8, "dynamic_quantization": "128"},
        r"dynamic_quantization=128 has no effect on quant=fp8\. .*int4_awq.*int8_wo",
        {"qformat": AWQ},
    ),
    "cpu-kernels-are-dense": Case(
        {"engine": "openvino", "sparsity": "magnitude"}, "sparsity=magnitude saves no time", {"sparsity": "none"}
    ),
    # one block for the sinks, one last block and one between them: 96 tokens
    "cpu-windows-are-whole-blocks": Case(
        {"engine": "openvino", "triton": {"max_attention_window_size": (100,)}},
        r"size=100 with sink_token_length=None .*at least 96.*\[96\]",
        {"triton": {"max_attention_window_size": (96,)}},
    ),
    "cpu-layers-share-a-window": Case(
        {"engine": "openvino", "triton": {"max_attention_window_size": (128, 256)}},
        r"size=\[128, 256\] is not supported",
        {"triton": {"max_attention_window_size": (256, 256)}},
    ),
    "cpu-windows-exclude-reuse": Case(
        kv(engine="openvino", triton={"max_attention_window_size": (128,)}),
        r"size=\[128\] with KV-cache reuse is not",
        {"kv_reuse": False},
    ),
    "cpu-windows-exclude-drafts": Case(
        {"engine": "openvino", "speculation": "draft_target", "triton": {"max_attention_window_size": (128,)}},
        r"size=\[128\] with speculative=draft_target",
        {"speculation": "none"},
    ),
    "cpu-blocks-have-32-tokens": Case(
        {"engine": "openvino", "build": {"tokens_per_block": 64}},
        "tokens_per_block=64 is not supported",
        {"engine": "tensorrt_llm"},
    ),
    "the-cpu-engine-drafts-with-a-model": Case(
        {"engine": "openvino", "speculation": "medusa"},
        "speculative=medusa is not supported by engine=openvino",
        {"speculation": "draft_target"},
    ),
    "the-cpu-engine-guides-with-llguidance": Case(
        {"engine": "openvino", "triton": {"guided_decoding_backend": "xgrammar"}},
        "guided_decoding_backend=xgrammar is not supported by engine=openvino",
        {"engine": "tensorrt_llm"},
    ),
    "cpu-adapters-see-scaled-activations": Case(
        {"engine": "openvino", "qformat": AWQ, "adapters": {7: ADAPTER}},
        "quant=int4_awq is not supported",
        {"qformat": QFormat.INT8_WO},
    ),
    "cpu-prompt-tables-exclude-adapters-and-drafts": Case(
        {"engine": "openvino", "adapters": {7: ADAPTER}, "build": {"max_prompt_embedding_table_size": 64}},
        "max_prompt_embedding_table_size=64 with lora.adapters is not supported",
        {"adapters": {}},
    ),
    "the-cpu-engine-keeps-its-weights": Case(
        {"engine": "openvino", "build": {"weight_streaming": True}},
        "weight_streaming=True is not supported",
        {"build": {"weight_streaming": False}},
    ),
}
