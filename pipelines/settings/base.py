"""Base class of all groups of settings, and the messages for values that are not valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipelines.domain.errors import Fault, UserError, did_you_mean

Positive = Annotated[int, Field(ge=1)]


class Group(BaseModel):
    """Base of all groups: frozen, strict about unknown keys and about types.

    A group's validator is built on first use: most groups are validated only inside `Settings`, which builds its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def judged(cls, values: Mapping[str, Any], key: str = "") -> Self:
        """Validate a user's values and make the group.

        Args:
            values: by field.
            key: prefix of the fields in messages, e.g. "engine.openvino."; empty for the whole configuration.

        Raises:
            UserError: every fault at once: the key, what was given, what is allowed.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError.of([_fault(cls, key, dict(item)) for item in error.errors()]) from None


def _fault(group: type[Group], prefix: str, item: Mapping[str, Any]) -> Fault:
    """Turn one pydantic error into a fault with our four parts."""
    key = prefix + ".".join(str(part) for part in item["loc"])
    given = "null" if item.get("input") is None else item["input"]
    if item["type"] == "extra_forbidden":
        near = did_you_mean(str(item["loc"][-1]), _siblings(group, item["loc"]))
        return Fault(f"{key} is not a known key.", near)
    if item["type"] == "value_error":
        said = str(item["ctx"]["error"])
        return Fault(f"{key} {said}" if said.endswith("?") else f"{key} {said}.")
    if item["type"] in ("enum", "literal_error"):
        choices = str(item["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        hint = did_you_mean(str(given), choices.split(", "))
        return Fault(f"{key}='{given}' is not known.", f"Choose one of {choices}.", hint)
    if item["type"] == "tuple_type":
        return Fault(f"{key}='{given}' is not a list.", todo=f"Write {key}=[{given}].")
    if item["type"] == "missing":
        return Fault(f"{key} must be given.", todo=f"Add {key}=...")
    if item["type"] == "model_type":
        return Fault(
            f"{key}='{given}' is not valid: {key} is a group of settings.", todo=f"Set its keys: {key}.KEY=..."
        )
    return Fault(f"{key}='{given}' is not valid: {item['msg'][:1].lower() + item['msg'][1:]}.")


def _siblings(group: type[Group], loc: tuple[Any, ...]) -> list[str]:
    """List the fields of the group in which a key was found."""
    for part in loc[:-1]:
        annotation = group.model_fields[part].annotation
        kinds = (annotation, *get_args(annotation))
        group = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Group))
    return list(group.model_fields)
