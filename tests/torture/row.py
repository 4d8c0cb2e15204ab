"""One line of the table that a campaign of planted failures prints."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """What was tried, how often, how often it was survived, and the worst time it took.

    Attributes:
        what: the failure and where it was planted.
        tried: number of times.
        survived: number of times that what is promised held.
        worst_s: the longest time until it held, in seconds; 0 where time is not the point.
        note: what else the reader must know; empty for nothing.
    """

    what: str
    tried: int
    survived: int
    worst_s: float
    note: str = ""
