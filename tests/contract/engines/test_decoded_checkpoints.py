"""The model that `make diagnose` makes of a checkpoint, to compare with the engine, is the one that was exported."""

import numpy as np
import pytest

from pipelines.checkpoint.read import Checkpoint
from pipelines.compress.traced import trace_checkpoint, trace_model
from pipelines.domain.formats import QFormat
from tests.contract.engines.conftest import Workshop, relative_error


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_16_bit_checkpoint_is_the_original(kind: str, workshop: Workshop) -> None:
    """Gemma's norms are stored as bf16(1 + w), which is all that differs."""
    source, ids = workshop.source(kind), workshop.batch(kind)[0, :32].tolist()
    checkpoint = Checkpoint(workshop.checkpoint(kind, QFormat.NONE))
    found, expected = (
        np.asarray(model.logits([ids])[0]) for model in (trace_checkpoint(source, checkpoint), trace_model(source))
    )
    assert relative_error(found, expected) <= (1e-2 if kind == "gemma" else 1e-6)
