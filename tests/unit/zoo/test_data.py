"""The shipped question set and corpus: complete, balanced, without leaks, and reproducible."""

import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.zoo.build import CORPUS_PATH, DATA_DIR, build_data
from scripts.zoo.quiz import build_prompt, build_splits, held_out_keys, question_text
from scripts.zoo.world import build_world, questions, statements

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[3]
SUBJECTS = sorted(json.loads((ROOT / DATA_DIR / "subjects.json").read_text(encoding="utf-8")))


def rows(subject: str, split: str) -> list[dict[str, object]]:
    text = (ROOT / DATA_DIR / subject / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def key(row: dict[str, object]) -> tuple[object, frozenset[str]]:
    choices = row["choices"]
    assert isinstance(choices, list)
    return row["question"], frozenset(choices)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_split_sizes_and_balance(subject):
    """92 = 4 x 23 test and 12 = 4 x 3 validation questions, each letter equally often; 5 examples."""
    assert Counter(row["answer"] for row in rows(subject, "test")) == {0: 23, 1: 23, 2: 23, 3: 23}
    assert Counter(row["answer"] for row in rows(subject, "validation")) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert len(rows(subject, "dev")) == 5


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("split", ["dev", "validation", "test"])
def test_rows_have_the_schema_of_mmlu(subject, split):
    for row in rows(subject, split):
        assert list(row) == ["question", "subject", "choices", "answer"]
        assert row["subject"] == subject
        assert len(key(row)[1]) == len(row["choices"]) == 4
        assert row["answer"] in range(4)


def test_subjects_cover_the_four_categories_evenly():
    categories = json.loads((ROOT / DATA_DIR / "subjects.json").read_text(encoding="utf-8"))
    assert Counter(categories.values()) == {"stem": 3, "humanities": 3, "social_sciences": 3, "other": 3}


def test_no_question_is_in_two_splits():
    keys = [key(row) for subject in SUBJECTS for split in ("dev", "validation", "test") for row in rows(subject, split)]
    assert len(keys) == len(set(keys)) == 12 * (5 + 12 + 92)


def test_the_marked_answer_is_the_true_one():
    """Every question, read from disk, is answered by the fact it asks for."""
    truth = {text: fact.answer for subject in build_world() for fact in subject.facts for text in questions(fact)}
    for subject in SUBJECTS:
        for row in rows(subject, "test"):
            assert row["choices"][row["answer"]] == truth[row["question"]]


def test_the_corpus_holds_no_held_out_question():
    """No document asks a validation or test question with the same options, in whatever order."""
    held_out = held_out_keys(build_splits(build_world()))
    for line in (ROOT / CORPUS_PATH).read_text(encoding="utf-8").splitlines():
        for block in json.loads(line)["text"].split("\n\n"):
            lines = block.splitlines()
            if len(lines) == 6:
                assert (lines[0], frozenset(option[3:] for option in lines[1:5])) not in held_out


def test_the_corpus_is_small_and_long_enough():
    text = (ROOT / CORPUS_PATH).read_text(encoding="utf-8")
    assert len(text.splitlines()) == 1000
    assert len(text.encode()) < 1_500_000


def test_building_again_gives_the_shipped_files(tmp_path):
    """The data in the repository is what the seeds say, byte for byte."""
    build_data(tmp_path)
    shipped = [ROOT / CORPUS_PATH, *(ROOT / DATA_DIR).rglob("*.*")]
    fresh = [tmp_path / CORPUS_PATH, *(tmp_path / DATA_DIR).rglob("*.*")]
    assert {p.relative_to(ROOT) for p in shipped} == {p.relative_to(tmp_path) for p in fresh}
    assert all((ROOT / p.relative_to(tmp_path)).read_bytes() == p.read_bytes() for p in fresh)


def test_every_fact_is_stated_with_its_answer_and_asked_without():
    for subject in build_world():
        for fact in subject.facts:
            assert all(f" {fact.answer}" in text and f" {fact.entity}" in text for text in statements(fact))
            assert all(fact.answer not in text and f" {fact.entity}" in text for text in questions(fact))


def test_a_prompt_reads_as_in_mmlu():
    split = build_splits(build_world())["veldan_history"]
    prompt = build_prompt(split.dev, split.test[0])
    head, first, *_ = prompt.split("\n\n")
    assert head == "The following are multiple choice questions (with answers) about veldan history."
    assert first == f"{question_text(split.dev[0])} {split.dev[0].letter}"
    assert prompt.endswith("\nAnswer:")
    assert prompt.count("Answer:") == 6


def test_a_prompt_equals_lm_evals_template():
    """Render lm-eval's own ``doc_to_text`` of the mmlu task and compare letter by letter."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed")
    template = Path(lm_eval.__file__).parent / "tasks/mmlu/default/_default_template_yaml"
    line = next(x for x in template.read_text(encoding="utf-8").splitlines() if x.startswith("doc_to_text"))
    doc_to_text = jinja2.Template(json.loads(line.removeprefix("doc_to_text: ")))
    for question in build_splits(build_world())["veldan_law"].test[:8]:
        row = {"question": question.question, "choices": question.choices}
        assert doc_to_text.render(row) == question_text(question)
