"""The group `report`: where results go, and how much accuracy a format may cost to be recommended."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from pipelines.settings.base import Group

STORE = re.compile(r"(file:|sqlite:///|https?://)\S+")


class ReportSettings(Group):
    """Settings of the report and the comparison.

    Attributes:
        folder: where the files are written, relative to the current folder.
        max_accuracy_loss_percent: a format that loses more, or has NO-GO, is not chosen; percent of the baseline's
            accuracy.
        against: comparison.json of an earlier report, which is shown beside this one; None is none.
        mlflow: store of MLflow in which each result becomes a run: file:/folder, sqlite:////folder/mlflow.db or
            http://host:port; None is none.
    """

    folder: Path = Path("reports")
    max_accuracy_loss_percent: Annotated[float, Field(ge=0, le=100)] = 1.0
    against: Path | None = None
    mlflow: str | None = None

    @property
    def written(self) -> dict[str, Path]:
        """Folders of this machine that a report is written to, by the setting that names each."""
        folders = {"report.folder": self.folder}
        kind, _, place = (self.mlflow or "").partition(":")
        if kind == "file":
            folders["report.mlflow"] = Path(re.sub("^//", "", place))
        elif kind == "sqlite":
            folders["report.mlflow"] = Path(place.removeprefix("///")).parent
        return folders

    @field_validator("mlflow")
    @classmethod
    def _names_a_store(cls, uri: str | None) -> str | None:
        if uri is not None and not STORE.fullmatch(uri):
            allowed = "give file:/folder, sqlite:////file.db or http://host:port"
            raise ValueError(f"'{uri}' is not a store of MLflow: {allowed}")
        return uri and re.sub("^(file:|sqlite:///)(~/)", lambda match: f"{match[1]}{Path.home()}/", uri)
