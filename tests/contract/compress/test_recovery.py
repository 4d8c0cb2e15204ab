"""Recovery training on a bundled model: zeros stay, rounding is simulated as the engine rounds, stops go on."""

import json
import math
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

from pipelines.compress import training, training_processes  # noqa: E402
from pipelines.compress.config import CalibrationSettings, QuantSettings, SparsitySettings  # noqa: E402
from pipelines.compress.sparsifying import sparsify  # noqa: E402
from pipelines.compress.specs import RecoverySpec  # noqa: E402
from pipelines.compress.training_processes import recover  # noqa: E402
from pipelines.domain.errors import ContinuableError, UserError  # noqa: E402
from pipelines.domain.formats import QFormat  # noqa: E402
from pipelines.domain.progress import PARTIAL  # noqa: E402
from pipelines.host.files import MANIFEST  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.support.specs import recovery_spec  # noqa: E402
from tests.support.trained import GEMMA, LLAMA, SHORT, texts, weights  # noqa: E402

INT4, INT8 = QuantSettings(qformat=QFormat.INT4_WO), QuantSettings(qformat=QFormat.INT8_WO)


@pytest.fixture(scope="module", params=[LLAMA, pytest.param(GEMMA, marks=pytest.mark.thorough)], ids=["llama", "gemma"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundled model and what magnitude pruning makes of it."""
    folder = tmp_path_factory.mktemp("sparse") / "model"
    sparsify(request.param, folder, SparsitySettings(method="magnitude"), (), CalibrationSettings())
    return request.param, folder


def test_a_sparse_model_learns_and_stays_sparse(sparse: tuple[Path, Path], tmp_path: Path) -> None:
    """Zeros are counted in the written files; other files, tensors and types are those of before."""
    original, folder = sparse
    facts = recover(folder, original, tmp_path / "out", recovery_spec("distill", sparse=True, **SHORT), texts())
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


def test_training_for_rounded_weights_lowers_the_loss_with_rounding(tmp_path: Path) -> None:
    """The loss is that of the rounded weights; what is written is whole."""
    spec = recovery_spec("distill", rounding=INT4, **SHORT | {"steps": 8, "evaluate_every": 4})
    facts = recover(LLAMA, LLAMA, tmp_path / "out", spec, texts())
    assert 0 < facts["loss_after"] < facts["loss_before"]
    weight = next(value for name, value in weights(tmp_path / "out").items() if "q_proj" in name)
    assert len(weight.unique()) > 1000


def test_text_alone_trains_towards_the_next_token(tmp_path: Path) -> None:
    facts = recover(LLAMA, None, tmp_path / "out", recovery_spec("finetune", rounding=INT4, **SHORT), texts())
    assert facts["method"] == "finetune"
    assert facts["loss_before"] > 0.5


KINDS = {
    "all weights": recovery_spec("distill", rounding=INT4, **SHORT),
    "low rank": recovery_spec("distill", rounding=INT4, lora=(4, 8.0, ("q_proj", "down_proj")), **SHORT),
}
KILLED = """
import os, signal, sys
from pathlib import Path
from transformers import TrainerCallback
from pipelines.compress import training
from tests.support.trained import LLAMA, SHORT, texts
from pipelines.compress.training_processes import recover
from pipelines.compress.config import CalibrationSettings, QuantSettings, SparsitySettings  # noqa: E402
from tests.support.specs import recovery_spec  # noqa: E402
from tests.contract.compress.test_recovery import KINDS
real = training._Watch.on_step_end
def die(self, args, state, control, **named):
    real(self, args, state, control, **named)
    if state.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
training._Watch.on_step_end = die
recover(LLAMA, LLAMA, Path(sys.argv[1]), KINDS[sys.argv[2]], texts())
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_goes_on_to_the_same_weights(tmp_path: Path, kind: str) -> None:
    """Killed after step 3 it goes on from step 2."""
    spec = KINDS[kind]
    whole = recover(LLAMA, LLAMA, tmp_path / "whole", spec, texts())
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(killed), kind]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert (killed / PARTIAL / "checkpoint-2").is_dir()
    facts = recover(LLAMA, LLAMA, killed, spec, texts())
    left, right = weights(tmp_path / "whole"), weights(killed)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert facts["held_out_losses"] == whole["held_out_losses"]
    assert facts["loss_before"] == whole["loss_before"]


@pytest.mark.thorough
def test_other_settings_begin_anew(tmp_path: Path) -> None:
    """What another training has left is not taken for its own."""
    left = tmp_path / "out" / PARTIAL
    (left / "checkpoint-2").mkdir(parents=True)
    (left / "layers.json").write_text(json.dumps({"identity": "another"}))
    facts = recover(LLAMA, LLAMA, tmp_path / "out", recovery_spec("distill", rounding=INT4, **SHORT), texts())
    assert facts["steps"] == 4


def test_a_loss_that_is_no_number_stops_with_step_and_rate(tmp_path: Path) -> None:
    settings = recovery_spec("finetune", **SHORT).recover.model_copy(update={"learning_rate": 1e30})
    spec = RecoverySpec(settings, rounding=INT8)
    with pytest.raises(UserError, match=r"The loss is nan at step \d, with a learning rate of .*recover.learning_rate"):
        recover(LLAMA, None, tmp_path / "out", spec, texts())


@pytest.mark.thorough
def test_the_checkpoint_from_before_such_a_loss_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed before: the folder was removed."""
    real, calls = training._Recovery.compute_loss, iter(range(99))
    monkeypatch.setattr(
        training._Recovery,
        "compute_loss",
        lambda *given, **named: real(*given, **named) * (1 if next(calls) < 2 else math.nan),
    )
    spec, kept = recovery_spec("finetune", rounding=INT4, **SHORT), tmp_path / "out" / PARTIAL / "checkpoint-2"
    with pytest.raises(ContinuableError, match=rf"nan at step 3, .*rate of 0.00015.*step 2 are kept in {kept}"):
        recover(LLAMA, None, tmp_path / "out", spec, texts())
    assert all(value.isfinite().all() for value in weights(kept).values())
    assert not (tmp_path / "out" / PARTIAL / "checkpoint-4").exists()
    monkeypatch.setattr(training._Recovery, "compute_loss", real)
    assert recover(LLAMA, None, tmp_path / "out", spec, texts())["steps"] == 4


def test_a_checkpoint_that_a_kill_left_half_written_is_not_used(tmp_path: Path) -> None:
    """Failed before: the newest folder was taken, whatever was in it."""
    for number, files in ((2, ("model.safetensors", training.STATE)), (4, ("model.safetensors",))):
        (tmp_path / f"checkpoint-{number}").mkdir()
        for file in files:
            (tmp_path / f"checkpoint-{number}" / file).touch()
    assert training.last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert training.last_checkpoint(tmp_path / "checkpoint-4") is None


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Limits the size of files for one test."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_takes_no_checkpoint_is_said(tmp_path: Path, small_files: Callable[[int], None]) -> None:
    """Failed before: torch's "[enforce fail at inline_container.cc]". Weights fit, and their moments do not."""
    parameters = sum(value.numel() for value in weights(LLAMA).values())
    small_files(6 * parameters)
    with pytest.raises(OSError, match="File too large"):
        recover(LLAMA, None, tmp_path / "out", recovery_spec("finetune", **SHORT), texts())


def test_a_disk_on_which_processes_cannot_say_why_they_end_is_asked(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    """Failed before: "ended early (exit code 1)." without a reason."""
    small_files(4096)
    job, ended = SimpleNamespace(folder=tmp_path), SimpleNamespace(poll=lambda: 1)
    with pytest.raises(OSError, match="File too large"):
        training_processes._check(job, [ended])


def test_training_that_gets_worse_ends_early_with_the_best_weights(tmp_path: Path) -> None:
    """Those from before it, if no step found better ones."""
    worse = {"steps": 12, "learning_rate": 0.3, "evaluate_every": 2, "patience": 2}
    facts = recover(LLAMA, LLAMA, tmp_path / "out", recovery_spec("distill", rounding=INT8, **SHORT | worse), texts())
    assert facts["steps"] < 12
    assert facts["best_step"] == 0
    assert facts["loss_after"] == facts["loss_before"]
    before, after = weights(LLAMA), weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)


def _stop_after(step: int) -> Any:
    def stop(_self: Any, _args: Any, state: Any, *_given: Any, **_named: Any) -> None:
        if state.global_step == step:
            raise KeyboardInterrupt

    return stop


def _stop(*_given: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.thorough
@pytest.mark.parametrize("complete", [False, True])
def test_a_stopped_training_does_not_forget_how_long_it_got_no_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """Failed before: patience began anew, so that more steps were trained. The draft's folder has moved meanwhile."""
    worse = {"steps": 12, "learning_rate": 0.3, "evaluate_every": 2, "patience": 2}
    spec = recovery_spec("distill", rounding=INT8, **SHORT | worse)
    whole = recover(LLAMA, LLAMA, tmp_path / "whole", spec, texts())
    stop = (training, "write_like", _stop)
    if not complete:
        stop = (training._Watch, "on_step_end", _stop_after(whole["steps"] - 1))
    with monkeypatch.context() as patch:
        patch.setattr(*stop)
        with pytest.raises(KeyboardInterrupt):
            recover(LLAMA, LLAMA, tmp_path / "stopped", spec, texts())
    moved = (tmp_path / "stopped").rename(tmp_path / "moved")
    assert recover(LLAMA, LLAMA, moved, spec, texts()) == whole
    left, right = weights(tmp_path / "whole"), weights(moved)
    assert all(torch.equal(left[name], right[name]) for name in left)


def _trained(tmp_path: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path / "-".join(map(str, changes.values()))
    facts = recover(LLAMA, None, folder, recovery_spec("finetune", **SHORT | {"steps": 2} | changes), texts())
    return facts, weights(folder)


@pytest.mark.thorough
def test_accumulated_batches_make_the_update_of_one_large_batch(tmp_path: Path) -> None:
    """But for a few of four million weights, rounded to another value of bf16; half of them differ after less data."""
    whole, split, small = (
        _trained(tmp_path, batch_size=size, accumulation=batches)[1] for size, batches in ((4, 1), (2, 2), (2, 1))
    )
    count = sum(value.numel() for value in whole.values())
    apart, far = (sum(int((other[name] != whole[name]).sum()) for name in whole) / count for other in (split, small))
    assert apart < 1e-4
    assert far > 0.1
    for name, value in whole.items():
        step = value.float().abs() * 2.0**-7  # at most, between neighbours in bf16
        assert ((split[name].float() - value.float()).abs() <= step + 2e-5).all(), name


@pytest.mark.thorough
def test_checkpointed_activations_are_computed_twice_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    real, calls = LlamaMLP.forward, []
    monkeypatch.setattr(LlamaMLP, "forward", lambda *given: calls.append(torch.is_grad_enabled()) or real(*given))
    counted, found = [], []
    for twice in (False, True):
        calls.clear()
        found.append(_trained(tmp_path, gradient_checkpointing=twice)[1])
        counted.append(calls.count(True))
    layers, steps = 4, 2
    assert counted == [layers * steps, 2 * layers * steps]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.thorough
def test_bfloat16_is_the_precision_of_the_arithmetic_and_not_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed before: accelerate's environment, which Transformers 4 sets, narrowed a training in float32."""
    real, seen = torch.nn.functional.silu, []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(
        torch.nn.functional, "silu", lambda data, **given: seen.append(data.dtype) or real(data, **given)
    )
    facts = {}
    for precision in ("float32", "bfloat16"):
        seen.clear()
        facts[precision], _ = _trained(tmp_path, precision=precision)
        assert set(seen) == {getattr(torch, precision)}
    wide, narrow = (facts[precision]["loss_before"] for precision in ("float32", "bfloat16"))
    assert 0 < abs(wide - narrow) < 0.02 * wide


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has another tokenizer: the token .* there and"):
        recover(LLAMA, GEMMA, tmp_path / "out", recovery_spec("distill", rounding=INT4, **SHORT), texts())


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"The texts have \d tokens, which are fewer than 2 sequences of recover.seq_len=64"
    ):
        recover(LLAMA, None, tmp_path / "out", recovery_spec("finetune", **SHORT), ["a b"])


def test_a_manifest_stays_with_its_artifact(tmp_path: Path) -> None:
    """Failed before: the next artifact had the manifest of the one before among its files, and was called damaged."""
    artifact = shutil.copytree(LLAMA, tmp_path / "artifact")
    (artifact / MANIFEST).write_text("{}")
    sparsify(artifact, tmp_path / "out", SparsitySettings(method="magnitude"), (), CalibrationSettings())
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
    recover(source, None, tmp_path / "out", recovery_spec("finetune", **SHORT | {"steps": 1}), texts())
    found = {file.name: set(load_file(file)) for file in (tmp_path / "out").glob("*.safetensors")}
    assert found == {file: set(part) for file, part in files.items()}


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({}, r"set recover\.batch_size=1 or recover\.gradient_checkpointing=true or recover\.lora_rank=16\. The same"),
        ({"batch_size": 1, "gradient_checkpointing": True}, r"or set recover\.lora_rank=16\. The same command"),
        (
            {"batch_size": 1, "gradient_checkpointing": True, "lora": (4, 8.0, ("q_proj",))},
            "or train a smaller",
        ),
    ],
)
def test_a_gpu_without_memory_is_named_with_what_would_take_less(
    changes: dict[str, Any], offered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model itself may already be too large; what is set so is not offered."""

    def too_little(*_given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(training, "load_model", too_little)
    spec = recovery_spec("distill", rounding=INT8, **SHORT | changes)
    with pytest.raises(ContinuableError, match=r"^The GPU has too little memory for training: CUDA.*" + offered):
        recover(LLAMA, LLAMA, tmp_path / "out", spec, texts())
