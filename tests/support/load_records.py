"""Records of requests as the load generator stores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.domain.summary import RECORD_FIELDS, RequestTiming


def to_columns(timings: Sequence[RequestTiming]) -> dict[str, list[Any]]:
    """One list per field."""
    return {name: [getattr(each, name) for each in timings] for name in RECORD_FIELDS}
