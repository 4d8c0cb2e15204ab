"""Which evaluations stop as soon as the verdict is known, what they are planned as, and what is said beforehand."""

import pytest

from pipelines.domain.errors import UserError
from pipelines.host.machine import Machine
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.store.store import Store

MACHINE = Machine(2, 2**34, (), "a test", has_tensorrt_llm=False, platform="test")
APART = ["baseline.evaluate", "evaluate"]
TOGETHER = ["evaluate"]


@pytest.fixture
def made(tmp_path):
    def make(*words: str, target="evaluate"):
        return make_plan(load(["quant=fp8", *words]), target, Store(tmp_path / "store"), MACHINE)

    return make


def evaluations(plan) -> list[str]:
    return [step.node.id for step in plan.steps if "evaluate" in step.node.id]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), APART),
        (("eval.sequential=true",), TOGETHER),
        (("eval.max_questions=500",), TOGETHER),
        (("eval=mmlu",), TOGETHER),
        (("eval=mmlu_pro",), TOGETHER),
        (("eval=hellaswag",), TOGETHER),
        (("eval=gsm8k",), APART),
        (("eval=mmlu", "eval.limit=10"), APART),  # 570 questions
        (("eval=mmlu", "eval.sequential=false"), APART),
        (("eval=mmlu", "eval.baseline=skip"), ["evaluate"]),
    ],
)
def test_large_tasks_are_asked_until_the_verdict_is_known(made, words, expected):
    plan = made(*words)
    assert evaluations(plan) == expected
    inputs = next(step.node for step in plan.steps if step.node.id == "evaluate").inputs
    assert ("baseline" in inputs) == (expected is TOGETHER)
    assert any("until the verdict is known" in note for note in plan.notes) == (expected is TOGETHER)


def test_the_baseline_itself_is_asked_everything(made):
    """Settings of asking in turns have no effect then, which is said."""
    plan = made("quant=none", "eval.max_questions=400", "eval.sequential=true")
    assert evaluations(plan) == ["evaluate"]
    said = next(note for note in plan.notes if note.startswith("no effect"))
    assert "eval.sequential=true, eval.max_questions=400, because the model is the baseline itself" in said
    assert any("eval.judged_together=3, because asking does not" in n for n in made("eval.judged_together=3").notes)


def test_quick_brings_fidelity_along(made):
    steps = [step.node.id for step in made("eval=quick").steps]
    assert steps[-2:] == ["evaluate", "fidelity"]
    assert any("400 at most" in note for note in made("eval=quick").notes)
    assert "fidelity" not in [step.node.id for step in made().steps]
    assert "fidelity" in [step.node.id for step in made("eval.fidelity=true").steps]


def test_too_few_questions_are_said_with_the_number_that_is_enough_where_asking_stops(made):
    (warning,) = made("eval=quick", "eval.max_questions=300").warnings
    assert "eval.max_questions=300 asks 300 questions, which are too few for GO" in str(warning)
    assert "GO takes 377 or more where asking may stop early" in str(warning)
    assert "Set eval.max_questions=377 or more" in str(warning)
    assert not made("eval=quick", "eval.max_questions=377").warnings
    assert not made("eval=quick").warnings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval.max_questions=9", "eval.sequential=false"], r"max_questions=9 with sequential=false"),
        (["eval.baseline_tp_size=2", "eval.baseline=skip"], r"baseline_tp_size=2 with baseline=skip"),
        (["eval.revision=v2"], r"eval\.revision='v2' has no effect on eval\.task='mini_mmlu'"),
        (["eval.dataset=org/name"], r"eval\.dataset='org/name' has no effect on eval\.task='mini_mmlu'"),
        (["eval=quick", "eval.baseline=skip"], r"max_questions=400 with baseline=skip"),
        (["eval.sequential=true", "eval.baseline=reference"], r"sequential=true with baseline=reference"),
        (["eval.sequential=true", "eval.url=http://here:1/v1"], r"sequential=true with url=http://here:1/v1"),
        (["eval.fidelity=true", "eval.baseline=hugging_face"], r"fidelity=true with baseline=hugging_face"),
        (["eval.max_questions=0"], r"eval\.max_questions='0'"),
    ],
)
def test_what_has_no_second_engine_is_refused(made, words, said):
    with pytest.raises(UserError, match=said):
        made(*words)
