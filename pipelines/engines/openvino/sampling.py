"""Choose the next token from logits, for requests that the pipeline's own sampler cannot serve (pure numpy)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from pipelines.engines.openvino.generation_request import GenerationRequest

Array = np.ndarray[Any, Any]

NEVER = -np.inf


class TokenChooser:
    """Chooses the tokens of one sequence, in openvino_genai's order: penalties, temperature, top-k and top-p."""

    def __init__(self, request: GenerationRequest, seed: int) -> None:
        """Take the limits; `seed` replaces that of `request`."""
        self._request = request
        self._random = np.random.default_rng(seed)
        self._output: Counter[int] = Counter()
        self._history: list[int] = request.prompt.tolist()
        self._chosen = 0
        self._guided = request.guide.follow(request.end_id) if request.guide is not None else None

    @property
    def complete(self) -> bool:
        """Whether the guide lets nothing follow."""
        return self._guided is not None and self._guided.complete

    def choose(self, logits: Array) -> tuple[int, float]:
        """Return the next token and its log probability.

        Args:
            logits: the model's logits, float32 [V]; not modified.

        Raises:
            ValueError: the logits contain NaN, every token is excluded, or the guide is too complex.
        """
        scores = self._adjusted(logits.astype(np.float64))
        if self._guided is not None:
            scores = np.where(self._guided.allowed(), scores, NEVER)
        top = scores.max()
        if not np.isfinite(top):
            raise ValueError(
                "no token can be chosen: the model returned NaN"
                if np.isnan(top)
                else "no token can be chosen: bad words, min_tokens and the guide exclude all"
            )
        token = self._draw(scores) if self._request.samples else int(scores.argmax())
        log_prob = float(scores[token] - top - np.log(np.exp(scores - top).sum()))
        if self._guided is not None:
            self._guided.take(token)
        self._output[token] += 1
        self._history.append(token)
        self._chosen += 1
        return token, log_prob

    def _adjusted(self, scores: Array) -> Array:
        request = self._request
        if request.bias is not None:
            scores = scores + request.bias
        if request.repetition_penalty != 1:
            seen = np.fromiter({token for token in self._history if token < len(scores)}, dtype=np.int64)
            scores[seen] *= np.where(scores[seen] > 0, 1 / request.repetition_penalty, request.repetition_penalty)
        if self._output and (request.presence_penalty or request.frequency_penalty):
            tokens = np.fromiter(self._output, dtype=np.int64)
            counts = np.fromiter(self._output.values(), dtype=np.float64)
            scores[tokens] -= request.presence_penalty + request.frequency_penalty * counts
        if 0 <= request.end_id < len(scores) and self._chosen < request.min_tokens:
            scores[request.end_id] = NEVER
        for word in request.bad_words:
            *before, last = word
            if last < len(scores) and self._history[len(self._history) - len(before) :] == before:
                scores[last] = NEVER
        return scores

    def _draw(self, scores: Array) -> int:
        request = self._request
        order = np.argsort(-scores, kind="stable")[: request.top_k or None]
        ranked = scores[order] / request.temperature
        weights = np.exp(ranked - ranked[0])
        weights /= weights.sum()
        if 0 < request.top_p < 1:
            nucleus = int(np.searchsorted(np.cumsum(weights), request.top_p)) + 1
            order, weights = order[:nucleus], weights[:nucleus] / weights[:nucleus].sum()
        return int(self._random.choice(order, p=weights))
