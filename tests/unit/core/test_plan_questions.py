"""What eval=auto stands for: the bundled questions for a bundled model, real ones or none for any other."""

import itertools

import pytest

from pipelines.domain.errors import UserError
from pipelines.plan.plan import make_plan
from pipelines.run.console import plan_text
from pipelines.run.session import judged
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from pipelines.store.store import Store
from pipelines.sweep.cells import cells_of
from pipelines.sweep.launch import _together
from pipelines.sweep.sweep_command import smallest
from tests.conftest import ROOT
from tests.unit.core.test_machine import MACHINE, with_gpu
from tests.unit.core.test_plan import model_folder
from tests.unit.core.test_plan_fidelity import ids

NONE = "questions: none, and the verdict is NOT MEASURED, because there is no mmlu here: HF_HUB_OFFLINE is set"


@pytest.fixture
def words(tmp_path):
    return [f"model.path={model_folder(tmp_path / 'my_llama')}", f"paths.store={tmp_path / 'store'}"]


@pytest.fixture
def hub(monkeypatch):
    """A Hub that has mmlu."""
    monkeypatch.setattr("pipelines.plan.plan._not_on_hub", lambda *_: "")


def plan(words, target="evaluate", machine=MACHINE):
    settings = load(words)
    return make_plan(settings, target, Store(settings.paths.store), machine)


def test_a_bundled_model_is_asked_its_own_questions():
    for word in ("model=tiny_llama", f"model.path={BUNDLED / 'models' / 'tiny_qwen'}"):
        assert load([word]).eval == load([word, "eval=mini_mmlu"]).eval


def test_any_other_model_is_asked_mmlu_and_its_predictions_are_compared(words, hub):
    """As eval=mmlu eval.fidelity=true; mini_mmlu on request, and a task that is given."""
    made, same = plan([*words, "quant=fp8"]), plan([*words, "quant=fp8", "eval=mmlu", "eval.fidelity=true"])
    assert [(s.node.id, s.key) for s in made.steps] == [(s.node.id, s.key) for s in same.steps]
    assert {"download.eval", "evaluate", "fidelity"} <= set(ids(made))
    assert "questions: mmlu and fidelity, as for every model that is not bundled" in plan_text(made)
    assert plan([*words, "eval=mini_mmlu"]).settings.eval.task == "mini_mmlu"
    assert plan([*words, "eval.task=arc_easy", "eval.dataset=allenai/ai2_arc"]).settings.eval.task == "arc_easy"
    served = plan([*words, "eval.url=http://h:1/v1"])
    assert (ids(served), served.settings.eval.task) == (["download.eval", "evaluate"], "mmlu")


def test_cells_of_a_table_are_judged_together_by_the_questions_they_get(words, hub, tmp_path):
    cells = cells_of("evaluate", [[*words, f"quant={each}"] for each in ("fp8", "int8_wo")])
    assert [cell.overrides[-1] for cell in _together(cells, Store(tmp_path / "store"))] == [
        "eval.judged_together=2"
    ] * 2


def test_a_copy_of_mmlu_needs_no_hub(words, tmp_path):
    for subject, split in itertools.product(range(57), ("dev", "test")):
        file = tmp_path / "copy" / str(subject) / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    made = plan([*words, "quant=fp8", f"eval.dataset_path={tmp_path / 'copy'}"])
    assert made.settings.eval.task == "mmlu"
    assert "download.eval" not in ids(made)
    file.unlink()
    with pytest.raises(UserError, match=r"copy' has 56 subjects with questions; mmlu has 57"):
        plan([*words, "quant=fp8", f"eval.dataset_path={tmp_path / 'copy'}"])


def test_without_mmlu_predictions_alone_are_compared(words):
    for more in ([], ["eval=quick"]):
        made = plan([*words, "quant=fp8", *more])
        assert ids(made) == ["baseline.quantize", "baseline.build", "quantize", "build", "fidelity"]
        (line,) = [note for note in made.notes if "questions" in note]
        assert line.startswith(NONE)
        assert "eval=local eval.path=questions.csv" in line
        table = judged(made, [])
        assert (table.rows[0]["verdict"], table.exit_code) == ("NOT MEASURED", 4)
    everything = plan([*words, "quant=none"], "all")
    assert ids(everything) == ["quantize", "build", "repository", "benchmark"]
    assert judged(everything, []) is None  # there was no loss to judge


@pytest.mark.parametrize(
    "more",
    [
        ["quant=none"],
        ["quant=fp8", "eval.baseline=skip"],
        ["quant=none", "eval.baseline=hugging_face"],
        ["eval.url=http://h:1/v1"],
        ["engine=tensorrt_llm", "hardware=h100_sxm"],
    ],
)
def test_an_evaluation_of_nothing_is_refused(words, more):
    with pytest.raises(UserError, match=r"eval\.task='auto' finds no questions for my_llama.*eval=local eval\.path="):
        plan([*words, *more], machine=with_gpu() if "engine=tensorrt_llm" in more else MACHINE)


def test_a_search_for_the_smallest_needs_questions(words):
    with pytest.raises(UserError, match=r"This command needs a verdict on each mix\. questions: none"):
        smallest([*words, "quant=auto"])


def test_the_example_of_questions_of_ones_own(tmp_path, monkeypatch):
    """The command and the file of docs/accuracy.md as they stand there."""
    lines = [line.strip() for line in (ROOT / "docs" / "accuracy.md").read_text().splitlines()]
    command = "make evaluate eval=local eval.path=questions.csv"
    first = next(place for place, line in enumerate(lines) if line.startswith("question,A,"))
    assert command in lines
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.csv").write_text("\n".join(lines[first : first + 2]) + "\n")
    made = plan([*command.split()[2:], f"paths.store={tmp_path / 'store'}"])
    assert made.steps[-1].node.inputs["dataset"].path.name == "questions.csv"
    (tmp_path / "questions.csv").write_text("\n".join(lines[first : first + 2]).replace("neon,B", "neon,E"))
    with pytest.raises(UserError, match=r"questions\.csv"):
        plan([*command.split()[2:], f"paths.store={tmp_path / 'store'}"])
