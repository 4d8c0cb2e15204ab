"""Logits after every token, of the graph that scores."""

from collections.abc import Sequence

import numpy as np

from pipelines.engines.openvino.engine import OpenVinoSession
from pipelines.engines.openvino.scoring import NOTHING_PAST, Scorer


def scored_logits(reader: OpenVinoSession | Scorer, tokens: Sequence[int]) -> np.ndarray:
    """Return them in float32 [T, V]."""
    scorer = reader if isinstance(reader, Scorer) else reader._scoring()
    scorer._request.reset_state()
    parts: list[np.ndarray] = []
    positions = [(0, column) for column in range(len(tokens))]
    scorer._feed(
        np.array([tokens], dtype=np.int64), NOTHING_PAST, positions, lambda _, logits: parts.append(logits.copy())
    )
    return np.concatenate(parts)
