"""Questions of the user's own are scored as lm-eval's `hf` model scores the same file by lm-eval's own reader."""

import csv
from pathlib import Path
from typing import Any

import pytest

from eval.dataset import MINI_MMLU, read_subjects
from eval.harness import evaluate
from eval.results import EvalResult
from eval.spec import LOCAL, EvalSpec
from pipelines.domain.progress import SilentProgress
from pipelines.settings.model import BUNDLED

MODEL = BUNDLED / "models" / "tiny_llama"
COLUMNS = ("question", "A", "B", "C", "D", "answer")
PROMPT = "{{question}}\nA. {{A}}\nB. {{B}}\nC. {{C}}\nD. {{D}}\nAnswer:"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve questions of the bundled model's world, a quarter with a wrong key."""
    path = tmp_path_factory.mktemp("own") / "laws.csv"
    splits = read_subjects(MINI_MMLU, ["veldan_astronomy", "veldan_biology"])
    rows = [row for subject in splits.values() for row in subject["test"][:6]]
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(COLUMNS)
        for at, row in enumerate(rows):
            table.writerow([row["question"], *row["choices"], "ABCD"[(row["answer"] + (at % 4 == 0)) % 4]])
    return path


@pytest.fixture(scope="module")
def ours(file: Path, torch_session: Any) -> EvalResult:
    """Our result with Transformers' own model behind the adapter."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    spec = EvalSpec(task=LOCAL, max_length=1024, num_fewshot=0, dataset_path=file, path=file, name="laws")
    result = evaluate(torch_session(model), MODEL, spec, SilentProgress(), model="m", qformat="none", engine="torch")
    assert isinstance(result, EvalResult)
    return result


def theirs(file: Path, cache: Path) -> list[dict[str, Any]]:
    """Answers of lm-eval's `hf` model to the file, by a task as its users write one."""
    import lm_eval.evaluator
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    task = ConfigurableTask(
        config={
            "task": "laws",
            "dataset_path": "csv",
            "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(cache)},
            "test_split": "test",
            "output_type": "multiple_choice",
            "description": "The following are multiple choice questions (with answers).\n\n",
            "doc_to_text": PROMPT,
            "doc_to_choice": list("ABCD"),
            "doc_to_target": "answer",
            "num_fewshot": 0,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    )
    lm = HFLM(pretrained=str(MODEL), device="cpu", dtype="float32", batch_size=4, max_length=1024)
    found = lm_eval.evaluator.evaluate(lm=lm, task_dict={"laws": task}, bootstrap_iters=1)
    samples: list[dict[str, Any]] = sorted(found["samples"]["laws"], key=lambda each: int(each["doc_id"]))
    return samples


def test_the_same_choices_as_lm_evals_hf_model(file: Path, ours: EvalResult, tmp_path: Path) -> None:
    right = theirs(file, tmp_path)
    assert len(ours.records) == len(right) == 12
    for record, sample in zip(ours.records, right, strict=True):
        scores = [score for score, _ in sample["filtered_resps"]]
        assert record.logprobs == pytest.approx(scores, abs=1e-4)
        assert record.choice == max(range(4), key=scores.__getitem__)
        assert record.correct == bool(sample["acc"])
    assert 0 < sum(record.correct for record in ours.records) < 12


def test_the_result_has_the_users_name(ours: EvalResult) -> None:
    assert ours.task == "laws (own)"
    assert list(ours.subjects) == ["laws"]
