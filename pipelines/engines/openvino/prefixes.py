"""Group token sequences so that shared prefixes are computed once (pure Python)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MIN_SHARED_TOKENS = 16
"""Fewest saved tokens for which a split into prefix and rest pays, as it costs one more inference."""
MIN_FILLED = 0.75
"""Least share of the longest prefix that another one has to fill in the same inference; what is left is padding."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The continuation of one pair to score; its first token is predicted at position `start`.

    Attributes:
        pair: index of the pair.
        start: position whose logits predict targets[0].
        targets: token ids of the continuation.
    """

    pair: int
    start: int
    targets: tuple[int, ...]


@dataclass(slots=True)
class PrefixRow:
    """One sequence to run and the continuations it serves."""

    tokens: tuple[int, ...]
    continuations: list[Continuation] = field(default_factory=list)

    @property
    def free(self) -> int:
        """Number of leading tokens whose logits are not needed."""
        return min(continuation.start for continuation in self.continuations)


@dataclass(slots=True)
class PrefixGroup:
    """Rows that share their first `shared` tokens."""

    shared: int
    rows: list[PrefixRow]

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that are shared."""
        return self.rows[0].tokens[: self.shared]


def plan(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[PrefixGroup]:
    """Arrange (context, continuation) pairs in groups of rows with a common prefix.

    Pairs whose sequences are equal, or where one is a prefix of the other, become one row: the four one-token answers
    to a question cost one row. The last token of a continuation is only predicted, never run. A row that shares
    nothing with another has no prefix.
    """
    rows: dict[tuple[int, ...], PrefixRow] = {}
    for index, (context, continuation) in enumerate(pairs):
        tokens = (*context, *continuation)[:-1]
        row = rows.setdefault(tokens, PrefixRow(tokens))
        row.continuations.append(Continuation(index, len(context) - 1, tuple(continuation)))
    groups = _grouped(_without_prefixes([rows[tokens] for tokens in sorted(rows)]))
    return [group if len(group.rows) > 1 else PrefixGroup(0, group.rows) for group in groups]


def together(groups: Sequence[PrefixGroup], tokens: int, count: int) -> Iterator[list[PrefixGroup]]:
    """Arrange groups so that their prefixes, padded to the longest, are run at once.

    A short prefix leaves a processor waiting for weights; many of them are one large product.

    Args:
        groups: groups of `plan`.
        tokens: most tokens of several prefixes, padding included.
        count: most prefixes.
    """
    joined: list[PrefixGroup] = []
    for group in sorted(groups, key=lambda group: group.shared):
        full = len(joined) >= count or (len(joined) + 1) * group.shared > tokens
        if joined and (full or joined[0].shared < MIN_FILLED * group.shared):
            yield joined
            joined = []
        joined.append(group)
    if joined:
        yield joined


def batches(groups: Sequence[PrefixGroup], tokens: int, count: int) -> list[list[tuple[int, PrefixRow]]]:
    """Split the rows of groups that run together into batches: rows x longest rest <= `tokens`, rows <= `count`.

    Returns:
        batches of (index of the group, row), the shortest rests first.
    """
    made: list[list[tuple[int, PrefixRow]]] = []
    rows = [(index, row, len(row.tokens) - group.shared) for index, group in enumerate(groups) for row in group.rows]
    for index, row, rest in sorted(rows, key=lambda each: each[2]):
        if not made or len(made[-1]) >= count or (len(made[-1]) + 1) * rest > tokens:
            made.append([])
        made[-1].append((index, row))
    return made


def _without_prefixes(ordered: list[PrefixRow]) -> list[PrefixRow]:
    """Move the continuations of a row to the next one if that extends it."""
    kept: list[PrefixRow] = []
    for row, following in zip(ordered, [*ordered[1:], None], strict=True):
        if following is not None and following.tokens[: len(row.tokens)] == row.tokens:
            following.continuations.extend(row.continuations)
        else:
            kept.append(row)
    return kept


def _grouped(ordered: list[PrefixRow]) -> Iterator[PrefixGroup]:
    """Join adjacent rows as long as this saves tokens.

    n rows that share p tokens cost p + sum(length - p). A further row lowers p to q: it saves its own q tokens and
    loses (n - 1)(p - q) that the others no longer share.
    """
    group: PrefixGroup | None = None
    for row in ordered:
        if group is not None:
            shared = min(group.shared, row.free, _common(group.rows[-1].tokens, row.tokens))
            lost = (len(group.rows) - 1) * (group.shared - shared)
            if shared - lost >= MIN_SHARED_TOKENS:
                group.shared = shared
                group.rows.append(row)
                continue
            yield group
        group = PrefixGroup(row.free, [row])
    if group is not None:
        yield group


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal leading tokens."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))
