"""Guesses of a draft model are counted from outside: what an iteration brings tells how many were right."""

from typing import Any

import numpy as np
import pytest

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.generation_request import ModelLimits
from pipelines.engines.openvino.request_inputs import read_requests
from pipelines.engines.openvino.sequences import DraftUse

BOUNDS = ModelLimits(vocab_size=1920, max_beam_width=3, draft_model=True, lora_tasks=frozenset({1, 7}))


def inputs(**values: Any) -> dict[str, np.ndarray]:
    given = {"input_ids": [[2, 5]], "request_output_len": [[8]], **{name: [[value]] for name, value in values.items()}}
    return {name: np.array(value) for name, value in given.items()}


def test_an_iteration_brings_the_right_guesses_and_one_token_more() -> None:
    """The first token is nobody's guess; then 3 of 4 right, none of 3, and both of 2, as one token must be left."""
    use = DraftUse(per_iteration=4)
    for new in (1, 4, 1, 3):
        use.iteration(new, at_most=9)
    assert (use.proposed, use.accepted, use.tokens) == (4 + 3 + 2, 3 + 0 + 2, 9)
    assert use.rate == pytest.approx(5 / 9)


def test_without_a_draft_model_nothing_is_counted() -> None:
    use = DraftUse()
    use.iteration(1, at_most=9)
    use.iteration(1, at_most=9)
    assert (use.proposed, use.accepted, use.rate) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"beam_width": 2}, "beam_width=2 is not supported here: this model runs with a draft model"),
        (
            {"runtime_top_k": 4},
            r"sampling \(runtime_top_k=4, runtime_top_p=0.0\) is not supported here.*temperature=0.* set a seed",
        ),
    ],
)
def test_what_guesses_cannot_be_checked_for_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_requests(inputs(**values), BOUNDS)


def test_an_adapter_a_seed_and_returned_logits_do_without_the_draft_model() -> None:
    assert read_requests(inputs(runtime_top_k=4, seed=1), BOUNDS)[0].samples
    assert read_requests(inputs(runtime_top_k=4, lora_task_id=7), BOUNDS)[0].samples
    assert read_requests(inputs(runtime_top_k=4, return_generation_logits=True), BOUNDS)[0].samples


def test_an_unknown_adapter_is_refused_in_tensorrt_llms_words() -> None:
    with pytest.raises(UserError, match=r"LoRA task 3 not found in cache\. This server has 1, 7\."):
        read_requests(inputs(lora_task_id=3), BOUNDS)
    with pytest.raises(UserError, match=r"LoRA task 1 not found in cache\. This server has no LoRA adapters"):
        read_requests(inputs(lora_task_id=1), ModelLimits(vocab_size=1920))


def test_uploaded_adapters_are_refused() -> None:
    with pytest.raises(UserError, match=r"lora_weights is not supported here.*lora_prefetch_dir"):
        read_requests(inputs(lora_task_id=1) | {"lora_weights": np.ones((1, 2, 3))}, BOUNDS)
