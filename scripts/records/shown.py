"""Format a comparison as text for a terminal."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.records.cases import GROUPS
from scripts.records.comparison import CaseResult, Comparison, Difference, Row, relative_change
from scripts.records.documents import without_indices
from scripts.records.recording import differing

LONGEST = 100
"""Maximum number of characters of a value that are shown."""


def lines(found: Comparison, most: int) -> Iterator[str]:
    """Yield the lines that show what was compared, what differs, and the verdict.

    Args:
        found: the comparison.
        most: maximum number of differing rows and lines that are shown for a case.
    """
    yield f"before {found.first.commit[:12]}, after {found.second.commit[:12]}"
    if other := differing(found.first.environment, found.second.environment):
        yield f"note: recorded with different versions, which may explain a difference: {other}"
    for group in GROUPS:
        results = [result for name, result in found.cases.items() if name.startswith(f"{group}/")]
        if results:
            yield f"{group:<13}{_counts(results)}"
    for name, result in found.cases.items():
        if result.different:
            yield f"\n{name}: {_many(len(result.different), 'difference')}"
            yield from _indented(_differences(result.different, most))
    yield from _allowed(found)
    different = sum(bool(result.different) for result in found.cases.values())
    yield f"\ndifferent: {different} of {_many(len(found.cases), 'case')}" if different else "\nequal"


def _counts(results: Sequence[CaseResult]) -> str:
    different = sum(len(result.different) for result in results)
    text = f"{_many(len(results), 'case'):>9} {sum(result.rows for result in results):>7,} rows  "
    return text + (_many(different, "difference") if different else "equal")


def _differences(found: Sequence[Difference], most: int) -> Iterator[str]:
    for each in found[:most]:
        document, name = each.row
        if isinstance(each.before, str) and isinstance(each.after, str) and "\n" in each.before + each.after:
            yield f"{document}:"
            changed = difflib.unified_diff(each.before.splitlines(), each.after.splitlines(), lineterm="", n=1)
            yield from _indented(_first(list(changed)[2:], most))
        else:
            yield f"{document}: {name}: {_change(each)}"
    if len(found) > most:
        yield f"... and {len(found) - most} more"


def _change(each: Difference) -> str:
    before, after = each.before, each.after
    if isinstance(before, list) and isinstance(after, list):
        gone, come = Counter(before) - Counter(after), Counter(after) - Counter(before)
        return f"only before {_short(sorted(gone.elements()))}, only after {_short(sorted(come.elements()))}"
    if before is None or after is None:
        return f"only before: {_short(before)}" if after is None else f"only after: {_short(after)}"
    if isinstance(before, str) and isinstance(after, str) and max(len(before), len(after)) > LONGEST:
        return _changed_words(before, after)
    text = f"{_short(before)} -> {_short(after)}"
    change = relative_change(before, after)
    return text if change is None else f"{text} ({100 * change:+.3g} %)"


def _changed_words(before: str, after: str) -> str:
    """Return only the words that differ between two long lines."""
    first, second = before.split(), after.split()
    changes = [
        f"{_short(' '.join(first[a:b])) or 'nothing'} -> {_short(' '.join(second[c:d])) or 'nothing'}"
        for word, a, b, c, d in difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
        if word != "equal"
    ]
    return "; ".join(changes)


def _allowed(found: Comparison) -> Iterator[str]:
    """Yield lines about the differences that are allowed and not judged."""
    for name, result in found.cases.items():
        if result.renamed is not None:
            gone, come = (_keys(rows) for rows in result.renamed)
            yield f"\n{name}: renamed keys, same values: {', '.join(gone)} -> {', '.join(come)}"
    if rounded := [change for result in found.cases.values() for change in result.rounded]:
        yield f"\nnumbers that differ by rounding alone: {len(rounded):,}, by at most {100 * max(rounded):.2g} %"
    if whole := [document for result in found.cases.values() for document in result.whole]:
        kinds = Counter(document.removesuffix(" (whole)").rsplit(".", 1)[-1] for document in whole)
        text = ", ".join(f"{count} .{ending}" for ending, count in kinds.items())
        yield f"\nwhole files that differ although their content is equal or shown above: {text} (--xml judges them)"
    if shown := {document.split("/", 1)[-1] for result in found.cases.values() for document in result.shown}:
        yield f"\nPython files and prose that differ (not judged): {', '.join(sorted(shown))}"


def _keys(rows: Sequence[Row]) -> list[str]:
    """Return documents and names, with one entry for all elements of a list."""
    return list(dict.fromkeys(f"{document}: {without_indices(name)}" for document, name in rows))


def _first(found: Sequence[str], most: int) -> list[str]:
    return [*found[:most], *([f"... and {len(found) - most} more lines"] if len(found) > most else [])]


def _indented(found: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in found)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
