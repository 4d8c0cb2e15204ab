"""Rotary position embedding."""

from __future__ import annotations

from pipelines.domain.rotary import Rotary
from tests.support.rule_cases.words import Case

CASES = {
    "rope-types-are-known": Case(
        {"rotary": Rotary("yarn", 1.0)},
        "rope_type 'yarn'.*supports default, linear or llama3",
        {"rotary": Rotary("llama3", 1.0)},
    ),
    "heads-rotate-wholly": Case(
        {"rotary": Rotary("default", 0.5)},
        r"partial_rotary_factor=0\.5",
        {"rotary": Rotary("default", 1.0)},
    ),
}
