"""Low-rank training: only the matrices beside the weights learn, and an ordinary model comes out."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipelines.compress import peft_door  # noqa: E402
from pipelines.compress.config import CalibrationSettings, SparsitySettings  # noqa: E402
from pipelines.compress.sparsifying import sparsify  # noqa: E402
from pipelines.compress.training_processes import recover  # noqa: E402
from pipelines.domain.errors import UserError  # noqa: E402
from tests.support.specs import recovery_spec  # noqa: E402
from tests.support.trained import GEMMA, LLAMA, SHORT, texts, weights  # noqa: E402

MORE = SHORT | {"learning_rate": 2e-3}


@pytest.mark.parametrize(
    ("model", "teacher"),
    [(LLAMA, LLAMA), pytest.param(GEMMA, None, marks=pytest.mark.thorough)],
    ids=["llama distill", "gemma finetune"],
)
def test_a_sparse_model_learns_with_low_rank_and_stays_sparse(
    tmp_path: Path, model: Path, teacher: Path | None
) -> None:
    """What is not a target keeps its bytes, and the sum of weight and matrices has the zeros of the weight."""
    sparsify(model, tmp_path / "sparse", SparsitySettings(method="magnitude"), (), CalibrationSettings())
    spec = recovery_spec(
        "distill" if teacher else "finetune", sparse=True, lora=(4, 8.0, ("v_proj", "down_proj")), **MORE
    )
    facts = recover(tmp_path / "sparse", teacher, tmp_path / "out", spec, texts())
    before, after = weights(tmp_path / "sparse"), weights(tmp_path / "out")
    assert {name: (value.dtype, value.shape) for name, value in before.items()} == {
        name: (value.dtype, value.shape) for name, value in after.items()
    }
    assert {file.name for file in (tmp_path / "sparse").iterdir()} == {
        file.name for file in (tmp_path / "out").iterdir()
    }
    for name in before:
        learns = name.endswith(("v_proj.weight", "down_proj.weight"))
        assert torch.equal(before[name], after[name]) == (not learns), name
        if "_proj" in name:
            assert not (after[name][before[name] == 0] != 0).any(), name
    assert facts["loss_after"] < facts["loss_before"]
    assert facts["lora"] == {"rank": 4, "alpha": 8.0, "targets": ("v_proj", "down_proj")}
    assert facts["sparse"]["linears"] == len([name for name in before if "_proj" in name])


def test_a_weight_changes_by_a_matrix_of_the_rank(tmp_path: Path) -> None:
    """Alpha scales it. bfloat16 adds noise of its own, which the rank leaves far behind."""
    changes = []
    for alpha in (4.0, 8.0):
        spec = recovery_spec("finetune", lora=(2, alpha, ("q_proj",)), **MORE | {"steps": 2})
        recover(LLAMA, None, tmp_path / str(alpha), spec, texts())
        name = "model.layers.0.self_attn.q_proj.weight"
        changes.append(weights(tmp_path / str(alpha))[name].float() - weights(LLAMA)[name].float())
    strengths = torch.linalg.svdvals(changes[0])
    assert strengths[1] > 2 * strengths[2]
    assert 1.5 < float(changes[1].norm() / changes[0].norm()) < 2.5


def test_a_rank_above_the_size_of_a_weight_is_refused(tmp_path: Path) -> None:
    spec = recovery_spec("finetune", lora=(129, 16.0, ("v_proj",)), **SHORT)
    with pytest.raises(UserError, match=r"lora_rank=129 is larger than the weight of '.*v_proj', which is 128 x 256"):
        recover(LLAMA, None, tmp_path / "out", spec, texts())
    assert not (tmp_path / "out").exists()


def test_linears_that_the_layers_do_not_have_are_refused() -> None:
    """Some families have one linear for q, k and v."""
    layer = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(4, 4)})
    settings = recovery_spec("finetune", lora=(4, 8.0, ("q_proj",)), **SHORT).recover
    with pytest.raises(UserError, match=r"lora_targets=q_proj is not a linear.*They are qkv_proj"):
        peft_door.with_adapters(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])}), settings)
