"""The words of a diagnosis."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "bad"]
"""Works; worth knowing, or only something that nobody asked for is missing; needed and broken."""

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One thing that was looked at.

    Attributes:
        name: what, in one or two words.
        value: what was found.
        status: how good that is.
        todo: what to do, or empty.
    """

    name: str
    value: str
    status: Status = "ok"
    todo: str = ""


@dataclass(frozen=True, slots=True)
class CombinationVerdict:
    """Whether one combination works on this machine.

    Attributes:
        engine: flavour.
        model: name under conf/model.
        quant: name under conf/quant.
        works: whether `make plan` would accept it.
        reason: why not.
        todo: what makes it work.
    """

    engine: str
    model: str
    quant: str
    works: bool
    reason: str = ""
    todo: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        sections: title -> findings, in the order shown.
        verdicts: what works here and what does not.
        broken: what the configured pipeline needs here and lacks; empty when it would run.
    """

    sections: dict[str, list[ProbeResult]]
    verdicts: list[CombinationVerdict] = field(default_factory=list)
    broken: list[ProbeResult] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For programs; the schema stands in docs/doctor.md."""
        return {"schema": SCHEMA, "works": not self.broken, **asdict(self)}
