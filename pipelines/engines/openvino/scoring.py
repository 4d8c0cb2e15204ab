"""Compute log probabilities of given tokens: run the engine's graph statefully, shared prefixes only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.prefixes import PrefixGroup, PrefixRow, plan
from pipelines.engines.openvino.runtime import FIRST_TOKENS, EngineFolder, inference_precision, properties

Array = np.ndarray[Any, Any]
Position = tuple[int, int]
"""(row of the batch, column) of required logits."""

LAST_ATTENTION = ".attention_residual"
"""End of the name of the node after which no token of a layer depends on another."""
MAX_LOGITS = 2**26
"""Most logits held at once, 256 MiB of float32."""
VALUES_AT_ONCE = 2**20
"""Values that are widened to float64 together, 8 MiB."""


class Scorer:
    """Scores continuations with a compiled stateful model. Rounding differs between batch shapes by about 1e-6 in f32.

    With formats that quantize activations such a difference may lead to another code, so there a pair alone and the
    same pair in a batch agree only to about 1e-3.
    """

    def __init__(self, folder: EngineFolder, options: OpenVinoOptions) -> None:
        """Load and compile.

        The KV state is kept in the inference precision: values of an 8-bit KV cache are already rounded by the graph.
        """
        core = ov.Core()
        self._limits = folder.limits
        self._max_logits_rows = max(1, MAX_LOGITS // folder.config.vocab_size)
        with folder.loading():
            model = with_chosen_logits(folder.read_model())
            self._compiled = core.compile_model(
                model, "CPU", properties(folder.config, options, inference_precision(options))
            )
            self._request = self._compiled.create_infer_request()
            self._infer(np.zeros((1, FIRST_TOKENS), dtype=np.int64), 0, np.zeros(1), list(range(FIRST_TOKENS)))

    def score(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], done: Callable[[float], None]
    ) -> list[tuple[float, bool]]:
        """Return per pair the summed log probability of the continuation and whether greedy decoding would produce it.

        Args:
            pairs: (context, continuation) token ids, both non-empty.
            done: called with the number of finished pairs.
        """
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for group in plan(pairs):
            batches = self._batches(group)
            self._start(group.rows[0].tokens[: group.shared])
            saved = self._save() if len(batches) > 1 else None
            for index, batch in enumerate(batches):
                if saved is not None and index:
                    self._restore(saved)
                self._score_batch(batch, group.shared, scores)
                done(sum(len(row.continuations) for row in batch))
        return scores

    def logits(self, tokens: Sequence[int]) -> Array:
        """Return the logits after every token, float32 [T, V]."""
        self._request.reset_state()
        parts: list[Array] = []
        wanted = [(0, column) for column in range(len(tokens))]
        self._feed(np.array([tokens], dtype=np.int64), 0, wanted, lambda _, logits: parts.append(logits))
        return np.concatenate(parts)

    def _batches(self, group: PrefixGroup) -> list[list[PrefixRow]]:
        """Split a group so that rows x longest rest <= max_num_tokens and rows <= max_batch_size."""
        batches: list[list[PrefixRow]] = []
        for row in sorted(group.rows, key=lambda row: len(row.tokens)):
            rest = len(row.tokens) - group.shared
            full = not batches or len(batches[-1]) >= self._limits.max_batch_size
            if full or (len(batches[-1]) + 1) * rest > self._limits.max_num_tokens:
                batches.append([])
            batches[-1].append(row)
        return batches

    def _start(self, prefix: Sequence[int]) -> None:
        self._request.reset_state()
        if prefix:
            self._feed(np.array([prefix], dtype=np.int64), 0, [], lambda *_: None)

    def _score_batch(self, batch: list[PrefixRow], shared: int, scores: list[tuple[float, bool]]) -> None:
        width = max(len(row.tokens) for row in batch) - shared
        tokens = np.zeros((len(batch), width), dtype=np.int64)  # padding comes last, so no token attends to it
        for index, row in enumerate(batch):
            tokens[index, : len(row.tokens) - shared] = row.tokens[shared:]
        asked: dict[Position, list[tuple[int, int]]] = {}  # what continuations have here: pair, token
        for index, row in enumerate(batch):
            for continuation in row.continuations:
                for offset, target in enumerate(continuation.targets):
                    position = (index, continuation.start - shared + offset)
                    asked.setdefault(position, []).append((continuation.pair, target))
        found: dict[int, list[tuple[float, bool]]] = {}

        def use(here: list[Position], logits: Array) -> None:
            picked = [(at, *each) for at, position in enumerate(here) for each in asked[position]]
            rows, pairs, targets = zip(*picked, strict=True)
            for pair, score in zip(pairs, _token_scores(logits, rows, targets), strict=True):
                found.setdefault(pair, []).append(score)

        self._feed(tokens, shared, list(asked), use)
        for pair, each in found.items():
            logprobs, greedy = zip(*each, strict=True)
            scores[pair] = (float(np.array(logprobs).sum()), all(greedy))

    def _feed(
        self, tokens: Array, past: int, wanted: list[Position], use: Callable[[list[Position], Array], None]
    ) -> None:
        """Run [B, T] tokens after `past` ones in pieces; a state of batch 1 is broadcast over the batch.

        Args:
            tokens: token ids.
            past: tokens that the state holds.
            wanted: positions (row, column) whose logits are wanted.
            use: called with those of each piece and their logits [N, V], so that those of long texts are never held
                together.
        """
        batch, width = tokens.shape
        size = max(1, self._limits.max_num_tokens // batch)
        if wanted:
            size = max(1, min(size, self._max_logits_rows // batch))
        for start in range(0, width, size):
            piece = tokens[:, start : start + size]
            here = sorted({p for p in wanted if start <= p[1] < start + piece.shape[1]})
            flat = [row * piece.shape[1] + column - start for row, column in here]
            rows = np.arange(batch) if start or past == 0 else np.zeros(batch)
            logits = self._infer(piece, past + start, rows, flat)
            if here:
                use(here, logits)

    def _infer(self, piece: Array, past: int, beam_idx: Array, flat: list[int]) -> Array:
        batch, width = piece.shape
        inputs = {
            "input_ids": piece,
            "attention_mask": np.ones((batch, past + width), dtype=np.int64),
            "position_ids": np.tile(np.arange(past, past + width, dtype=np.int64), (batch, 1)),
            "beam_idx": beam_idx.astype(np.int32),
            "logit_rows": np.array(flat, dtype=np.int64),
        }
        return np.array(self._request.infer(inputs)["logits"][0], dtype=np.float32)

    def _save(self) -> list[Array]:
        return [np.array(state.state.data, copy=True) for state in self._request.query_state()]

    def _restore(self, saved: list[Array]) -> None:
        self._request.reset_state()
        for state, values in zip(self._request.query_state(), saved, strict=True):
            state.state = ov.Tensor(values)


def with_chosen_logits(model: ov.Model) -> ov.Model:
    """Add the input `logit_rows` [N] and return logits [1, N, V] of these rows of [B * T] only.

    All that no other token depends on runs on these rows alone: the MLP of the last layer, the last norm and the head.
    """
    *_, residual = (node for node in model.get_ordered_ops() if node.get_friendly_name().endswith(LAST_ATTENTION))
    size = residual.get_output_partial_shape(0)[2].get_length()
    users = list(residual.output(0).get_target_inputs())
    chosen = op.parameter([-1], ov.Type.i64)
    chosen.set_friendly_name("logit_rows")
    chosen.get_output_tensor(0).set_names({"logit_rows"})
    flat = op.reshape(residual, np.array([1, -1, size], dtype=np.int64), special_zero=False)
    rows = op.gather(flat, chosen, np.int64(1))
    for user in users:
        user.replace_source_output(rows.output(0))
    model.add_parameters([chosen])
    model.validate_nodes_and_infer_types()
    return model


def _token_scores(logits: Array, rows: Sequence[int], targets: Sequence[int]) -> list[tuple[float, bool]]:
    """Return log softmax(logits [N, V]) of a token in each of some rows, and whether it is the likeliest.

    In float64, as 256,000 terms are added; a few rows at a time, which bounds the memory, and each row once.
    """
    norms: list[float] = []
    step = max(1, VALUES_AT_ONCE // logits.shape[1])
    for start in range(0, len(logits), step):
        wide = logits[start : start + step].astype(np.float64)
        top = wide.max(axis=1)
        norms += (top + np.log(np.exp(wide - top[:, None]).sum(axis=1))).tolist()
    best = logits.argmax(axis=1)
    return [
        (float(logits[row, token]) - norms[row], bool(best[row] == token))
        for row, token in zip(rows, targets, strict=True)
    ]
