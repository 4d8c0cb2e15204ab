"""Questions from a folder: both layouts give the same rows, and every fault is named."""

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from eval.dataset import MINI_MMLU, read_subjects
from eval.spec import EvalSpec
from eval.tasks.load import load_tasks
from pipelines.domain.errors import UserError

GOOD = {"question": "Why?", "subject": "law", "choices": ["a", "b", "c", "d"], "answer": 0}


def test_parquet_and_jsonl_are_the_same(tree, tmp_path: Path) -> None:
    """The Hub's snapshot layout and ours hold the same questions."""
    parquet = tree(tmp_path / "parquet", ["law", "anatomy"], layout="parquet")
    jsonl = tree(tmp_path / "jsonl", ["law", "anatomy"])
    assert read_subjects(parquet, ["law", "anatomy"]) == read_subjects(jsonl, ["law", "anatomy"])


def test_packaged_questions_are_sound() -> None:
    """Every row of mini_mmlu has four choices and an answer; every subject five examples."""
    data = read_subjects(MINI_MMLU, json.loads((MINI_MMLU / "subjects.json").read_text()))
    assert min(len(splits["dev"]) for splits in data.values()) >= 5
    assert sum(len(splits["test"]) for splits in data.values()) > 1000


def test_missing_subject_is_named(tree, tmp_path: Path) -> None:
    """A local copy without a subject is not an MMLU with 56 subjects."""
    tree(tmp_path, ["anatomy"])
    with pytest.raises(UserError, match="no abstract_algebra/dev, abstract_algebra/test, astronomy/dev and 109 more"):
        load_tasks(EvalSpec(task="mmlu", max_length=512, dataset_path=tmp_path))


def test_missing_split_is_named(tree, tmp_path: Path) -> None:
    """One file less is found too."""
    (tree(tmp_path, ["law"]) / "law" / "test.jsonl").unlink()
    with pytest.raises(UserError, match=r"has no law/test\."):
        read_subjects(tmp_path, ["law"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"choices": ["a", "b", "c"]}, r"row 2: choices=\['a', 'b', 'c'\] is not a list of 4 strings"),
        ({"choices": ["a", "b", "c", 4]}, r"row 2: choices=\['a', 'b', 'c', 4\]"),
        ({"answer": 4}, r"row 2: answer=4 is not one of 0\.\.3"),
        ({"answer": "B"}, "row 2: answer='B'"),
        ({"question": "  "}, "row 2: question='  '"),
    ],
)
def test_wrong_row_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    """The file, the row and the value that is wrong."""
    (tmp_path / "law").mkdir()
    lines = [json.dumps(GOOD), json.dumps({**GOOD, **change})]
    (tmp_path / "law" / "test.jsonl").write_text("\n".join(lines))
    (tmp_path / "law" / "dev.jsonl").write_text(lines[0])
    with pytest.raises(UserError, match=f"law/test.jsonl, {said}"):
        read_subjects(tmp_path, ["law"])


def test_missing_column_is_named(tmp_path: Path) -> None:
    """Another data set's columns are listed, so that one sees which it is."""
    (tmp_path / "law").mkdir()
    for split in ("dev", "test"):
        (tmp_path / "law" / f"{split}.jsonl").write_text(json.dumps({"question": "Why?", "options": []}))
    with pytest.raises(UserError, match=r"no answer, choices among \['options', 'question'\]"):
        read_subjects(tmp_path, ["law"])


@pytest.mark.parametrize("name", ["test.jsonl", "test-00000-of-00001.parquet"])
def test_unreadable_file_is_named(tree, tmp_path: Path, name: str) -> None:
    """A Git LFS pointer in place of the file is a usual accident."""
    folder = tree(tmp_path, ["law"]) / "law"
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=rf"{name}(, row 1: not valid JSON| cannot be read)"):
        read_subjects(tmp_path, ["law"])


def test_empty_file_is_named(tree, tmp_path: Path) -> None:
    """No questions is a fault, not an accuracy of nothing."""
    (tree(tmp_path, ["law"]) / "law" / "test.jsonl").write_text("")
    with pytest.raises(UserError, match=r"law/test.jsonl contains no questions"):
        read_subjects(tmp_path, ["law"])


def test_too_few_examples_are_named() -> None:
    """Six examples cannot be shown when `dev` has five."""
    with pytest.raises(UserError, match="num_fewshot=6, but 'dev' of veldan_law has 5"):
        load_tasks(EvalSpec(task="mini_mmlu", max_length=512, num_fewshot=6))


def test_a_byte_order_mark_is_no_part_of_the_questions(tree: Any, tmp_path: Path) -> None:
    """As Windows writes it; it was refused as not being JSON."""
    plain = read_subjects(tree(tmp_path, ["law"]), ["law"])
    file = tmp_path / "law" / "test.jsonl"
    file.write_bytes(BOM_UTF8 + file.read_bytes())
    assert read_subjects(tmp_path, ["law"]) == plain
