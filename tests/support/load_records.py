"""Records of requests, one by one, and as the load generator keeps and stores them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.domain.summary import RECORD_FIELDS, RequestColumns
from pipelines.loadgen.health import from_stored


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One request: the values of `RECORD_FIELDS`."""

    index: int
    intended_ns: int
    sent_ns: int
    first_token_ns: int | None
    end_ns: int
    isl: int
    osl: int
    chunk_ns: tuple[int, ...] = ()
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it finished without an error."""
        return self.error is None


def to_columns(timings: Sequence[RequestTiming]) -> dict[str, list[Any]]:
    """One list per field."""
    return {name: [getattr(each, name) for each in timings] for name in RECORD_FIELDS}


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[RequestTiming]:
    """Invert `to_columns`."""
    rows = zip(*(columns[name] for name in RECORD_FIELDS), strict=True)
    return [RequestTiming(*first, chunk_ns=tuple(chunks), error=error) for *first, chunks, error in rows]


def columns_of(timings: Sequence[RequestTiming]) -> RequestColumns:
    """The records as the figures are computed from."""
    return from_stored(to_columns(timings))
