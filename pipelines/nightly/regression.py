"""A regression: something that is worse than it was, or than it should be."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.nightly.record import Record


@dataclass(frozen=True, slots=True)
class Regression:
    """Something that is worse than it was, or than it should be.

    Attributes:
        cell: name.
        metric: including its load.
        before: median of the earlier nights, or the pinned limit.
        now: tonight's value.
        limit: value beyond which tonight counts as worse.
        reason: why it counts, for messages.
        first: the first record of the worse stretch.
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
        """Change from before to tonight in percent; positive means more."""
        return 100 * (self.now / self.before - 1) if self.before else float("inf")
