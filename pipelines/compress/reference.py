"""A model as Transformers itself computes it, in float32: the reference for everything that is made from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pipelines.compress.gpu_memory import gpu_memory_named
from pipelines.compress.loading import load_model
from pipelines.compress.model_folder import look_at, pick_device
from pipelines.compress.quiet import muted, transformers_to_log
from pipelines.domain.progress import Progress

IN_FLOAT32, OTHERWISE = "the model in float32", "set eval.baseline=build"
TOKENS_AT_ONCE = 4096
"""Tokens of the sequences that are computed together, unless a single one is longer."""

Sequences = dict[int, dict[tuple[int, ...], list[int]]]
"""Sequences by their length, each with the positions of the pairs that it scores."""


class ReferenceModel:
    """A Hugging Face model that scores continuations.

    The weights are those on disk and the arithmetic is float32, so nothing is rounded that the model's author did not
    round. Sequences of equal length are computed together, so that none needs padding.

    Attributes:
        max_position_embeddings: longest sequence that the model knows.
    """

    def __init__(self, model_dir: Path, device: str) -> None:
        """Load the model.

        Raises:
            UserError: the folder is not a readable model, or the device does not exist.
        """
        source = look_at(model_dir)
        self.max_position_embeddings = source.shape.max_position_embeddings
        self._device = pick_device(device)
        with muted(), transformers_to_log(), gpu_memory_named(IN_FLOAT32, OTHERWISE):
            self._model = load_model(source, "float32", self._device)

    def loglikelihood(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], progress: Progress
    ) -> list[tuple[float, bool]]:
        """Score continuations; see `pipelines.engines.port.ScoringSession`."""
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        with progress.task("scoring with Transformers", total=len(pairs), unit="pairs") as advance:
            for length, sequences in sorted(_by_length(pairs).items()):
                together = max(1, TOKENS_AT_ONCE // length)
                fed = list(sequences)
                for start in range(0, len(fed), together):
                    batch = fed[start : start + together]
                    wanted = [sequences[sequence] for sequence in batch]
                    keep = max(len(pairs[position][1]) for positions in wanted for position in positions)
                    for row, positions in zip(self._log_probabilities(batch, keep), wanted, strict=True):
                        for position in positions:
                            scores[position] = _score(row, pairs[position][1])
                        advance(len(positions))
        return scores

    def _log_probabilities(self, batch: Sequence[Sequence[int]], keep: int) -> torch.Tensor:
        """Return the natural-log probabilities after the last `keep` tokens of each sequence: [batch, keep, tokens]."""
        with torch.inference_mode(), gpu_memory_named(IN_FLOAT32, OTHERWISE):
            logits = self._model(torch.tensor(batch, device=self._device), logits_to_keep=keep).logits
        return torch.log_softmax(logits, dim=-1).cpu()


def _by_length(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Sequences:
    """Group what is fed to the model; the last token of a continuation is only predicted."""
    found: Sequences = {}
    for position, (context, continuation) in enumerate(pairs):
        fed = (*context, *continuation[:-1])
        found.setdefault(len(fed), {}).setdefault(fed, []).append(position)
    return found


def _score(log_probabilities: torch.Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """Return the summed log probability of a continuation, and whether it is what greedy decoding would produce."""
    last = log_probabilities[-len(continuation) :]
    tokens = torch.tensor(continuation)
    return float(last.gather(1, tokens[:, None]).sum()), bool((last.argmax(-1) == tokens).all())
