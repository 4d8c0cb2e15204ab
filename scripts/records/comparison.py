"""Two recordings, compared row by row."""

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
"""Document and name of the row in it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that is not the same; `before` or `after` is None where it is missing."""

    row: Row
    before: Any
    after: Any


@dataclass(slots=True)
class CaseResult:
    """One case of one group.

    Attributes:
        rows: how many were compared.
        different: those that are not the same.
        renamed: rows with another name and the same values, before and after.
        shown: Python files and prose that are not the same.
        whole: whole files that are not the same, where those are not judged.
    """

    rows: int = 0
    different: list[Difference] = field(default_factory=list)
    renamed: tuple[list[Row], list[Row]] | None = None
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
        """Whether nothing that is judged differs."""
        return not any(result.different for result in self.cases.values())


def compare(
    first: Recording, second: Recording, groups: Sequence[str] = GROUPS, *, judge_whole: bool = False
) -> Comparison:
    """Compare the cases of some groups.

    Args:
        first: the recording before.
        second: and after.
        groups: the others are left out.
        judge_whole: whole .xml, .bin and .safetensors files must be equal, too.
    """
    names = [name for name in {**first.cases, **second.cases} if name.split("/")[0] in groups]
    return Comparison(
        first,
        second,
        {name: _compare_case(first.cases.get(name), second.cases.get(name), judge_whole) for name in names},
    )


def _compare_case(before: Any, after: Any, judge_whole: bool) -> CaseResult:
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
            result.different += _without_renamed(found, old, new, result) if kind == Kind.NUMBERS else found
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
    """The differences that are left when rows that are missing on one side have just the values of the other's."""
    gone = [each.row for each in found if each.row not in new]
    come = [each.row for each in found if each.row not in old]
    if not gone or Counter(_text(old[row]) for row in gone) != Counter(_text(new[row]) for row in come):
        return found
    result.renamed = (gone, come)
    return [each for each in found if each.row in old and each.row in new]


def _text(value: Any) -> str:
    """One text of equal values: 1 and 1.0 are."""
    return json.dumps(float(value) if isinstance(value, int | float) else value)
