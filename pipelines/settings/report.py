"""The group `report`: where the report goes, and how much accuracy a format may cost to be recommended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from pipelines.settings.base import Group


class ReportSettings(Group):
    """Settings of the report and the comparison.

    Attributes:
        folder: where the files are written, relative to the current folder.
        max_accuracy_loss_percent: a format that loses more, or has NO-GO, is not chosen; percent of the baseline's
            accuracy.
    """

    folder: Path = Path("reports")
    max_accuracy_loss_percent: Annotated[float, Field(ge=0, le=100)] = 1.0
