"""2:4 sparsity is in the written weights, nowhere else, survives quantization, and sparsegpt beats magnitude."""

import json

import pytest

from pipelines.checkpoint.read import Checkpoint
from pipelines.compress.config import SparsitySettings
from pipelines.compress.quantizing import quantize
from pipelines.compress.sparsifying import link_small_files, sparsify
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import PARTIAL
from pipelines.settings.model import BUNDLED
from pipelines.stages.quantize import check_model
from tests.contract.compress.conftest import CALIBRATION, write_model
from tests.support.specs import quant_spec
from tests.support.stops import Stops
from tests.support.whole_model import sparsify_whole

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

from tests.support.small_models import write_random  # noqa: E402 - after the skips

THEIRS = {"o_proj": "attention.dense", "gate_proj": "mlp.fc", "up_proj": "mlp.gate", "down_proj": "mlp.proj"}
METHODS = ["magnitude", "sparsegpt"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["llama", "tied", "gemma"])
def test_half_of_every_linear_is_zero_and_all_else_is_untouched(kind, method, models, texts, tmp_path) -> None:
    facts = sparsify(models[kind], tmp_path, SparsitySettings(method=method), texts, CALIBRATION)
    before = load_file(models[kind] / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in after.items():
        if "_proj" in name:
            assert (weight.reshape(-1, 4) == 0).sum(dim=1).min() >= 2, name
            assert weight.dtype == before[name].dtype
        else:
            assert torch.equal(weight, before[name]), name
    assert facts["linears"] == 14  # 7 in each of 2 layers
    assert facts["zero_fraction"] == pytest.approx(0.5, abs=0.01)
    json.dumps(facts)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["llama", "tied", "gemma"])
def test_pruning_layer_by_layer_gives_the_file_of_the_whole_model(kind, method, models, texts, tmp_path) -> None:
    sparsify(models[kind], tmp_path / "layers", SparsitySettings(method=method), texts, CALIBRATION)
    sparsify_whole(models[kind], tmp_path / "whole.safetensors", SparsitySettings(method=method), texts, CALIBRATION)
    assert (tmp_path / "layers/model.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_is_continued(method, models, texts, tmp_path) -> None:
    stops, again = Stops("pruning", 1), Stops("pruning", -1)
    with pytest.raises(KeyboardInterrupt):
        sparsify(models["llama"], tmp_path / "out", SparsitySettings(method=method), texts, CALIBRATION, progress=stops)
    assert (tmp_path / "out" / PARTIAL).is_dir()
    facts = sparsify(
        models["llama"], tmp_path / "out", SparsitySettings(method=method), texts, CALIBRATION, progress=again
    )
    assert again.notes == ["continuing a run that was stopped: 1 of 2 layers are complete"]
    assert facts == sparsify(models["llama"], tmp_path / "once", SparsitySettings(method=method), texts, CALIBRATION)
    assert not (tmp_path / "out" / PARTIAL).exists()
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_a_mixture_of_experts_is_refused(texts, tmp_path) -> None:
    model = write_random(tmp_path / "model", "mixtral")
    with pytest.raises(UserError, match=r"model is a mixture of experts, which sparsity=magnitude_2_4 does not prune"):
        sparsify(model, tmp_path / "out", SparsitySettings(method="magnitude"), texts, CALIBRATION)


def test_magnitude_keeps_the_two_largest_of_four_and_needs_no_texts(models, tmp_path) -> None:
    sparsify(models["llama"], tmp_path, SparsitySettings(method="magnitude"), iter(()), CALIBRATION)
    name = "model.layers.0.mlp.down_proj.weight"
    before = load_file(models["llama"] / "model.safetensors")[name].reshape(-1, 4)
    after = load_file(tmp_path / "model.safetensors")[name].reshape(-1, 4)
    kept = before.abs().sort(dim=1).values[:, 2:].sum(dim=1)
    torch.testing.assert_close(after.abs().sum(dim=1), kept)


def test_the_folder_is_complete_and_small_files_are_links(models, texts, tmp_path) -> None:
    sparsify(models["llama"], tmp_path, SparsitySettings(method="magnitude"), texts, CALIBRATION)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in models["llama"].iterdir()}
    assert (tmp_path / "config.json").samefile(models["llama"] / "config.json")
    assert not (tmp_path / "model.safetensors").samefile(models["llama"] / "model.safetensors")
    link_small_files(models["llama"], tmp_path)  # a run that was stopped here links them again
    assert (tmp_path / "config.json").samefile(models["llama"] / "config.json")


@pytest.mark.parametrize("qformat", [QFormat.FP8, QFormat.NONE])
def test_zeros_survive_quantization(qformat, models, texts, tmp_path) -> None:
    """FP8 of zero is zero, so a sparse model stays 2:4 sparse in the checkpoint."""
    sparsify(models["gemma"], tmp_path / "sparse", SparsitySettings(method="sparsegpt"), texts, CALIBRATION)
    quantize(tmp_path / "sparse", tmp_path / "out", quant_spec(qformat), texts, CALIBRATION)
    checkpoint = Checkpoint(tmp_path / "out")
    for name in checkpoint:
        if ".mlp." in name and name.endswith(".weight"):
            groups = checkpoint.tensor(name).astype("float32").reshape(-1, 4)
            assert (groups == 0).sum(axis=1).min() >= 2, name


def test_the_same_inputs_give_the_same_bytes(models, texts, tmp_path) -> None:
    for name in ("a", "b"):
        sparsify(models["gemma"], tmp_path / name, SparsitySettings(method="sparsegpt"), texts, CALIBRATION)
    first, second = (tmp_path / name / "model.safetensors" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_sparsegpt_leaves_a_smaller_output_error_than_magnitude(texts) -> None:
    """On correlated inputs the update of the remaining weights pays; measured as |X(W - W')^T|^2 / |XW^T|^2."""
    from pipelines.compress.sparsegpt import _relative_error, inverse_factor, prune_2_4

    torch.manual_seed(0)
    inputs = torch.randn(400, 8) @ torch.randn(8, 64) + 0.1 * torch.randn(400, 64)
    weight, hessian = torch.randn(32, 64), inputs.T @ inputs
    groups = weight.reshape(-1, 4)
    smallest = groups.abs().topk(2, dim=1, largest=False).indices
    magnitude = groups.scatter(1, smallest, 0.0).reshape(weight.shape)
    ours = prune_2_4(weight, inverse_factor(hessian))
    assert _relative_error(weight, ours, hessian) < 0.2 * _relative_error(weight, magnitude, hessian)


def test_inputs_that_are_not_groups_of_four_are_refused(tmp_path) -> None:
    folder = write_model(tmp_path / "odd", "llama", intermediate_size=250)
    with pytest.raises(UserError, match=r"mlp\.proj has 250"):
        check_model(folder, QFormat.NONE, sparsity="sparsegpt")


def test_a_pruned_model_with_columns_of_zeros_is_smoothed(tmp_path) -> None:
    """ModelOpt's SmoothQuant ends with an IndexError at such a column, and the bundled Gemma gets some from pruning."""
    gemma, sparse = BUNDLED / "models" / "tiny_gemma", tmp_path / "sparse"
    sparsify(gemma, sparse, SparsitySettings(method="magnitude"), (), CALIBRATION)
    pruned = load_file(sparse / "model.safetensors")
    empty = {name: int((~weight.any(dim=0)).sum()) for name, weight in pruned.items() if name.split(".")[-2] in THEIRS}
    assert sum(empty.values()) > 0
    quantize(sparse, tmp_path / "out", quant_spec(QFormat.INT8_SQ), ["The river of Githbrel is"] * 4, CALIBRATION)
    made = Checkpoint(tmp_path / "out")
    for name, count in empty.items():  # zero again afterwards, every one of them
        layer, linear = name.split(".")[2], THEIRS[name.split(".")[-2]]
        assert int((made.tensor(f"transformer.layers.{layer}.{linear}.weight") == 0).all(axis=0).sum()) >= count


def test_columns_of_zeros_are_zero_again_after_a_failure() -> None:
    """A calibration that fails must not leave the stand-in values in a model that the caller still holds."""
    from pipelines.compress import modelopt_door

    model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False))
    model[0].weight.data[:, 1] = 0

    def fails(_model: torch.nn.Module) -> None:
        assert model[0].weight.data[:, 1].all()
        raise ValueError("calibration stopped")

    config = {**modelopt_door.preset("INT8_SMOOTHQUANT_CFG"), "algorithm": {"method": "smoothquant", "alpha": 0.5}}
    with pytest.raises(ValueError, match="calibration stopped"):
        modelopt_door.simulate(model, config, fails)
    assert not model[0].weight.data[:, 1].any()
