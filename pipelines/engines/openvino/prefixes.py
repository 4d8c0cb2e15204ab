"""Group token sequences so that shared prefixes are computed once (pure Python)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MIN_SHARED_TOKENS = 16
"""Fewest saved tokens for which a split into prefix and rest pays, as it costs one more inference."""


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


def plan(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[PrefixGroup]:
    """Arrange (context, continuation) pairs in groups of rows with a common prefix.

    Pairs whose sequences are equal, or where one is a prefix of the other, become one row: the four one-token answers
    to a question cost one row. The last token of a continuation is only predicted, never run.
    """
    rows: dict[tuple[int, ...], PrefixRow] = {}
    for index, (context, continuation) in enumerate(pairs):
        tokens = (*context, *continuation)[:-1]
        row = rows.setdefault(tokens, PrefixRow(tokens))
        row.continuations.append(Continuation(index, len(context) - 1, tuple(continuation)))
    return list(_grouped(_without_prefixes([rows[tokens] for tokens in sorted(rows)])))


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
