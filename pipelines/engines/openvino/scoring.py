"""Compute log probabilities of given tokens: run the engine's graph statefully, shared prefixes only once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import openvino as ov

from pipelines.engines.openvino.prompt_table import NAME
from pipelines.engines.openvino.runtime import EngineFolder
from pipelines.engines.openvino.stateful import MAX_LOGITS, StatefulModel
from pipelines.engines.openvino.vision import VisualRows
from pipelines.host.log_probs import norms_of

# Group token sequences so that shared prefixes are computed once (pure Python).

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
    ordered = [rows[tokens] for tokens in sorted(rows)]
    longest: list[PrefixRow] = []
    for row, following in zip(ordered, [*ordered[1:], None], strict=True):
        if following is not None and following.tokens[: len(row.tokens)] == row.tokens:
            following.continuations.extend(row.continuations)  # it extends this one
        else:
            longest.append(row)
    groups = _grouped(longest)
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


def _grouped(ordered: list[PrefixRow]) -> Iterator[PrefixGroup]:
    """Join adjacent rows as long as this saves tokens.

    n rows that share p tokens cost p + sum(length - p). A further row lowers p to q: it saves its own q tokens and
    loses (n - 1)(p - q) that the others no longer share.
    """
    group: PrefixGroup | None = None
    for row in ordered:
        if group is not None:
            pairs = zip(group.rows[-1].tokens, row.tokens, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            shared = min(group.shared, row.free, common)
            lost = (len(group.rows) - 1) * (group.shared - shared)
            if shared - lost >= MIN_SHARED_TOKENS:
                group.shared = shared
                group.rows.append(row)
                continue
            yield group
        group = PrefixGroup(row.free, [row])
    if group is not None:
        yield group


Array = np.ndarray[Any, Any]
Position = tuple[int, int]
"""(row of the batch, column) of required logits."""

TOKENS_AT_ONCE = 1024
"""Most tokens of one inference: more do not make products faster, and what layers hold grows with them."""


@dataclass(frozen=True, slots=True)
class _Past:
    """Contents of the state while tokens run.

    Attributes:
        lengths: tokens of each sequence in it [S]; the columns after them, up to the longest, are padding.
        of: the sequence that each row of the batch continues [B].
    """

    lengths: Array
    of: Array


NOTHING_PAST = _Past(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


class Scorer:
    """Scores continuations with a compiled stateful model. Rounding differs between batch shapes by about 1e-6 in f32.

    With formats that quantize activations such a difference may lead to another code, so there a pair alone and the
    same pair in a batch agree only to about 1e-3.
    """

    def __init__(self, folder: EngineFolder, model: StatefulModel, visual: VisualRows | None = None) -> None:
        """Take the engine, its compiled graph, and what turns ids of pictures into rows of its prompt table."""
        self._visual, self._no_table = visual, model.no_table
        most = folder.limits.max_batch_size
        self._max_batch_size = most if visual is None else min(most, visual.at_once)
        self._tokens_at_once = min(folder.limits.max_num_tokens, TOKENS_AT_ONCE)
        self._max_logits_rows = max(1, MAX_LOGITS // folder.config.vocab_size)
        self._request = model.compiled.create_infer_request()

    def score(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], done: Callable[[float], None]
    ) -> list[tuple[float, bool]]:
        """Return per pair the summed log probability of the continuation and whether greedy decoding would produce it.

        Args:
            pairs: (context, continuation) token ids, both non-empty.
            done: called with the number of finished pairs.
        """
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        count = min(self._max_batch_size, self._max_logits_rows)
        for groups in together(plan(pairs), self._tokens_at_once, count):
            made = batches(groups, self._tokens_at_once, count)
            past = self._start(groups)
            states = self._request.query_state() if len(made) > 1 and past.any() else ()
            saved = [np.array(state.state.data, copy=True) for state in states]
            for index, batch in enumerate(made):
                if index:
                    self._request.reset_state()
                    # the tensors of the empty state cannot be set
                    for state, values in zip(self._request.query_state() if saved else (), saved, strict=True):
                        state.state = ov.Tensor(values)
                self._score_batch(batch, past, scores)
                done(sum(len(row.continuations) for _, row in batch))
        return scores

    def _start(self, groups: Sequence[PrefixGroup]) -> Array:
        """Run the prefixes of groups and return their lengths [groups]."""
        self._request.reset_state()
        lengths = np.array([group.shared for group in groups])
        if lengths.any():
            self._feed(_padded([group.prefix for group in groups]), NOTHING_PAST, [], lambda *_: None)
        return lengths

    def _score_batch(self, batch: list[tuple[int, PrefixRow]], past: Array, scores: list[tuple[float, bool]]) -> None:
        of = np.array([group for group, _ in batch])
        targets: dict[Position, list[tuple[int, int]]] = {}  # (pair, token) of the continuations here
        for index, (group, row) in enumerate(batch):
            for continuation in row.continuations:
                for offset, target in enumerate(continuation.targets):
                    position = (index, continuation.start - int(past[group]) + offset)
                    targets.setdefault(position, []).append((continuation.pair, target))
        of_pairs: dict[int, list[tuple[float, bool]]] = {}

        def use(here: list[Position], logits: Array) -> None:
            picked = [(at, *each) for at, position in enumerate(here) for each in targets[position]]
            norms, best = norms_of(logits).tolist(), logits.argmax(axis=1)
            for row, pair, target in picked:
                score = float(logits[row, target]) - norms[row], bool(best[row] == target)
                of_pairs.setdefault(pair, []).append(score)

        rests = [row.tokens[past[group] :] for group, row in batch]
        self._feed(_padded(rests), _Past(past, of), list(targets), use)
        for pair, each in of_pairs.items():
            logprobs, greedy = zip(*each, strict=True)
            scores[pair] = (float(np.array(logprobs).sum()), all(greedy))

    def _feed(
        self, tokens: Array, past: _Past, positions: list[Position], use: Callable[[list[Position], Array], None]
    ) -> None:
        """Run [B, T] tokens in pieces.

        Args:
            tokens: token ids.
            past: what the state holds.
            positions: (row, column) whose logits are wanted.
            use: called with those of each piece and their logits [N, V], which the next piece overwrites.
        """
        batch, width = tokens.shape
        ordered = sorted(positions, key=lambda position: position[1])
        size = max(1, self._tokens_at_once // batch)
        start = 0
        while start < width:
            stop = min(start + size, width)
            here = [position for position in ordered if start <= position[1] < stop]
            if len(here) > self._max_logits_rows:  # before the column of the first one that is too many
                stop = here[self._max_logits_rows][1]
                here = [position for position in here if position[1] < stop]
            here.sort()
            flat = [row * (stop - start) + column - start for row, column in here]
            logits = self._infer(tokens[:, start:stop], past, start, flat)
            if here:
                use(here, logits)
            start = stop

    def _infer(self, piece: Array, past: _Past, start: int, flat: list[int]) -> Array:
        """Run tokens [B, t] that follow `start` others after `past`; the next inference overwrites the logits."""
        batch, width = piece.shape
        lengths = past.lengths[past.of] if past.of.size else np.zeros(batch, dtype=np.int64)
        columns = int(past.lengths.max(initial=0))
        mask = np.ones((batch, columns + start + width), dtype=np.int64)
        mask[:, :columns] = np.arange(columns) < lengths[:, None]
        inputs = {
            "input_ids": np.ascontiguousarray(piece),
            "attention_mask": mask,
            "position_ids": lengths[:, None] + np.arange(start, start + width),
            "beam_idx": (past.of if columns and not start else np.arange(batch)).astype(np.int32),
            "logit_rows": np.array(flat, dtype=np.int64),
        }
        if self._visual is not None:
            inputs["input_ids"], inputs[NAME] = self._visual(piece)
        elif self._no_table is not None:
            inputs[NAME] = self._no_table
        logits: Array = self._request.infer(inputs, share_outputs=True)["logits"][0]
        return logits


def _padded(rows: Sequence[Sequence[int]]) -> Array:
    """Return token ids [B, T]; padding comes last, so no token attends to it in the same inference."""
    tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens
