"""Tasks of lm-eval on small local copies of their data, in the data sets' own columns and layout; there is no Hub."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.api.task import ConfigurableTask
from lm_eval.utils import apply_template

from eval.exact import Answered
from eval.harness import LM_EVAL, EvalResult, EvalSpec, evaluate
from eval.results import answers_of, compare_pair, logprob_shift, write_hub
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress, SilentProgress
from pipelines.engines.port import Generation, SamplingParams
from pipelines.settings.model import BUNDLED

MODEL = BUNDLED / "models" / "tiny_gemma"


@dataclass
class Scripted:
    """An engine that gives prepared answers.

    Attributes:
        texts: what it writes, in the order of the prompts.
        score: of a continuation's text.
        prompts: that it was given, as text.
    """

    texts: Sequence[str] = ()
    score: Callable[[str], float] = len
    prompts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        from eval.adapter import load_tokenizer

        self.tokenizer = load_tokenizer(MODEL)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def loglikelihood(self, pairs: Sequence[Any], progress: Progress) -> list[tuple[float, bool]]:
        self.prompts += [self.tokenizer.decode(context, skip_special_tokens=True) for context, _ in pairs]
        return [(self.score(self.tokenizer.decode(continuation)), False) for _, continuation in pairs]

    def generate(
        self, prompts: Sequence[Sequence[int]], limits: SamplingParams, progress: Progress
    ) -> list[Generation]:
        self.prompts += [self.tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
        encode = self.tokenizer.encode
        return [Generation(encode(text, add_special_tokens=False), "stop") for text in self.texts]


def parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def gsm8k(
    root: Path, columns: Sequence[str] = ("question", "answer"), splits: Sequence[str] = ("train", "test")
) -> Path:
    """openai/gsm8k: main/<split>-00000-of-00001.parquet; the answer ends with #### and the number."""
    for split in splits:
        rows = [
            {"question": f"What is {n} and {n} ({split})?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
            for n in range(1, 5)
        ]
        parquet(root / "main" / f"{split}-00000-of-00001.parquet", [{c: row[c] for c in columns} for row in rows])
    return root


def run(session: Scripted, task: str, root: Path, export_to: Path | None = None, **settings: Any) -> EvalResult:
    spec = EvalSpec(task=task, max_length=4096, dataset_path=root, **{"num_fewshot": None, **settings})
    return evaluate(
        session, MODEL, spec, SilentProgress(), model="m", qformat="none", engine="scripted", export_to=export_to
    )


def test_gsm8k_is_right_where_the_number_is(tmp_path: Path) -> None:
    """Strict matching wants the form of the examples, flexible matching takes the last number."""
    texts = ["so #### 2", "it is 4", "#### 7", "#### 8 Question: #### 9"]
    root = gsm8k(tmp_path)
    strict = run(Scripted(texts), "gsm8k", root, num_fewshot=2, metric="exact_match,strict-match")
    assert [record.correct for record in strict.records] == [True, False, False, True]
    assert [record.choice for record in strict.records] == ["2", "[invalid]", "7", "8"]
    assert (strict.overall.accuracy, strict.num_fewshot, strict.metric) == (0.5, 2, "exact_match,strict-match")
    flexible = run(Scripted(texts), "gsm8k", root, num_fewshot=2, metric="exact_match,flexible-extract")
    assert [record.correct for record in flexible.records] == [True, True, False, True]
    assert EvalResult.from_json(flexible.to_json()) == flexible


def test_written_answers_are_paired_as_letters_are(tmp_path: Path) -> None:
    """Lost and gained by 0 and 1, a flip where the text differs; there are no log probabilities to differ."""
    root = gsm8k(tmp_path)
    before = run(Scripted(["#### 2", "#### 4", "#### 5", "#### 8"]), "gsm8k", root, num_fewshot=1)
    after = run(Scripted(["#### 2", "#### 3", "#### 7", "#### 8"]), "gsm8k", root, num_fewshot=1)
    pair = compare_pair(before, after)
    assert (pair.lost, pair.gained, pair.flips) == (1, 0, 2)
    assert logprob_shift(before, after) == (None, None)
    assert Answered.of(answers_of(before)).chance == 0.0


def test_examples_are_drawn_as_lm_evals_command_draws_them(tmp_path: Path) -> None:
    """The seed is lm-eval's, so a second run asks the same, and the examples are those of the `train` split."""
    root = gsm8k(tmp_path)
    sessions = [Scripted(["#### 2"] * 4) for _ in range(2)]
    results = [run(session, "gsm8k", root, num_fewshot=2) for session in sessions]
    assert sessions[0].prompts == sessions[1].prompts
    assert results[0].prompts_sha256 == results[1].prompts_sha256
    assert all(prompt.count("(train)") == 2 and prompt.count("(test)") == 1 for prompt in sessions[0].prompts)


def test_arc_divides_by_the_length_of_a_choice(tmp_path: Path) -> None:
    """With a log probability of -1 per character and 3 beside, the shortest choice wins, or the longest one."""
    text = ["a", "to be", "a longer one", "of"]
    row = {"id": "1", "question": "Why?", "choices": {"text": text, "label": ["1", "2", "3", "4"]}, "answerKey": "3"}
    parquet(tmp_path / "ARC-Challenge" / "test-00000-of-00001.parquet", [row])
    parquet(tmp_path / "ARC-Challenge" / "train-00000-of-00001.parquet", [row])
    parquet(tmp_path / "ARC-Challenge" / "validation-00000-of-00001.parquet", [row])

    def score(continuation: str) -> float:
        return -3.0 - len(continuation.strip())

    plain = run(Scripted(score=score), "arc_challenge", tmp_path, metric="acc")
    normed = run(Scripted(score=score), "arc_challenge", tmp_path, metric="acc_norm")
    assert [(r.choice, r.answer, r.correct) for r in plain.records] == [(0, 2, False)]
    assert [(r.choice, r.answer, r.correct) for r in normed.records] == [(2, 2, True)]
    assert Answered.of(answers_of(plain)).chance == 0.25


def test_winogrande_has_one_end_after_two_beginnings(tmp_path: Path) -> None:
    """The prompts differ, and the scored text is one."""
    session = Scripted()

    def score(pairs: Sequence[Any], progress: Progress) -> list[tuple[float, bool]]:
        return [(float("cup" in session.tokenizer.decode(context)), False) for context, _ in pairs]

    session.loglikelihood = score  # type: ignore[method-assign]
    row = {"sentence": "It did not fit because the _ was big.", "option1": "box", "option2": "cup"}
    for split in ("train", "validation"):
        parquet(tmp_path / "winogrande_xl" / f"{split}.parquet", [{**row, "answer": each} for each in "12"])
    result = run(session, "winogrande", tmp_path)
    assert [(each.choice, each.answer, each.correct) for each in result.records] == [(1, 0, False), (1, 1, True)]


def test_lambada_has_a_perplexity_beside_its_accuracy(tmp_path: Path) -> None:
    """Its standard error would take a bootstrap, which no result here has."""
    parquet(tmp_path / "test.parquet", [{"text": f"the king is {word}"} for word in ("old", "wise")])
    (tmp_path / "out").mkdir()
    result = run(Scripted(score=lambda _text: -2.0), "lambada_openai", tmp_path, tmp_path / "out")
    assert (result.metric, result.accuracy, result.questions) == ("acc,none", 0.0, 2)
    figures = json.loads((tmp_path / "out" / LM_EVAL).read_text())["results"]["lambada_openai"]
    assert figures["perplexity,none"] == pytest.approx(math.exp(2))
    assert figures["perplexity_stderr,none"] == "N/A"


def test_nobody_guesses_what_has_to_be_written(tmp_path: Path) -> None:
    """All choices of webqs are right, and its answer is right if the model would have written one of them."""
    for split in ("train", "test"):
        parquet(tmp_path / f"{split}.parquet", [{"question": "Who?", "answers": ["Ann", "Bob"]}] * 2)
    result = run(Scripted(), "webqs", tmp_path)
    assert (result.metric, len(result.records[0].logprobs)) == ("exact_match,none", 2)
    assert Answered.of(answers_of(result)).chance == 0.0


def test_an_empty_choice_is_never_the_best_per_character(tmp_path: Path) -> None:
    """lm-eval divides by its length, 0."""
    rows = [{"goal": "Fix it", "sol1": first, "sol2": "glue", "label": 1} for first in ("tape", "")]
    for split in ("train", "validation"):
        parquet(tmp_path / f"{split}.parquet", rows)
    _, record = run(Scripted(score=lambda _text: -1.0), "piqa", tmp_path, metric="acc_norm").records
    assert (record.choice, record.correct) == (1, True)


def test_hellaswag_from_its_data_folder(tmp_path: Path) -> None:
    """The label is text in this data set, and the prompt is put together by the task's own code."""
    for split in ("train", "validation"):
        rows = [
            {
                "activity_label": "Sailing",
                "ctx_a": "A man",
                "ctx_b": f"number {n}",
                "endings": list("abcd"),
                "label": "2",
            }
            for n in range(3)
        ]
        parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", rows)
    session = Scripted(score=lambda text: -1.0 if text.strip() == "c" else -2.0)
    result = run(session, "hellaswag", tmp_path, limit=2)
    assert (result.questions, result.accuracy, result.subjects["hellaswag"].questions) == (2, 1.0, 2)
    assert "Sailing: A man Number 1" in session.prompts[-1]


def test_mmlu_pro_is_a_group_of_subjects(tmp_path: Path) -> None:
    shown = (
        "biology business chemistry economics engineering health history law math other philosophy physics psychology"
    )
    subjects = ["computer_science", *shown.split()]
    for split in ("validation", "test"):
        rows = [
            {
                "question": "Which?", "options": ["x", "y"], "answer": "B", "category": name.replace("_", " "),
                "cot_content": "A: Let's think step by step. The answer is (B).",
            }
            for name in subjects
        ]  # fmt: skip
        parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", rows)
    texts = ["the answer is (B)"] * 7 + ["the answer is (A)"] * 7
    result = run(Scripted(texts), "mmlu_pro", tmp_path, num_fewshot=0, metric="exact_match,custom-extract")
    assert (result.questions, result.accuracy, len(result.subjects)) == (14, 0.5, 14)
    assert [record.choice for record in result.records] == ["B"] * 7 + ["A"] * 7


def test_several_data_sets_lie_under_their_names(tmp_path: Path) -> None:
    """A folder with openai/gsm8k in it serves as well as the data set's own."""
    gsm8k(tmp_path / "openai" / "gsm8k")
    assert run(Scripted(["#### 2"]), "gsm8k", tmp_path, num_fewshot=0, limit=1).accuracy == 1.0


def test_the_card_of_a_data_set_says_where_its_files_are(tmp_path: Path) -> None:
    """As in a full snapshot, where the parts have names that are no folders."""
    gsm8k(tmp_path)
    (tmp_path / "main").rename(tmp_path / "files")
    files = "".join(f"  - split: {split}\n    path: files/{split}-*\n" for split in ("train", "test"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    assert run(Scripted(["#### 2"]), "gsm8k", tmp_path, num_fewshot=0, limit=1).accuracy == 1.0


@pytest.mark.parametrize(
    ("columns", "splits", "said"),
    [
        (["question"], ["train", "test"], r"'gsm8k'.*'answer' is undefined.*test: question"),
        (["answer"], ["train", "test"], r"'question' is undefined.*train: answer"),
        (["question", "answer"], ["train"], r"KeyError: 'test'.*train: question, answer"),
    ],
)
def test_data_that_do_not_fit_are_refused(tmp_path: Path, columns: list[str], splits: list[str], said: str) -> None:
    """With what is missing and what is there, before a question is asked."""
    session = Scripted()
    with pytest.raises(UserError, match=said):
        run(session, "gsm8k", gsm8k(tmp_path, columns, splits), num_fewshot=0)
    assert session.prompts == []


@pytest.mark.parametrize(
    ("text", "said"), [('{"question": "x\n', "JSON parse error"), ("", "a file or a split has no rows")]
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """With the reader's own reason, not the one that something failed."""
    (tmp_path / "test.jsonl").write_text(text)
    with pytest.raises(UserError, match=rf"do not fit eval\.task='arc_easy'.*{said}"):
        run(Scripted(), "arc_easy", tmp_path)


def test_several_samples_of_an_answer_are_refused(tmp_path: Path) -> None:
    """A vote among answers of one seed would be a vote among equal ones."""
    with pytest.raises(UserError, match=r"gsm8k_cot_self_consistency wants 64 sampled answers to each question"):
        run(Scripted(), "gsm8k_cot_self_consistency", gsm8k(tmp_path), num_fewshot=0)


def test_too_few_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"num_fewshot=5, but the data of gsm8k at .* have 4 examples"):
        run(Scripted(), "gsm8k", gsm8k(tmp_path))


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"do not fit eval\.task='gsm8k'"):
        run(Scripted(), "gsm8k", tmp_path)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("bleu", r"no metric 'bleu'. It has exact_match,strict-match, exact_match,flexible-extract"),
        ("exact_match,loose", "no metric 'exact_match,loose'"),
    ],
)
def test_a_metric_that_the_task_lacks_is_named(tmp_path: Path, metric: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(Scripted(), "gsm8k", gsm8k(tmp_path), num_fewshot=0, metric=metric)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IFEval's checks need packages that lm-eval does not install by itself."""
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(UserError, match=r"langdetect.*lm-eval\[ifeval\]"):
        run(Scripted(), "ifeval", tmp_path)


def test_results_are_written_as_lm_eval_writes_them(tmp_path: Path) -> None:
    """The same keys and numbers, plain JSON, and the same bytes again."""
    root = gsm8k(tmp_path / "data")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run(Scripted(["#### 2"] * 4), "gsm8k", root, tmp_path / name, num_fewshot=1)
    text = (tmp_path / "one" / LM_EVAL).read_text()
    found = json.loads(text)
    assert found["results"]["gsm8k"]["exact_match,strict-match"] == 0.25
    assert found["n-shot"] == {"gsm8k": 1}
    assert found["n-samples"] == {"gsm8k": {"original": 4, "effective": 4}}
    assert {"configs", "versions", "higher_is_better", "config", "lm_eval_version", "model_name"} <= found.keys()
    assert text == (tmp_path / "two" / LM_EVAL).read_text()


def test_the_hubs_own_reader_takes_our_eval_results(tmp_path: Path) -> None:
    """A branch is not a revision; a commit is."""
    huggingface_hub = pytest.importorskip("huggingface_hub", minversion="1.0")
    result = run(Scripted(["#### 2"] * 4), "gsm8k", gsm8k(tmp_path / "data"), num_fewshot=1)
    for revision, kept in (("main", None), ("ab" * 20, "ab" * 20)):
        out = tmp_path / revision
        out.mkdir()
        write_hub(result, "openai/gsm8k", revision, out)
        content = yaml.safe_load((out / ".eval_results" / "gsm8k.yaml").read_text())
        (entry,) = huggingface_hub.parse_eval_result_entries(content)
        assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "gsm8k", 0.25)
        assert entry.dataset_revision == kept
        assert "1-shot, exact_match,strict-match, 4 questions" in entry.notes


def test_an_error_of_lm_evals_own_code_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval cannot put an example with several right choices into a prompt; an error of the engine stays one."""
    rows = [{"url": "u", "question": f"Who is {n}?", "answers": ["Ann", "Bob"]} for n in range(3)]
    for split in ("train", "test"):
        parquet(tmp_path / f"{split}-00000-of-00001.parquet", rows)
    assert run(Scripted(), "webqs", tmp_path).questions == 3
    with pytest.raises(UserError, match=r"eval\.task='webqs': AssertionError") as error:
        run(Scripted(), "webqs", tmp_path, num_fewshot=1)
    assert "eval.num_fewshot=0" in str(error.value.faults[0].todo)

    session = Scripted()
    monkeypatch.setattr(ConfigurableTask, "doc_to_text", lambda *_, **_also: apply_template("{{missing.field}}", {}))
    with pytest.raises(UserError, match=r"eval\.task='webqs': UndefinedError"):
        run(session, "webqs", tmp_path)
    monkeypatch.undo()

    def broken(_text: str) -> float:
        raise ValueError("of the engine")

    with pytest.raises(ValueError, match=r"^of the engine$"):
        run(Scripted(score=broken), "webqs", tmp_path)
