"""The text a model sees is lm-eval's, character by character."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.dataset import MINI_MMLU, Splits, as_datasets, read_subjects
from eval.spec import EvalSpec
from eval.tasks.load import load_tasks
from scripts import bundled_tasks

GOLDEN = """\
The following are multiple choice questions (with answers) about abstract algebra.

What is 1 + 1?
A. one
B. two
C. three
D. four
Answer: B

How many sides has a square?
A. 1
B. 2
C. 3
D. 4
Answer:"""


def their_folder() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"


def contexts(tasks: dict[str, Any], limit: int | None = None) -> list[tuple[str, str]]:
    """The prompt of every question and one choice each."""
    made: list[tuple[str, str]] = []
    for task in tasks["tasks"].values():
        task.build_all_requests(limit=limit)
        made += [request.args for request in task.instances]
    return made


def reader(splits: Splits) -> Callable[..., dict[str, Any]]:
    """lm-eval's `custom_dataset` for one subject."""
    return lambda **_metadata: as_datasets(splits)


@pytest.fixture
def algebra(tree: Callable[..., Path], tmp_path: Path) -> Path:
    """57 subjects, of which abstract algebra holds the golden question."""
    subjects = [path.stem.removeprefix("mmlu_") for path in their_folder().glob("mmlu_*.yaml")]
    root = tree(tmp_path / "data", subjects, dev=1, test=1)
    dev = {"question": "What is 1 + 1? ", "choices": ["one", "two", "three", "four"], "answer": 1}
    test = {"question": " How many sides has a square?", "choices": ["1", "2", "3", "4"], "answer": 3}
    for split, row in (("dev", dev), ("test", test)):
        (root / "abstract_algebra" / f"{split}.jsonl").write_text(json.dumps({**row, "subject": "x"}))
    return root


def test_golden_prompt(algebra: Path) -> None:
    """One example and one question, as the MMLU paper's code and lm-eval write them."""
    requests = contexts(load_tasks(EvalSpec(task="mmlu", max_length=512, num_fewshot=1, dataset_path=algebra)))
    assert [request for request in requests if request[0] == GOLDEN] == [(GOLDEN, f" {letter}") for letter in "ABCD"]


def test_mmlu_prompts_equal_stock_lm_eval(algebra: Path) -> None:
    """Our loading of `mmlu` changes where questions come from, and no prompt, group or weight."""
    from lm_eval.tasks import TaskManager

    ours = load_tasks(EvalSpec(task="mmlu", max_length=512, num_fewshot=1, dataset_path=algebra))
    manager = TaskManager(include_defaults=False, include_path=their_folder())
    stock = []
    for name, entry in manager.task_index.items():
        if "dataset_name" in (entry.cfg or {}):
            splits = read_subjects(algebra, [entry.cfg["dataset_name"]])[entry.cfg["dataset_name"]]
            read = {"custom_dataset": reader(splits), "num_fewshot": 1, "metadata": {}}
            stock += contexts(manager.load([{"group": "check", "task": [{"task": name, **read}]}]))
    assert sorted(stock) == sorted(contexts(ours))
    assert set(ours["groups"]) == {"mmlu", "mmlu_stem", "mmlu_humanities", "mmlu_social_sciences", "mmlu_other"}
    assert all(group.aggregate_metric_list[0].weight_by_size for group in ours["groups"].values())
    assert len(ours["tasks"]) == 57


def test_mini_mmlu_template_equals_theirs() -> None:
    """Everything but the data source is the default variant's."""
    theirs = yaml.safe_load((their_folder() / "_default_template_yaml").read_text())
    text = (bundled_tasks.FOLDER / "_mini_mmlu_template_yaml").read_text()
    ours = yaml.safe_load(text.replace("!function ", ""))
    del theirs["dataset_path"], ours["custom_dataset"]
    assert ours == theirs


def test_mini_mmlu_description_is_formed_as_theirs() -> None:
    """Their abstract algebra and our veldan law differ in the words of the subject only."""
    theirs = yaml.safe_load((their_folder() / "mmlu_abstract_algebra.yaml").read_text())["description"]
    ours = bundled_tasks.task_files()["mini_mmlu_veldan_law.yaml"]["description"]
    assert ours == theirs.replace("abstract algebra", "veldan law")


def test_task_files_match_the_data() -> None:
    """The committed task files are what the data asks for; `python -m scripts.bundled_tasks` rewrites them."""
    on_disk = {path.name: yaml.safe_load(path.read_text()) for path in bundled_tasks.FOLDER.glob("*.yaml")}
    assert on_disk == bundled_tasks.task_files()


def test_stock_lm_eval_reads_our_task_files() -> None:
    """`lm_eval --include_path eval/tasks --tasks mini_mmlu` needs nothing of ours but the folder."""
    from lm_eval.tasks import TaskManager

    stock = TaskManager(include_defaults=False, include_path=bundled_tasks.FOLDER).load(["mini_mmlu"])
    for task in stock["tasks"].values():
        task.set_config("num_fewshot", 5)
    assert contexts(stock, limit=2) == contexts(load_tasks(EvalSpec(task="mini_mmlu", max_length=512)), limit=2)


def test_mini_answers_asks_the_same_questions_without_options() -> None:
    """Each wording once, five examples before it, and the answer is the text of the right choice."""
    tasks = load_tasks(EvalSpec(task="mini_answers", max_length=512, num_fewshot=None))["tasks"]
    assert sum(len(task.eval_docs) for task in tasks.values()) == 868
    task = tasks["mini_answers_veldan_law"]
    task.build_all_requests(limit=1)
    prompt, settings = task.instances[0].args
    assert prompt.count("Answer:") == 6
    assert prompt.startswith("Name the court that Trothnus convenes.\nAnswer: sankres\n\n")
    assert prompt.endswith("What is the penalty of Dreltrix?\nAnswer:")
    assert (task.doc_to_target(task.instances[0].doc), settings["until"]) == ("drixbruth", ["\n"])
    assert {row["question"] for row in task.eval_docs} == {
        row["question"] for row in read_subjects(MINI_MMLU, ["veldan_law"])["veldan_law"]["test"]
    }
