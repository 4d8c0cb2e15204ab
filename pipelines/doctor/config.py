"""Settings of the command `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

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

    @field_validator("kubeconfig")
    @classmethod
    def _is_there(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_file():
            raise ValueError(f"'{path}' is not a file: give the kubeconfig of the cluster, such as ~/.kube/config")
        return path
