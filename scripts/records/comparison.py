"""Compare two recordings row by row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.records.cases import GROUPS
from scripts.records.documents import Kind
from scripts.records.recording import Recording

Row = tuple[str, str]
"""Document name, and the name of the row in it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that differs; `before` or `after` is None where the row is missing."""

    row: Row
    before: Any
    after: Any


@dataclass(slots=True)
class CaseResult:
    """Result of comparing one case of one group.

    Attributes:
        rows: number of compared rows.
        different: rows that differ.
        renamed: rows whose names changed but not their values, before and after.
        rounded: relative changes of the numbers that differ within the allowed rounding.
        shown: Python files and prose that differ.
        whole: whole files that differ, when these are not judged.
    """

    rows: int = 0
    different: list[Difference] = field(default_factory=list)
    renamed: tuple[list[Row], list[Row]] | None = None
    rounded: list[float] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two recordings side by side; `cases` by "group/case"."""

    first: Recording
    second: Recording
    cases: Mapping[str, CaseResult]

    @property
    def equal(self) -> bool:
        """Return whether everything that is judged is equal."""
        return not any(result.different for result in self.cases.values())


def compare(
    first: Recording,
    second: Recording,
    groups: Sequence[str] = GROUPS,
    *,
    judge_whole: bool = False,
    rounding: float = 0.0,
) -> Comparison:
    """Compare the cases of some groups.

    Args:
        first: the recording before the change.
        second: the recording after it.
        groups: groups to compare; the others are ignored.
        judge_whole: whether whole .xml, .bin and .safetensors files must be equal, too.
        rounding: relative change that is ignored in numbers of plan, simulate, size and calibrate: a sum in another
            order has different last digits.
    """
    names = [name for name in {**first.cases, **second.cases} if name.split("/")[0] in groups]
    pairs = {name: (first.cases.get(name), second.cases.get(name)) for name in names}
    return Comparison(
        first, second, {name: _compare_case(*pair, judge_whole, rounding) for name, pair in pairs.items()}
    )


def _compare_case(before: Any, after: Any, judge_whole: bool, rounding: float) -> CaseResult:
    result = CaseResult()
    for row, old, new in (
        (("case", "recorded"), _yes(before is not None), _yes(after is not None)),
        (("case", "words"), before and before["words"], after and after["words"]),
    ):
        if old != new:
            result.different.append(Difference(row, old, new))
            return result
    for kind in Kind:
        old, new = _rows(before, kind), _rows(after, kind)
        found = [
            Difference(row, old.get(row), new.get(row))
            for row in {**old, **new}
            if row not in old or row not in new or old[row] != new[row]
        ]
        if kind == Kind.SHOWN:
            result.shown += [each.row[0] for each in found]
        elif kind == Kind.WHOLE and not judge_whole:
            result.whole += [each.row[0] for each in found]
        else:
            result.rows += len({**old, **new})
            if kind == Kind.NUMBERS:
                found = _without_rounded(_without_renamed(found, old, new, result), rounding, result)
            result.different += found
    return result


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _rows(case: Mapping[str, Any], kind: Kind) -> dict[Row, Any]:
    return {
        (document, name): value
        for document, content in case["documents"].items()
        if content["kind"] == kind
        for name, value in content["rows"].items()
    }


def _without_renamed(
    found: list[Difference], old: Mapping[Row, Any], new: Mapping[Row, Any], result: CaseResult
) -> list[Difference]:
    """Drop rows that are missing on one side if the rows missing on the other side have exactly their values."""
    gone = [each.row for each in found if each.row not in new]
    come = [each.row for each in found if each.row not in old]
    if not gone or Counter(_text(old[row]) for row in gone) != Counter(_text(new[row]) for row in come):
        return found
    result.renamed = (gone, come)
    return [each for each in found if each.row in old and each.row in new]


def _without_rounded(found: list[Difference], rounding: float, result: CaseResult) -> list[Difference]:
    """Drop the differences that are within the allowed rounding."""
    left = []
    for each in found:
        change = relative_change(each.before, each.after)
        if change is not None and abs(change) <= rounding:
            result.rounded.append(abs(change))
        else:
            left.append(each)
    return left


def relative_change(before: Any, after: Any) -> float | None:
    """Return (after - before) / before; None if a value is not a number or `before` is 0."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, after))
    return (after - before) / before if numbers and before else None


def _text(value: Any) -> str:
    """Return the same text for equal values, such as 1 and 1.0."""
    return json.dumps(float(value) if isinstance(value, int | float) else value)
