"""Rotary position embedding: what a TensorRT-LLM checkpoint can express."""

from __future__ import annotations

from pipelines.domain.rotary import PLAIN_YARN, ROPE_TYPES, Rotary
from pipelines.rules.record import BUILT, DeploymentFacts, Rule, either
from pipelines.rules.sources import ROPE

TOPIC = "Positions"


def _rotary(d: DeploymentFacts) -> Rotary:
    assert d.rotary is not None
    return d.rotary


RULES = (
    Rule(
        name="rope-types-are-known",
        topic=TOPIC,
        engines=BUILT,
        needs=("rotary",),
        when=lambda d: _rotary(d).kind not in ROPE_TYPES and [{"known": either(ROPE_TYPES)}],
        failed="{d.label} scales its rotary positions by rope_type '{d.rotary.kind}', which would be computed without"
        " its scaling.",
        allowed="A TensorRT-LLM checkpoint supports {known}.",
        todo="Choose another model, or use engine=tensorrt_llm_llmapi.",
        source=ROPE,
    ),
    Rule(
        name="yarn-is-plain",
        topic=TOPIC,
        engines=BUILT,
        needs=("rotary",),
        when=lambda d: bool(_rotary(d).differences) and [{"found": either(_rotary(d).differences, "and")}],
        failed="{d.label} scales its rotary positions by yarn with {found}, which an engine would compute in another"
        " way than the model.",
        allowed=PLAIN_YARN,
        todo="Change the block in config.json if the model allows, or use engine=tensorrt_llm_llmapi.",
        source=ROPE,
    ),
    Rule(
        name="heads-rotate-wholly",
        topic=TOPIC,
        engines=BUILT,
        needs=("rotary",),
        when=lambda d: _rotary(d).fraction != 1.0,
        failed="{d.label} rotates only a part of each head (partial_rotary_factor={d.rotary.fraction:g}), but all of it"
        " would be rotated.",
        allowed="A TensorRT-LLM checkpoint rotates whole heads.",
        todo="Choose another model, or use engine=tensorrt_llm_llmapi.",
        source=ROPE,
    ),
)
