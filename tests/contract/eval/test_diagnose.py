"""Planted faults are named and a clean deployment is not accused; all of them: `tests.torture.wrong_stages`."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("openvino_genai")
pytest.importorskip("modelopt")

from eval.diagnose.result import Place, StageDiagnosis, StageVerdict, diagnosis_text
from eval.diagnose.run import DiagnosedFolders, Simulation, diagnose
from pipelines.checkpoint.read import Checkpoint
from pipelines.compress.config import QuantSettings
from pipelines.compress.quantizing import quantize
from pipelines.compress.simulating import SimulatedModel, fake_quantized_model
from pipelines.compress.specs import QuantSpec
from pipelines.compress.texts import load_texts
from pipelines.compress.traced import trace_checkpoint
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import SilentProgress
from tests.support.diagnosed import CALIBRATION, TEXTS, Deployments, Places, Recipe
from tests.support.planted_faults import (
    FAULTS,
    FP8,
    LLAMA,
    Tensors,
    at,
    change,
    configure,
    exchanged,
    in_checkpoint,
    in_engine,
    scaled,
)
from tests.support.small_models import write_model

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


def test_norms_of_heads_that_are_exchanged_are_named(made: Deployments, tmp_path: Path) -> None:
    """They are shorter than the layers' norms, with which they are compared too."""
    places = made.copied(Recipe("qwen"), tmp_path / "copy", served=False)
    norms = [f"transformer.layers.1.attention.{part}_layernorm" for part in "qk"]
    change(places.checkpoint, exchanged(*norms))
    accused = diagnosed(places, tmp_path / "log").accused
    assert accused is not None
    first = accused.findings[0]
    assert (accused.stage, first.layer, first.tensor) == (Place.CHECKPOINT, 1, f"{norms[0]}.weight")
    assert first.cause == f"it holds {norms[1]}"


def test_a_multiplier_that_is_not_the_models_is_named(made: Deployments, tmp_path: Path) -> None:
    write_model(made.root / "model-granite", "granite")
    places = made.copied(Recipe("granite"), tmp_path / "copy", served=False)
    assert diagnosed(places, tmp_path / "log").accused is None
    right = trace_checkpoint(places.model, Checkpoint(places.checkpoint)).logits([(3, 5, 8)])[0]
    configure(places.checkpoint, output_multiplier_scale=0.25)
    assert np.allclose(trace_checkpoint(places.model, Checkpoint(places.checkpoint)).logits([(3, 5, 8)])[0], right / 2)
    configure(places.checkpoint, residual_multiplier=1.0)
    accused = diagnosed(places, tmp_path / "log").accused
    assert accused is not None
    named = [each.tensor for each in accused.findings]
    assert named == ["config.json residual_multiplier", "config.json output_multiplier_scale"]


def test_a_window_that_is_not_the_models_is_named(made: Deployments, tmp_path: Path) -> None:
    write_model(made.root / "model-mistral_with_window", "mistral_with_window")
    places = made.copied(Recipe("mistral_with_window"), tmp_path / "copy", served=False)
    assert diagnosed(places, tmp_path / "log").accused is None
    configure(places.checkpoint, sliding_window=None)
    accused = diagnosed(places, tmp_path / "log").accused
    assert accused is not None
    assert accused.stage == Place.CHECKPOINT
    assert [each.tensor for each in accused.findings] == ["config.json sliding_window"]


def test_an_engine_without_a_bias_of_its_checkpoint_is_named(made: Deployments, tmp_path: Path) -> None:
    write_model(made.root / "model-qwen2", "qwen2")
    places = made.copied(Recipe("qwen2"), tmp_path / "copy", served=False)
    bias = "transformer.layers.1.attention.qkv.bias"

    def without(tensors: Tensors) -> None:
        del tensors[bias]

    in_engine(without)(places)
    accused = diagnosed(places, tmp_path / "log").accused
    assert accused is not None
    first = accused.findings[0]
    assert (accused.stage, first.layer, first.tensor) == (Place.CPU_ENGINE, 1, bias)
    assert "the bias is not added" in first.cause


def test_a_fault_of_the_calibration_is_modelopts(made: Deployments, tmp_path: Path) -> None:
    """The same wrong weight is in the checkpoint, but it was there before the export."""
    given = made.made(FP8).deployment(tmp_path / "log")
    assert given.simulation is not None
    right = given.simulation.make

    def halved() -> SimulatedModel:
        model = right()
        quantizer = model._module(1, "mlp.proj").weight_quantizer
        quantizer.amax = quantizer.amax / 2
        return model

    spoilt = replace(given, simulation=replace(given.simulation, make=halved))
    accused = diagnose(spoilt, model="tiny", variant="fp8", seed=1, new_tokens=8, progress=SilentProgress()).accused
    assert accused is not None
    assert (accused.stage, accused.findings[0].layer) == (Place.MODELOPT, 1)
    assert accused.findings[0].tensor == "layers.1.mlp.proj.weight"


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_a_scale_is_compared_with_that_of_a_second_calibration(
    factor: float, made: Deployments, tmp_path: Path
) -> None:
    """It covers what the layer sees, so that only the calibration can tell."""
    places, name = made.copied(FP8, tmp_path / "copy", served=False), "mlp.fc.activation_scaling_factor"
    in_checkpoint(scaled(at(1, "mlp.fc"), "activation_scaling_factor", factor))(places)
    result = diagnosed(places, tmp_path / "log")
    accused = result.accused
    assert accused is not None
    assert (accused.stage, accused.findings[0].tensor) == (Place.CHECKPOINT, f"transformer.layers.1.{name}")
    assert f"{factor:g} times that of ModelOpt's calibration" in accused.findings[0].cause
    assert {each.stage: each.verdict for each in result.stages}[Place.MODELOPT] == StageVerdict.CLEAN


def test_a_scale_of_int4_rtn_is_judged_as_rounding_and_not_as_gptq(made: Deployments, tmp_path: Path) -> None:
    places = made.copied(Recipe("llama", QFormat.INT4_RTN), tmp_path / "copy", served=False)
    assert diagnosed(places, tmp_path / "log").accused is None
    in_checkpoint(scaled(at(1, "mlp.proj"), "weights_scaling_factor", 1.1))(places)
    accused = diagnosed(places, tmp_path / "log").accused
    assert accused is not None
    assert accused.findings[0].tensor == "transformer.layers.1.mlp.proj.weights_scaling_factor"
    assert "the scale is 1.1 times" in accused.findings[0].cause


def test_scales_with_the_least_error_are_not_accused(made: Deployments, tmp_path: Path) -> None:
    model, texts = made.model("llama"), load_texts(TEXTS)
    spec = QuantSpec(QuantSettings(qformat=QFormat.INT4_RTN, int4_scales="mse"))
    quantize(model, tmp_path / "checkpoint", spec, texts, CALIBRATION)
    simulation = Simulation(spec, lambda: SimulatedModel(fake_quantized_model(model, spec, texts, CALIBRATION).float()))
    given = DiagnosedFolders(model, model, TEXTS, simulation, checkpoint=tmp_path / "checkpoint")
    result = diagnose(given, model="tiny", variant="none", seed=1, new_tokens=8, progress=SilentProgress())
    assert result.accused is None


def test_names_of_faults_are_unique_and_there_are_forty() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 40
