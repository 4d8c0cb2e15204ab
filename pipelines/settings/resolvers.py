"""What a value in conf/ can be computed with: `${product:${a.b},${c.d}}`. Completion reads this, so it imports late."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def _bundled(place: str) -> str:
    """Return the path of something that ships with the project."""
    from pipelines.settings.model import BUNDLED

    return str(BUNDLED / place)


def _product(*factors: int) -> int:
    return math.prod(factors)


def _lookahead_draft_len(window: int, ngram: int, verification: int) -> int:
    from pipelines.settings.features import lookahead_draft_len

    return lookahead_draft_len(window, ngram, verification)


RESOLVERS: Mapping[str, Callable[..., Any]] = {
    "bundled": _bundled,
    "product": _product,
    "lookahead_draft_len": _lookahead_draft_len,
}
