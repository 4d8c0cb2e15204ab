"""Timing of one request: the record that the load generator keeps.

All stamps are nanoseconds since the start of the run on one monotonic clock. `pipelines.domain.summary` defines the
latencies and rates that follow from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One request.

    Attributes:
        index: position in the load, from 0.
        intended_ns: when it should have been sent. Latencies count from here, so that waiting in a slow client or
            behind a slow server is not hidden (coordinated omission). In a closed loop it equals `sent_ns`.
        sent_ns: when it was actually sent.
        first_token_ns: when the first non-empty response arrived; None if none did.
        end_ns: when the last response with text, or the error, arrived.
        isl: input tokens as the engine counts them.
        osl: output tokens received.
        chunk_ns: arrival of every non-empty response, ascending; empty if it was not streamed.
        error: kind of error ("timeout", "rejected", "connection", ...), None if it finished.
    """

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


_COLUMNS = tuple(field.name for field in fields(RequestTiming))


def to_columns(timings: Iterable[RequestTiming]) -> dict[str, list[Any]]:
    """Convert records to one list per field, the compact form in which results are stored."""
    rows = list(timings)
    return {name: [getattr(row, name) for row in rows] for name in _COLUMNS}


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[RequestTiming]:
    """Read what `to_columns` wrote.

    Raises:
        ValueError: a column is missing or of another length.
    """
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise ValueError(f"request records lack the columns {', '.join(missing)}")
    rows = zip(*(columns[name] for name in _COLUMNS), strict=True)
    return [RequestTiming(*first, chunk_ns=tuple(chunks), error=error) for *first, chunks, error in rows]  # type: ignore[misc]
