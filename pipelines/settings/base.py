"""What every group of settings is made of; each room keeps its own groups beside the code that reads them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]


class Group(BaseModel):
    """Base of all groups: frozen, strict about unknown keys and about types.

    What judges a group is built when it is first used: most are only judged inside `Settings`, which builds its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
