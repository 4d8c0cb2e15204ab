"""Our engine adapter against lm-eval's own `hf` model on the same checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.harness import EvalResult, EvalSpec, evaluate
from eval.spec import task_fault
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress

NAMES = {"model": "tiny", "qformat": "none", "engine": "torch"}


def stock_scores(model: Any, tokenizer: Any, spec: EvalSpec) -> dict[str, Any]:
    """What lm-eval's `hf` model and lm-eval's own loop find."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from eval.tasks.load import load_tasks

    hf = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu", max_length=spec.max_length)
    found: dict[str, Any] = simple_evaluate(
        model=hf,
        tasks=[load_tasks(spec)["groups"][spec.task]],
        limit=spec.limit,
        task_manager=TaskManager(include_defaults=False),
    )
    return found


def assert_same(ours: EvalResult, stock: dict[str, Any]) -> None:
    """Log probabilities within 1e-3, and the same choice wherever the best two differ by more than 0.05."""
    theirs = {
        (name.removeprefix(f"{ours.task}_"), row["doc_id"]): [score for score, _ in row["filtered_resps"]]
        for name, rows in stock["samples"].items()
        for row in rows
    }
    assert len(theirs) == len(ours.records)
    for record in ours.records:
        scores = theirs[record.subject, record.index]
        assert record.logprobs == pytest.approx(scores, abs=1e-3)
        best, second = sorted(scores, reverse=True)[:2]
        if best - second > 0.05:
            assert record.choice == scores.index(best)


@pytest.fixture(scope="module")
def mini() -> EvalSpec:
    return EvalSpec(task="mini_mmlu", max_length=1024, limit=2)


@pytest.fixture(scope="module")
def found(checkpoint: tuple[Any, Any, Path], mini: EvalSpec, torch_session: Any) -> EvalResult:
    """24 questions through our adapter."""
    return evaluate(torch_session(checkpoint[0]), checkpoint[2], mini, SilentProgress(), **NAMES)


def test_mini_mmlu_equals_stock_hf(checkpoint: tuple[Any, Any, Path], found: EvalResult, mini: EvalSpec) -> None:
    """Same tokens, same scores, same accuracy and standard error in every subject, category and overall."""
    stock = stock_scores(*checkpoint[:2], mini)
    assert_same(found, stock)
    scores = {"mini_mmlu": found.overall}
    scores |= {f"mini_mmlu_{name}": score for name, score in {**found.categories, **found.subjects}.items()}
    assert len(scores) == 17
    for name, score in scores.items():
        row = stock["results"][name]
        assert (score.accuracy, score.stderr, score.questions) == (
            pytest.approx(row["acc,none"]),
            pytest.approx(row["acc_stderr,none"]),
            row["sample_len"],
        )


def test_records_explain_the_accuracy(found: EvalResult) -> None:
    """Accuracy is the share of correct records, and a record's choice is its best log probability."""
    assert found.accuracy == pytest.approx(sum(r.correct for r in found.records) / found.questions)
    assert all(r.correct == (r.choice == r.answer) for r in found.records)
    assert all(r.logprobs[r.choice] == max(r.logprobs) for r in found.records)
    assert EvalResult.from_json(found.to_json()) == found


def test_cut_prompts_equal_stock_hf_and_are_told(
    checkpoint: tuple[Any, Any, Path], torch_session: Any, recorder: Any
) -> None:
    """Prompts longer than max_length lose the same tokens as with `hf`, and the number of them is shown."""
    spec = EvalSpec(task="mini_mmlu", max_length=100, limit=1)
    ours = evaluate(torch_session(checkpoint[0]), checkpoint[2], spec, recorder, **NAMES)
    assert_same(ours, stock_scores(*checkpoint[:2], spec))
    assert ours.truncated == 12
    assert recorder.notes == ["12 of 12 prompts exceed 100 tokens; their beginning was cut"]


@pytest.mark.parametrize(
    ("checkpoint", "layout"), [("llama", "jsonl"), ("gemma", "parquet")], indirect=["checkpoint"], scope="session"
)
def test_real_mmlu_from_a_folder(
    checkpoint: tuple[Any, Any, Path], torch_session: Any, tree: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    """lm-eval's `mmlu` on a local data set: 57 subjects, weighted by their size."""
    import lm_eval.tasks

    files = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    subjects = [path.stem.removeprefix("mmlu_") for path in files.glob("mmlu_*.yaml")]
    root = tree(tmp_path, subjects, layout=layout, dev=1, test=1)
    tree(tmp_path / "more", ["virology"], layout=layout, dev=1, test=4)
    for file in (tmp_path / "more" / "virology").iterdir():
        file.replace(root / "virology" / file.name)
    session = torch_session(checkpoint[0])
    spec = EvalSpec(task="mmlu", max_length=1024, num_fewshot=1, dataset_path=root)
    ours = evaluate(session, checkpoint[2], spec, SilentProgress(), **NAMES)
    assert (ours.questions, len(ours.subjects), set(ours.categories)) == (
        60,
        57,
        {"stem", "humanities", "social_sciences", "other"},
    )
    assert ours.accuracy == pytest.approx(sum(r.correct for r in ours.records) / 60)
    assert ours.overall.stderr is None  # a subject of one question has no spread; lm-eval says "N/A"
    assert session.calls == [240]  # everything in one call


def test_progress_counts_questions(checkpoint: tuple[Any, Any, Path], torch_session: Any, recorder: Any) -> None:
    """Every bar is in questions and ends full."""
    spec = EvalSpec(task="mini_mmlu", max_length=1024, limit=1)
    evaluate(torch_session(checkpoint[0]), checkpoint[2], spec, recorder, **NAMES)
    assert recorder.bars == {"reading prompts": (12, "questions", 12), "scoring": (12, "questions", 12)}
    assert recorder.notes == []


def test_nothing_is_printed(
    checkpoint: tuple[Any, Any, Path], torch_session: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """lm-eval's log lines and bars stay silent, and its own behaviour is back afterwards."""
    import lm_eval.api.task as task_module
    from lm_eval.utils import env

    bar, compiled = task_module.tqdm, env.from_string
    evaluate(
        torch_session(checkpoint[0]),
        checkpoint[2],
        EvalSpec(task="mini_mmlu", max_length=1024, limit=1),
        SilentProgress(),
        **NAMES,
    )
    assert capfd.readouterr() == ("", "")
    assert (task_module.tqdm, env.from_string) == (bar, compiled)


def test_nan_stops_the_evaluation(checkpoint: tuple[Any, Any, Path], torch_session: Any) -> None:
    """A NaN would count as choice A and look like a bad model."""
    session = torch_session(checkpoint[0])
    session.loglikelihood = lambda pairs, _progress: [(float("nan"), False)] * len(pairs)
    with pytest.raises(RuntimeError, match="NaN as log probability"):
        evaluate(
            session, checkpoint[2], EvalSpec(task="mini_mmlu", max_length=1024, limit=1), SilentProgress(), **NAMES
        )


def test_missing_score_stops_the_evaluation(checkpoint: tuple[Any, Any, Path], torch_session: Any) -> None:
    """A session that drops a pair is caught before scores shift to other questions."""
    session = torch_session(checkpoint[0])
    session.loglikelihood = lambda pairs, _progress: [(-1.0, False)] * (len(pairs) - 1)
    with pytest.raises(RuntimeError, match="47 scores for 48 pairs"):
        evaluate(
            session, checkpoint[2], EvalSpec(task="mini_mmlu", max_length=1024, limit=1), SilentProgress(), **NAMES
        )


def test_missing_tokenizer_is_named(torch_session: Any, tmp_path: Path) -> None:
    """An empty folder holds no tokenizer."""
    (tmp_path / "empty_folder").mkdir()
    with pytest.raises(UserError, match=r"empty_folder' has no tokenizer\.json"):
        evaluate(
            torch_session(None),
            tmp_path / "empty_folder",
            EvalSpec(task="mini_mmlu", max_length=1024),
            SilentProgress(),
            **NAMES,
        )


@pytest.mark.thorough
def test_every_name_that_lm_eval_knows_is_known() -> None:
    """Its own index against ours, which takes a second instead of 15."""
    from lm_eval.tasks import TaskManager

    assert not [name for name in TaskManager().all_tasks if task_fault(name)]
