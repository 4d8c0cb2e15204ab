"""Results made by hand: which questions were right."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from eval.results import EvalResult, QuestionRecord, Score


def _result(right: Sequence[int], *, qformat: str = "none", model: str = "tiny_llama", **changes: Any) -> EvalResult:
    """A result over len(right) questions of two subjects, the first half "law"; 1 is a right answer.

    The right choice is always 0; a wrong answer is choice 1.
    """
    half = len(right) // 2
    records = tuple(
        QuestionRecord(
            subject="law" if i < half else "botany",
            index=i if i < half else i - half,
            logprobs=(-1.0, -2.0, -3.0, -4.0) if ok else (-2.0, -1.0, -3.0, -4.0),
            choice=0 if ok else 1,
            answer=0,
            correct=bool(ok),
        )
        for i, ok in enumerate(right)
    )
    law, botany = list(right[:half]), list(right[half:])

    def score(part: Sequence[int]) -> Score:
        return Score(sum(part) / max(len(part), 1), 0.1, len(part))

    result = EvalResult(
        model=model,
        qformat=qformat,
        engine="openvino",
        task="mini_mmlu",
        num_fewshot=5,
        limit=None,
        max_length=512,
        truncated=0,
        lm_eval_version="0.4.13",
        prompts_sha256="ab" * 32,
        overall=score(right),
        categories={"humanities": score(law), "stem": score(botany)},
        subjects={"law": score(law), "botany": score(botany)},
        records=records,
    )
    return replace(result, **changes)


@pytest.fixture
def result() -> Callable[..., EvalResult]:
    """Make an `EvalResult` from zeros and ones."""
    return _result
