"""Planning `diagnose`: what is made, what is given, and what is refused."""

import json
import shutil

import pytest

from pipelines.domain.errors import UserError
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from pipelines.store.store import Store
from tests.unit.core.test_plan_fidelity import MACHINE

TINY = BUNDLED / "models" / "tiny_llama"


def plan(tmp_path, *overrides):
    settings = load(["engine=openvino", f"paths.store={tmp_path / 'store'}", *overrides])
    return make_plan(settings, "diagnose", Store(settings.paths.store), MACHINE)


def ids(made):
    return [step.node.id for step in made.steps]


def diagnosis(made):
    return made.steps[-1].node


def test_everything_is_made_and_diagnosed(tmp_path):
    made = plan(tmp_path, "quant=fp8")
    assert ids(made) == ["quantize", "build", "repository", "diagnose"]
    inputs = {"model", "text.bundled", "calibration", "checkpoint", "engine", "repository"}
    assert set(diagnosis(made).inputs) == inputs


@pytest.mark.parametrize("words", [["quant=fp8", "diagnose.simulate=false"], ["quant=int8_wo"]])
def test_nothing_is_calibrated_where_nothing_is_simulated(tmp_path, words):
    assert "calibration" not in diagnosis(plan(tmp_path, *words)).inputs


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["quant=int8_wo"], "nothing is calibrated for int8_wo"),
        (["quant=nvfp4", "model=tiny_llama"], "ModelOpt simulates FP4 activations on CUDA only"),
        (["quant=fp8"], ""),
    ],
)
def test_why_modelopt_is_no_stage_is_said(tmp_path, words, why):
    assert diagnosis(plan(tmp_path, *words)).stage.quantize.why_not_simulated == why


def test_without_a_server_no_repository_is_written(tmp_path):
    for word in ("diagnose.serve=false", "eval.url=http://127.0.0.1:9/v1"):
        assert ids(plan(tmp_path, word)) == ["quantize", "build", "diagnose"]


def test_a_family_whose_layers_it_does_not_read_is_refused(tmp_path):
    config = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_scaling": None}
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / "config.json").write_text(json.dumps(json.loads((TINY / "config.json").read_text()) | config))
    with pytest.raises(UserError, match=r"does not read the layers of Phi3ForCausalLM\. .*Gemma, Granite, Llama"):
        plan(tmp_path, f"model.path={model}")


def test_a_sparse_model_is_what_the_checkpoint_is_compared_with(tmp_path):
    assert diagnosis(plan(tmp_path, "sparsity=magnitude_2_4")).inputs["compressed"] == "sparsify"


def test_with_folders_nothing_is_made(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text("{}")
    made = plan(tmp_path, f"diagnose.checkpoint={tmp_path / 'checkpoint'}")
    assert ids(made) == ["diagnose"]
    assert set(diagnosis(made).inputs) == {"model", "text.bundled", "checkpoint"}


def test_a_tensorrt_engine_is_left_to_its_machine(tmp_path):
    assert ids(plan(tmp_path, "engine=tensorrt_llm", "hardware=h100_sxm")) == ["quantize", "diagnose"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["diagnose.engine=/e"], r"diagnose\.engine='/e' needs diagnose\.checkpoint"),
        (["diagnose.checkpoint=/absent"], r"diagnose\.checkpoint='/absent'"),
        (["diagnose.repository=/r", "eval.url=grpc://h:1"], r"diagnose\.repository='/r' and eval\.url='grpc://h:1'"),
        (["engine=tensorrt_llm_llmapi"], r"engine=tensorrt_llm_llmapi has no TensorRT-LLM checkpoint"),
        (["diagnose.seed=2"], r"diagnose\.seed is no longer a setting.* The prompts are always the same"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(tmp_path, words, match):
    with pytest.raises(UserError, match=match):
        plan(tmp_path, *words)
