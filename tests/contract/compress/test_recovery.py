"""Recovery training on a bundled model: zeros stay, rounding is simulated as the engine rounds, stops go on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

from pipelines.checkpoint.weight_codes import quantize_weight_only  # noqa: E402
from pipelines.compress import CalibrationSpec, RecoverySpec, SparsitySpec, load_texts, recover, sparsify  # noqa: E402
from pipelines.compress.weight_rounding import rounded  # noqa: E402
from pipelines.domain.errors import UserError  # noqa: E402
from pipelines.domain.formats import QFormat  # noqa: E402
from pipelines.domain.progress import PARTIAL  # noqa: E402
from pipelines.host.files import MANIFEST  # noqa: E402
from pipelines.settings.model import BUNDLED  # noqa: E402
from tests.conftest import ROOT  # noqa: E402

LLAMA, GEMMA = (BUNDLED / "models" / name for name in ("tiny_llama", "tiny_gemma"))
SHORT: dict[str, Any] = {
    "steps": 4, "learning_rate": 2e-4, "seq_len": 64, "batch_size": 2, "accumulation": 1, "evaluate_every": 2,
    "patience": 9, "seed": 1, "texts": 40,
}  # fmt: skip


def texts() -> list[str]:
    return list(load_texts(BUNDLED / "corpus.jsonl", size=60))


def weights(folder: Path) -> dict[str, Any]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module", params=[LLAMA, GEMMA], ids=["llama", "gemma"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundled model and what magnitude pruning makes of it."""
    folder = tmp_path_factory.mktemp("sparse") / "model"
    sparsify(request.param, folder, SparsitySpec("magnitude"), (), CalibrationSpec())
    return request.param, folder


def test_a_sparse_model_learns_and_stays_sparse(sparse: tuple[Path, Path], tmp_path: Path) -> None:
    """Zeros are counted in the written files; other files, tensors and types are those of before."""
    original, folder = sparse
    facts = recover(folder, original, tmp_path / "out", RecoverySpec("distill", sparse=True, **SHORT), texts())
    before, after = weights(folder), weights(tmp_path / "out")
    assert {name: value.dtype for name, value in before.items()} == {name: v.dtype for name, v in after.items()}
    pruned = [name for name in before if "_proj" in name]
    assert facts["sparse"]["linears"] == len(pruned)
    for name in pruned:
        assert not (after[name][before[name] == 0] != 0).any()
    assert any(not torch.equal(before[name], after[name]) for name in pruned)
    assert facts["loss_after"] < facts["loss_before"]
    assert (facts["steps"], [step for step, _ in facts["held_out_losses"]]) == (4, [0, 2, 4])
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / PARTIAL).exists()


@pytest.mark.parametrize("bits", [4, 8])
def test_training_sees_the_rounding_of_the_engine(bits: int) -> None:
    """The judge is what the CPU engine and the checkpoint's reader compute for trtllm-build."""
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(bits))
    weight[3] = 0
    codes, scales = quantize_weight_only(weight.numpy(), bits)
    want = codes.astype(np.float32) * scales[:, None]
    found = rounded(weight.requires_grad_(True), bits)
    assert np.allclose(found.detach().numpy(), want, atol=1e-7)
    found.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_training_for_rounded_weights_lowers_the_loss_with_rounding(tmp_path: Path) -> None:
    """The loss is that of the rounded weights; what is written is whole."""
    spec = RecoverySpec("distill", rounded=QFormat.INT4_WO, **SHORT | {"steps": 8, "evaluate_every": 4})
    facts = recover(LLAMA, LLAMA, tmp_path / "out", spec, texts())
    assert 0 < facts["loss_after"] < facts["loss_before"]
    weight = next(value for name, value in weights(tmp_path / "out").items() if "q_proj" in name)
    assert len(weight.unique()) > 1000


def test_text_alone_trains_towards_the_next_token(tmp_path: Path) -> None:
    facts = recover(LLAMA, None, tmp_path / "out", RecoverySpec("finetune", rounded=QFormat.INT4_WO, **SHORT), texts())
    assert facts["method"] == "finetune"
    assert facts["loss_before"] > 0.5


KILLED = """
import os, signal, sys
from pathlib import Path
from transformers import TrainerCallback
from pipelines.compress import recovering
from tests.contract.compress.test_recovery import LLAMA, SHORT, texts
from pipelines.compress import RecoverySpec, recover
from pipelines.domain.formats import QFormat
real = recovering._Watch.on_step_end
def die(self, args, state, control, **named):
    real(self, args, state, control, **named)
    if state.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
recovering._Watch.on_step_end = die
recover(LLAMA, LLAMA, Path(sys.argv[1]), RecoverySpec("distill", rounded=QFormat.INT4_WO, **SHORT), texts())
"""


def test_a_killed_training_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """Killed after step 3 it goes on from step 2."""
    spec = RecoverySpec("distill", rounded=QFormat.INT4_WO, **SHORT)
    whole = recover(LLAMA, LLAMA, tmp_path / "whole", spec, texts())
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(killed)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert (killed / PARTIAL / "checkpoint-2").is_dir()
    facts = recover(LLAMA, LLAMA, killed, spec, texts())
    left, right = weights(tmp_path / "whole"), weights(killed)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert facts["held_out_losses"] == whole["held_out_losses"]
    assert facts["loss_before"] == whole["loss_before"]


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    """What another training has left is not taken for its own."""
    left = tmp_path / "out" / PARTIAL
    (left / "checkpoint-2").mkdir(parents=True)
    (left / "recovery.json").write_text(json.dumps({"recover": "another"}))
    facts = recover(LLAMA, LLAMA, tmp_path / "out", RecoverySpec("distill", rounded=QFormat.INT4_WO, **SHORT), texts())
    assert facts["steps"] == 4


def test_a_loss_that_is_no_number_stops_with_step_and_rate(tmp_path: Path) -> None:
    spec = RecoverySpec("finetune", rounded=QFormat.INT8_WO, **SHORT | {"learning_rate": 1e30})
    with pytest.raises(UserError, match=r"The loss is nan at step \d, with a learning rate of .*recover.learning_rate"):
        recover(LLAMA, None, tmp_path / "out", spec, texts())


def test_training_that_gets_worse_ends_early_with_the_best_weights(tmp_path: Path) -> None:
    worse = {"steps": 12, "learning_rate": 0.3, "evaluate_every": 2, "patience": 2}
    facts = recover(
        LLAMA, LLAMA, tmp_path / "out", RecoverySpec("distill", rounded=QFormat.INT8_WO, **SHORT | worse), texts()
    )
    best = min(facts["held_out_losses"][1:], key=lambda pair: pair[1])
    assert facts["steps"] < 12
    assert facts["best_step"] == best[0]


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has another tokenizer: the token .* there and"):
        recover(LLAMA, GEMMA, tmp_path / "out", RecoverySpec("distill", rounded=QFormat.INT4_WO, **SHORT), texts())


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"The texts have \d tokens, which are fewer than 2 sequences of recover.seq_len=64"
    ):
        recover(LLAMA, None, tmp_path / "out", RecoverySpec("finetune", **SHORT), ["a b"])


def test_a_manifest_stays_with_its_artifact(tmp_path: Path) -> None:
    """Failed before: the next artifact had the manifest of the one before among its files, and was called damaged."""
    artifact = shutil.copytree(LLAMA, tmp_path / "artifact")
    (artifact / MANIFEST).write_text("{}")
    sparsify(artifact, tmp_path / "out", SparsitySpec("magnitude"), (), CalibrationSpec())
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_several_files_are_written_as_several(tmp_path: Path) -> None:
    source = shutil.copytree(LLAMA, tmp_path / "source")
    every = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(every)
    files = {f"model-0000{number}-of-00002.safetensors": names[number - 1 :: 2] for number in (1, 2)}
    for file, part in files.items():
        save_file({name: every[name] for name in part}, source / file, {"format": "pt"})
    where = {name: file for file, part in files.items() for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    recover(source, None, tmp_path / "out", RecoverySpec("finetune", **SHORT | {"steps": 1}), texts())
    found = {file.name: set(load_file(file)) for file in (tmp_path / "out").glob("*.safetensors")}
    assert found == {file: set(part) for file, part in files.items()}
