"""Settings of the command `doctor`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipelines.settings.base import Group


class DoctorSettings(Group):
    """How `make doctor` answers.

    Attributes:
        format: text for people, json for programs.
        timeout_s: how long the Hub may take to answer.
        kubeconfig: of a cluster that `make manifests` writes for; its current context is examined too.
    """

    format: Literal["text", "json"] = "text"
    timeout_s: Annotated[float, Field(gt=0)] = 2.0
    kubeconfig: Path | None = None
