"""The record of a regression."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.nightly.record import Record


@dataclass(frozen=True, slots=True)
class Regression:
    """A metric of a cell that is worse than before, or worse than a pinned limit.

    Attributes:
        cell: name of the cell.
        metric: name of the metric, including its load.
        before: median of the earlier nights, or the pinned limit.
        now: tonight's value.
        limit: value beyond which tonight counts as worse.
        reason: why it counts, for messages.
        first: the first record of the worse stretch.
        last_good: the record before `first`; None if there is none.
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
        """Return the change from `before` to tonight in percent; positive means more."""
        return 100 * (self.now / self.before - 1) if self.before else float("inf")
