"""Planted faults are named and a clean deployment is not accused; all of them: `tests.torture.wrong_stages`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("openvino_genai")
pytest.importorskip("modelopt")

from eval.diagnose.result import Place, StageDiagnosis, StageVerdict
from eval.diagnose.run import diagnose
from eval.diagnose.table import diagnosis_text
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from tests.support.diagnosed import Deployments, Places
from tests.support.planted_faults import FAULTS, LLAMA

CHEAP = ("a weight times 1.05", "two layers exchanged", "attention scale 1 / head size")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Deployments:
    return Deployments(tmp_path_factory.mktemp("deployments"))


def diagnosed(places: Places, log: Path) -> StageDiagnosis:
    given = places.deployment(log)
    return diagnose(given, model="tiny", variant="none", seed=1, new_tokens=8, progress=SilentProgress())


def test_a_clean_deployment_is_not_accused(made: Deployments, tmp_path: Path) -> None:
    """The result is kept as JSON and says of each stage what was compared."""
    result = diagnosed(made.made(LLAMA), tmp_path / "log")
    assert result.accused is None
    verdicts = {each.stage: each.verdict for each in result.stages}
    assert verdicts[Place.CHECKPOINT] == verdicts[Place.CPU_ENGINE] == StageVerdict.CLEAN
    assert verdicts[Place.TRITON] == StageVerdict.NOT_RUN
    result.save(tmp_path / "diagnosis.json")
    stored = json.loads((tmp_path / "diagnosis.json").read_text())
    assert stored["accused"] is None
    assert StageDiagnosis.from_json(stored, "x") == result
    text = diagnosis_text(result)
    assert "No stage is accused" in text
    assert max(map(len, text.splitlines())) <= 80
    with pytest.raises(UserError, match=r"x is not a diagnosis: .*'surprise'"):
        StageDiagnosis.from_json({**stored, "surprise": 1}, "x")


@pytest.mark.parametrize("name", CHEAP)
def test_a_planted_fault_is_named(name: str, made: Deployments, tmp_path: Path) -> None:
    fault = next(each for each in FAULTS if each.name == name)
    places = made.copied(LLAMA, tmp_path / "copy", served=False)
    fault.plant(places)
    accused = diagnosed(places, tmp_path / "log").accused
    assert accused is not None
    first = accused.findings[0]
    assert (accused.stage, first.layer) == (fault.stage, fault.layer)
    assert fault.tensor in first.tensor


def test_names_of_faults_are_unique_and_there_are_forty() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 40
