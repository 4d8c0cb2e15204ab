"""Rotary position embedding."""

from dataclasses import replace

from pipelines.domain.rotary import Rotary
from tests.support.rule_cases.words import MISTRAL, Case

PHI = replace(MISTRAL, architecture="Phi3ForCausalLM", max_position_embeddings=131072)

CASES = {
    "rope-types-are-known": Case(
        {"rotary": Rotary("longrope", 1.0)},
        "rope_type 'longrope'.*supports default, linear, llama3 or yarn",
        {"rotary": Rotary("llama3", 1.0)},
    ),
    "scaling-is-plain": Case(
        {"rotary": Rotary.of({"rope_scaling": {"type": "yarn", "factor": 1.0, "attention_factor": 1.5}})},
        "yarn with attention_factor=1.5 and factor=1.0 and no original_max_position_embeddings",
        {"rotary": Rotary.of({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}})},
    ),
    "yarn-is-truncated": Case(
        {"rotary": Rotary("yarn", 1.0, truncate=False)},
        r"yarn with truncate=false, but TensorRT-LLM 1\.2 rounds",
        {"engine": "openvino"},
    ),
    "longrope-keeps-to-its-original-context": Case(
        {"shape": PHI, "rotary": Rotary("longrope", 0.75, original=1024), "build": {"max_seq_len": 1025}},
        r"more than 1024 tokens.*build\.max_seq_len=1024 or less",
        {"build": {"max_seq_len": 1024}},
    ),
    "queries-do-not-grow": Case(
        {"shape": MISTRAL, "rotary": Rotary("yarn", 1.0, grows_from=16384), "build": {"max_seq_len": 16385}},
        r"grows from position 16384 .*build\.max_seq_len=16384 or less",
        {"build": {"max_seq_len": 16384}},
    ),
    "heads-rotate-wholly": Case(
        {"rotary": Rotary("default", 0.5)},
        r"partial_rotary_factor=0\.5",
        {"rotary": Rotary("default", 1.0)},
    ),
}
