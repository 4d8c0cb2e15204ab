"""EvalSpec refuses what cannot run and names the value."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from eval.spec import EvalSpec, is_written, task_fault
from pipelines.domain.errors import UserError


def test_unknown_task_is_named() -> None:
    """A misspelt task comes with the nearest known one."""
    with pytest.raises(UserError, match=r"'mini_mlu' is not known.*Did you mean 'mini_mmlu'\?"):
        EvalSpec(task="mini_mlu", max_length=512)


@pytest.mark.parametrize("task", ["mmlu_abstract_algebra", "acp_bench", "egymmlu_arabic_language_(general)"])
def test_names_in_quotes_in_templates_and_with_parentheses_are_known(task: str) -> None:
    """lm-eval has keys in quotes, and tags in templates that the files of tasks include."""
    assert task_fault(task) is None


@pytest.mark.parametrize(
    ("task", "written"),
    [
        ("mini_answers", True),
        ("mmlu", False),
        ("gsm8k", True),
        ("boolq", False),
        ("mmlu_abstract_algebra", False),  # its template says so
        ("mmlu_pro", None),  # a group
        ("super-glue-lm-eval-v1", None),  # a tag
        ("no_such_task", None),
    ],
)
def test_whether_answers_are_written_is_read_from_the_task(task: str, written: bool | None) -> None:
    """`output_type` of the task's file, or of one that it includes."""
    assert is_written(task) is written


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
