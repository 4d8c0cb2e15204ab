"""Cases of the rules about sizes and ranks."""

from dataclasses import replace

from pipelines.domain.formats import QFormat
from tests.support.rule_cases.words import AWQ, FP8, GEMMA, LLAMA, MIXTRAL, QWEN3, SQ, Case

CASES = {
    "head-norms-need-shared-kv-heads": Case(
        {"shape": replace(QWEN3, num_key_value_heads=32), "build": {"tp_size": 2}},
        "Qwen3ForCausalLM has 16 query heads and as many KV heads on each rank",
        {"shape": QWEN3},
    ),
    "gemma-has-no-pipeline": Case(
        {"shape": GEMMA, "build": {"pp_size": 2}}, "pp_size=2 does not work with GemmaForCausalLM", {"shape": LLAMA}
    ),
    "phi-3-has-no-pipeline": Case(
        {"shape": replace(LLAMA, architecture="Phi3ForCausalLM"), "build": {"pp_size": 2}},
        "pp_size=2 does not work with Phi3ForCausalLM: TensorRT-LLM 1.2 gives its whole model to every stage",
        {"build": {"tp_size": 2, "pp_size": 1}},
    ),
    "ranks-divide-heads-and-mlp": Case(
        {"shape": LLAMA, "build": {"tp_size": 3}},
        "tp_size=3 does not divide num_attention_heads=32",
        {"build": {"tp_size": 4}},
    ),
    "experts-are-divided-evenly": Case(
        {"shape": MIXTRAL, "build": {"tp_size": 16, "moe_ep_size": 16}},
        "moe_ep_size=16 must divide tp_size=16 and the 8 experts",
        {"build": {"tp_size": 16, "moe_ep_size": 8}},
    ),
    "ranks-share-kv-heads-evenly": Case(
        {"shape": LLAMA, "build": {"tp_size": 3}}, "tp_size=3 and num_key_value_heads=8", {"build": {"tp_size": 16}}
    ),
    "smoothquant-cannot-copy-kv-heads": Case(
        {"shape": GEMMA, "qformat": SQ, "build": {"tp_size": 2}},
        "tp_size=2 needs copies of the 1 KV head",
        {"qformat": AWQ},
    ),
    "stages-divide-layers": Case(
        {"shape": LLAMA, "build": {"pp_size": 3}},
        "pp_size=3 does not divide num_hidden_layers=32",
        {"build": {"pp_size": 4}},
    ),
    "mix-has-no-pipeline": Case(
        {"shape": LLAMA, "qformat": QFormat.AUTO, "build": {"pp_size": 2}},
        "pp_size=2 does not work with quant=auto",
        {"qformat": FP8},
    ),
    # 14336 / 32 = 448 = 7 * 64, so groups of 64 work and groups of 128 do not
    "groups-divide-inputs": Case(
        {"shape": LLAMA, "qformat": AWQ, "build": {"tp_size": 32}},
        r"groups of 128 inputs.* 448 inputs of mlp\.proj per rank .*group_size=64\. Set it, or choose quant=none, fp8",
        {"group_size": 64},
    ),
    "int4-packs-pairs-of-outputs": Case(
        {"shape": replace(LLAMA, intermediate_size=14337), "qformat": AWQ},
        r"odd number: mlp\.fc \(14337\).*Use another model, or choose quant=none, fp8",
        {"qformat": FP8},
    ),
    "sparsity-needs-whole-groups-of-inputs": Case(
        {"shape": replace(LLAMA, intermediate_size=14338), "sparsity": "sparsegpt"},
        r"multiples of 4; mlp\.proj has 14338",
        {"shape": replace(LLAMA, intermediate_size=14340)},
    ),
    "magnitude-sparsity-needs-outputs-in-eights": Case(
        {"shape": replace(LLAMA, intermediate_size=14340), "sparsity": "magnitude"},
        "multiples of 8; intermediate_size is 14340",
        {"sparsity": "sparsegpt"},
    ),
}
