"""The group `nightly`: which cells are measured, where their history is kept, and what counts as worse."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from pipelines.settings.base import Group, typed

Percent = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class CellSettings(Group):
    """Overrides of some cells.

    Attributes:
        when: axis -> value; selects the cells that match all of them.
        set: overrides, as on the command line.
    """

    when: dict[str, str]
    set: tuple[str, ...]


class AcceptedSettings(Group):
    """A change of level that was reviewed and accepted.

    Attributes:
        cell: name of the cell, `*` for any part of it, e.g. "llama_3_1_8b *".
        metric: name of the metric, likewise, e.g. "ttft_p50_s at concurrency 8" or "*".
        since: ISO date or time, UTC: nights before it no longer count.
        reason: why the change is accepted.
    """

    cell: str
    metric: str
    since: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d")]
    reason: Annotated[str, Field(min_length=1)]

    @field_validator("since")
    @classmethod
    def _in_utc(cls, since: str) -> str:
        """Return the time as nights have theirs, so that the texts can be compared."""
        try:
            time = datetime.fromisoformat(since)
        except ValueError as error:
            raise ValueError(f"'{since}' is no ISO date or time: {error}") from None
        return (time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo else time).isoformat()


class PinnedSettings(Group):
    """An absolute limit, whatever earlier nights measured.

    Attributes:
        cell: name of the cell, `*` for any part of it.
        metric: name of the metric, likewise.
        worst: lowest acceptable throughput, or highest acceptable latency, size or time.
        reason: where the limit comes from.
    """

    cell: str
    metric: str
    worst: Annotated[float, Field(gt=0)]
    reason: Annotated[str, Field(min_length=1)]


class ExpectSettings(Group):
    """Expectations of every night.

    Attributes:
        accuracy_loss_percent: format -> largest loss against the 16-bit baseline, in percent of its accuracy. A larger
            one fails when it is proven (NO-GO); a format that is not listed has no limit.
        floor_percent: metric -> change that is ignored; a metric that is not listed is recorded but not judged.
        accepted: changes of level that were accepted.
        pinned: absolute values.
    """

    accuracy_loss_percent: dict[str, Percent] = Field(default_factory=dict)
    floor_percent: dict[str, Percent] = Field(
        default_factory=lambda: {
            "output_tokens_per_s": 5,
            "ttft_p50_s": 10,
            "ttft_p99_s": 25,
            "itl_p50_s": 5,
            "e2e_p99_s": 15,
            "accuracy": 0.5,
            "engine_bytes": 1,
            "error_share": 0,
        }
    )
    accepted: tuple[AcceptedSettings, ...] = ()
    pinned: tuple[PinnedSettings, ...] = ()


class NightlySettings(Group):
    """A nightly run.

    Attributes:
        name: of the matrix.
        matrix: axis (a group or a key of the configuration) -> its values; every combination is a cell.
        set: overrides of every cell.
        cells: overrides of some cells.
        measure: whether to measure; False only judges the history and writes the report again.
        rebuild: whether to rebuild everything except downloads, so that tonight's code is measured.
        history: folder of the history.
        timeout_s: a cell that takes longer is stopped and counts as failed.
        window: nights that later ones are compared with, at most: the first of a level, which stay.
        false_alarms: probability that a run reports a regression although nothing changed.
        confirmations: times a cell that looks worse is measured again; the median of all counts.
        issue: Markdown file for an issue, written after a bad night and removed after a good one; a webhook in the
            variable NIGHTLY_WEBHOOK gets the same text.
        expect: expectations of every night.
    """

    LATER: ClassVar[tuple[str, ...]] = ("issue",)

    name: str
    matrix: dict[str, tuple[str, ...]]
    set: tuple[str, ...] = ()
    cells: tuple[CellSettings, ...] = ()
    measure: bool = True
    rebuild: bool = True
    history: Path
    timeout_s: Annotated[float, Field(gt=0)] = 14400
    window: Annotated[int, Field(ge=4)] = 20
    false_alarms: Share = 0.05
    confirmations: Annotated[int, Field(ge=0)] = 2
    issue: Path | None = None
    expect: ExpectSettings = Field(default_factory=ExpectSettings)

    @model_validator(mode="before")
    @classmethod
    def _words(cls, data: Any) -> Any:
        """Convert values that YAML reads as numbers or booleans to words, as overrides have them."""
        if isinstance(data, dict) and isinstance(data.get("matrix"), dict):
            axes = {
                axis: values if isinstance(values, list | tuple) else [values]
                for axis, values in data["matrix"].items()
            }
            data = data | {"matrix": {axis: [str(typed(value)) for value in values] for axis, values in axes.items()}}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if empty := [axis for axis, values in self.matrix.items() if not values]:
            raise ValueError(f"has matrix.{empty[0]}=[], which is no cell; give at least one value")
        for cell in self.cells:
            if unknown := [axis for axis in cell.when if axis not in self.matrix]:
                raise ValueError(f"has cells.when '{unknown[0]}', which is no axis; axes are {', '.join(self.matrix)}")
        return self
