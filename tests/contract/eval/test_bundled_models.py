"""The models that ship with the project: same scores as lm-eval's `hf` model, and better than guessing."""

from typing import Any

import pytest

from eval.harness import EvalSpec, evaluate
from eval.results import above_chance
from pipelines.domain.progress import SilentProgress
from pipelines.settings.model import BUNDLED

pytestmark = pytest.mark.thorough

MODELS = BUNDLED / "models"


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma", "tiny_qwen"])
def test_bundled_model_equals_stock_hf(name: str, torch_session: Any) -> None:
    """Five questions of each of 12 subjects: log probabilities within 1e-3 and every answer the same.

    60 questions: 22 right would already be more than guessing (0.25 + 1.645 * sqrt(0.1875 / 60) = 0.342).
    """
    import torch
    from lm_eval.evaluator import evaluate as stock_evaluate
    from lm_eval.models.huggingface import HFLM

    from eval.tasks.load import load_tasks

    spec = EvalSpec(task="mini_mmlu", max_length=512, limit=5)
    hf = HFLM(pretrained=str(MODELS / name), batch_size=8, device="cpu", dtype="float32", max_length=512)
    assert hf.model.dtype == torch.float32
    stock = stock_evaluate(lm=hf, task_dict=load_tasks(spec), limit=spec.limit, bootstrap_iters=1)
    ours = evaluate(
        torch_session(hf.model), MODELS / name, spec, SilentProgress(), model=name, qformat="none", engine="torch"
    )
    theirs = [
        [score for score, _ in row["filtered_resps"]] for _, rows in sorted(stock["samples"].items()) for row in rows
    ]
    records = sorted(ours.records, key=lambda record: (record.subject, record.index))
    assert len(records) == len(theirs) == 60
    for record, scores in zip(records, theirs, strict=True):
        assert record.logprobs == pytest.approx(scores, abs=1e-3)
        best, second = sorted(scores, reverse=True)[:2]
        assert record.choice == scores.index(best) or best - second <= 0.05
    assert ours.accuracy == pytest.approx(stock["results"]["mini_mmlu"]["acc,none"], abs=1e-9)
    assert above_chance(ours)
