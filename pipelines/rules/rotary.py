"""Rotary position embedding: what a TensorRT-LLM checkpoint can express."""

from __future__ import annotations

from pipelines.domain.rotary import ROPE_TYPES, Rotary
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
        todo="Choose another model.",
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
        allowed="A TensorRT-LLM checkpoint of Gemma or Llama rotates whole heads.",
        todo="Choose another model.",
        source=ROPE,
    ),
)
