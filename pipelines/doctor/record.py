"""Records of a diagnosis."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "bad"]
"""In this order: works; worth knowing, or missing but not needed; needed and broken."""

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of one probe.

    Attributes:
        name: of what was examined, in one or two words.
        value: what was found.
        status: how good it is.
        todo: what to do about it, or empty.
    """

    name: str
    value: str
    status: Status = "ok"
    todo: str = ""


@dataclass(frozen=True, slots=True)
class CombinationVerdict:
    """Verdict on one combination of engine, model and format on this machine.

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
    """The whole diagnosis.

    Attributes:
        sections: title -> results, in the order shown.
        verdicts: on every combination.
        broken: what the configured pipeline needs and this machine lacks; empty when it would run.
    """

    sections: dict[str, list[ProbeResult]]
    verdicts: list[CombinationVerdict] = field(default_factory=list)
    broken: list[ProbeResult] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON; docs/gpu.md has the schema."""
        return {"schema": SCHEMA, "works": not self.broken, **asdict(self)}
