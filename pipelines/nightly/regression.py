"""What a night can be found to have: something that is worse than it was or should be."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.nightly.record import Record


@dataclass(frozen=True, slots=True)
class Regression:
    """Something that is worse than it was or should be.

    Attributes:
        cell: name.
        metric: with its load.
        before: median of the nights before, or the limit that was pinned.
        now: tonight's value.
        limit: value beyond which tonight counts as worse.
        reason: why it counts, for people.
        first: the first record of the stretch that is worse.
        last_good: the record before it; None where there is none.
    """

    cell: str
    metric: str
    before: float
    now: float
    limit: float
    reason: str
    first: Record
    last_good: Record | None

    @property
    def change_percent(self) -> float:
        """Of tonight against before; positive is more."""
        return 100 * (self.now / self.before - 1) if self.before else float("inf")
