"""EvalSpec refuses what cannot run and names the value."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from eval.spec import EvalSpec
from pipelines.domain.errors import UserError


def test_unknown_task_is_named() -> None:
    """A misspelt task comes with the nearest known one."""
    with pytest.raises(UserError, match=r"'mini_mlu' is not known.*Did you mean 'mini_mmlu'\?"):
        EvalSpec(task="mini_mlu", max_length=512)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    """A data set folder that is not there is found before a model is loaded."""
    with pytest.raises(UserError, match="no_such_folder' is not a folder"):
        EvalSpec(task="mmlu", max_length=512, dataset_path=tmp_path / "no_such_folder")


def test_mmlu_without_questions_is_told() -> None:
    """MMLU's questions are not packaged: the run must bring them."""
    with pytest.raises(UserError, match="'mmlu' needs a folder of questions, but dataset_path is None"):
        EvalSpec(task="mmlu", max_length=512)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("num_fewshot", -1, "num_fewshot"), ("limit", 0, "limit"), ("max_length", 1, "max_length=1")],
)
def test_bad_number_is_named(field: str, value: int, said: str) -> None:
    """Numbers that make no sense are refused."""
    with pytest.raises((UserError, ValidationError), match=said):
        EvalSpec(**{"task": "mini_mmlu", "max_length": 512, field: value})


def test_all_faults_at_once() -> None:
    """Two faults, one error."""
    with pytest.raises(UserError) as error:
        EvalSpec(task="gsm8k", max_length=1)
    assert len(error.value.faults) == 2
