"""JSON of a benchmark tool, read key by key; a missing key is named, and distributions come in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import UserError

SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
SECONDS |= {"s/token": 1.0, "ms/token": 1e-3}
KEPT_UP = 0.95
"""Share of the requested rate from which on a load generator kept up with it."""
Names = Mapping[str, Sequence[str]]
"""Field of `Distribution` -> path of keys to its value."""


@dataclass(frozen=True, slots=True)
class ResultFile:
    """JSON of a tool. `source` is the file, `tool` its name for messages."""

    data: Any
    source: str
    tool: str

    def get(self, *keys: str | int) -> Any:
        """Return the value at a path of keys, or None."""
        found = self.data
        for key in keys:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    def need(self, *keys: str) -> Any:
        """Return the value at a path of keys.

        Raises:
            UserError: the value is missing.
        """
        if (found := self.get(*keys)) is None:
            raise self.fault(".".join(keys))
        return found

    def number(self, *keys: str) -> float:
        """Return a number (some versions write numbers as text).

        Raises:
            UserError: the value is missing or not a number.
        """
        found = self.need(*keys)
        try:
            return float(found)
        except (TypeError, ValueError):
            raise UserError(f"{self.source}: {'.'.join(keys)}={found!r} is not a number.") from None

    def whole(self, *keys: str) -> int | None:
        """Return a whole number, or None if it is missing or 0.

        Raises:
            UserError: the value is not a number.
        """
        return int(self.number(*keys)) or None if self.get(*keys) is not None else None

    def fault(self, key: str, todo: str = "") -> UserError:
        """Build the error for a missing key."""
        return UserError(
            f"{self.source} ({self.tool}) lacks '{key}'.", todo=todo or "Give the file as the tool wrote it."
        )

    def unsupported(self, load: str, supported: str) -> UserError:
        """Build the error for a kind of load that cannot be compared."""
        return UserError(f"{self.source} ({self.tool}) was measured with '{load}'.", allowed=f"Supported: {supported}.")

    def seconds(self, *keys: str) -> float:
        """Return the seconds of the time unit at a path of keys.

        Raises:
            UserError: the unit is missing or not known.
        """
        unit = str(self.need(*keys))
        if unit not in SECONDS:
            raise UserError(
                f"{self.source}: {'.'.join(keys)}='{unit}' is not known.", allowed=f"Supported: {', '.join(SECONDS)}."
            )
        return SECONDS[unit]

    def distribution(
        self, at: Sequence[str], scale: float, names: Names, *, count: int = 1, need: Sequence[str] = ("mean", "p50")
    ) -> Distribution:
        """Return the distribution below a path of keys.

        Args:
            at: path to its values.
            scale: seconds of one unit of them.
            names: path to each value, from `at`.
            count: number of observations, if the file does not have it.
            need: values that must be there.

        Raises:
            UserError: one of them is missing.
        """
        values = {name: self._scaled((*at, *names[name]), scale) for name in names if name != "count"}
        if missing := [name for name in need if values[name] is None]:
            raise self.fault(".".join((*at, *names[missing[0]])))
        counted = self.get(*at, *names["count"]) if "count" in names else None
        return Distribution(count=int(counted or count), **values)

    def _scaled(self, keys: Sequence[str], scale: float) -> float | None:
        return None if self.get(*keys) is None else self.number(*keys) * scale

    def finished(self, *keys: str) -> int:
        """Return the number of finished requests at a path of keys.

        Raises:
            UserError: the value is missing or not a number, or no request finished.
        """
        if done := int(self.number(*keys)):
            return done
        raise UserError(f"{self.source} ({self.tool}) has no finished request.", todo="Measure again.")

    def held_note(self, rate: float, users: int) -> str:
        """Return the note on a rate that a cap on the concurrency held back."""
        return (
            f"{self.source}: {rate:g} requests/s were asked for, but never more than {users} ran at once; the others "
            "waited in the client, and no latency includes that. It counts as a closed loop."
        )

    def notes(self, *, streamed: bool, lost: float = 0, total: float = 0) -> list[str]:
        """Return the notes on a load that was not streamed, or in which `lost` of `total` requests failed."""
        notes = [] if streamed else [f"{self.source} was not streamed: it has no TTFT and no ITL."]
        if lost > 0:
            notes.append(f"{self.source}: {lost:,.0f} of {total:,.0f} requests failed; the figures cover the others.")
        return notes
