"""For every rule: a deployment that breaks it, the message, and the nearest deployment that keeps it."""

from tests.support.rule_cases import (
    attention,
    builder,
    cpu,
    edge,
    gpu,
    llmapi,
    lora,
    rotary,
    serving,
    speculation,
    split,
)
from tests.support.rule_cases.words import GEMMA, LLAMA, Case, deployment

CASES: dict[str, Case] = {
    **gpu.CASES,
    **split.CASES,
    **attention.CASES,
    **rotary.CASES,
    **builder.CASES,
    **speculation.CASES,
    **lora.CASES,
    **serving.CASES,
    **cpu.CASES,
    **llmapi.CASES,
    **edge.CASES,
}

__all__ = ["CASES", "GEMMA", "LLAMA", "deployment"]
