"""Training by two processes over loopback: the weights of one process, and nobody left when one is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from pipelines.compress import training_processes  # noqa: E402
from pipelines.compress.config import CalibrationSettings, QuantSettings, SparsitySettings  # noqa: E402
from pipelines.compress.sparsifying import sparsify  # noqa: E402
from pipelines.compress.training_processes import recover  # noqa: E402
from pipelines.domain.errors import ContinuableError, UserError  # noqa: E402
from pipelines.domain.formats import QFormat  # noqa: E402
from pipelines.domain.progress import PARTIAL  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.support.small_models import write_model  # noqa: E402
from tests.support.specs import recovery_spec  # noqa: E402
from tests.support.trained import LLAMA, SHORT, texts, weights  # noqa: E402

BATCHES = SHORT | {"batch_size": 4, "accumulation": 2}
LORA = (4, 8.0, ("q_proj", "down_proj"))
ROUNDED = QuantSettings(qformat=QFormat.INT4_RTN)


def members(folder: Path) -> list[int]:
    """Processes that train in a folder, but for supervisors, which have the same words on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(folder) in words and "pipelines.compress.training_processes" in words:
            found.append(int(entry.name))
    return found


def gone(folder: Path, within_s: float = 10) -> bool:
    until = time.monotonic() + within_s
    while members(folder) and time.monotonic() < until:
        time.sleep(0.05)
    return not members(folder)


class Progress:
    """Remembers what is shown."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps = 0.0

    def task(self, title: str, total: float | None, unit: str = "") -> Progress:
        self.notes.append(f"{title} {total:g} {unit}")
        return self

    def __enter__(self):
        return self._advance

    def __exit__(self, *error: object) -> None:
        self.notes.append("closed")

    def _advance(self, amount: float) -> None:
        self.steps += amount

    def note(self, text: str) -> None:
        self.notes.append(text)


def apart(source: Path, one: Path, other: Path) -> float:
    """How far two trainings of a model are from each other, as a part of what the first has learned."""
    before, left, right = weights(source), weights(one), weights(other)
    learned, between = (
        torch.stack([(left[name].float() - kept[name].float()).norm() for name in left]).norm()
        for kept in (before, right)
    )
    return float(between / learned)


@pytest.mark.parametrize("kind", ["all weights, sparse", "low rank, rounded"])
def test_two_processes_find_the_weights_of_one(tmp_path: Path, kind: str) -> None:
    source = LLAMA
    more = {"lora": LORA, "rounding": ROUNDED}
    if "sparse" in kind:
        source, more = tmp_path / "sparse", {"sparse": True}
        sparsify(LLAMA, source, SparsitySettings(method="magnitude"), (), CalibrationSettings())
    spec = recovery_spec("distill", **more, **BATCHES)
    one = recover(source, LLAMA, tmp_path / "one", spec, texts())
    shown = Progress()
    spec = recovery_spec("distill", **more, **BATCHES, processes=2)
    two = recover(source, LLAMA, tmp_path / "two", spec, texts(), progress=shown)
    assert two["processes"] == 2
    assert two["loss_after"] == pytest.approx(one["loss_after"], rel=1e-3)
    assert two["loss_before"] == pytest.approx(one["loss_before"], rel=1e-5)
    assert apart(source, tmp_path / "one", tmp_path / "two") < 0.02
    assert shown.notes[0] == "training 4 steps"
    assert (shown.steps, shown.notes[-1]) == (4, "closed")
    assert gone(tmp_path / "two" / PARTIAL)


def test_processes_with_a_part_of_the_model_find_the_weights_of_one(tmp_path: Path) -> None:
    """Biases, which rounded linears must ask for anew, and an output head that is the embedding are there too."""
    model, sparse = write_model(tmp_path / "model", "qwen2_tied"), tmp_path / "sparse"
    sparsify(model, sparse, SparsitySettings(method="magnitude"), (), CalibrationSettings())
    more = {"sparse": True, "rounding": QuantSettings(qformat=QFormat.FP8), "gradient_checkpointing": True}
    one, parts = (
        recover(sparse, model, tmp_path / str(count), recovery_spec("distill", **more, **BATCHES, **shared), texts())
        for count, shared in ((1, {}), (2, {"processes": 2, "sharding": "full"}))
    )
    assert (parts["sharding"], parts["sparse"]["zeros"]) == ("full", one["sparse"]["zeros"])
    assert parts["loss_after"] == pytest.approx(one["loss_after"], rel=1e-3)
    assert parts["loss_before"] == pytest.approx(one["loss_before"], rel=1e-5)
    assert apart(sparse, tmp_path / "1", tmp_path / "2") < 0.02


SLOW = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pipelines.compress.training_processes import recover
from tests.support.specs import recovery_spec
from tests.support.trained import LLAMA, SHORT, texts
spec = recovery_spec("finetune", **SHORT | {"steps": 2000}, processes=2)
recover(LLAMA, None, Path(sys.argv[1]), spec, texts())
"""


def started(out: Path, until: str = "checkpoint-2") -> subprocess.Popen[bytes]:
    """Begin a long training and return when it has saved its first checkpoint."""
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(out)], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while not (out / PARTIAL / until / "trainer_state.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_nobody_is_left_when_the_starter_ends(tmp_path: Path, number: signal.Signals) -> None:
    process = started(tmp_path / "out")
    folder = tmp_path / "out" / PARTIAL
    assert len(members(folder)) >= 2
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert gone(folder)
    assert (folder / "checkpoint-2").is_dir()


def test_all_end_when_one_is_killed_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which and how, and the weights are those of a run that was not disturbed.

    Each holds a part of the model here; checkpoints of whole models are the Trainer's own, see `test_recovery.py`.
    """
    spec = recovery_spec("finetune", lora=LORA, **SHORT, processes=2, sharding="full")
    whole = recover(LLAMA, None, tmp_path / "whole", spec, texts())
    folder, real = tmp_path / "out" / PARTIAL, training_processes._check

    def kill_one(job: training_processes.TrainingJob, processes: list[training_processes.SupervisedProcess]) -> None:
        if training_processes.last_checkpoint(folder) and processes[1].poll() is None:
            os.kill(processes[1].pid, signal.SIGKILL)
            processes[1].wait(10)
        real(job, processes)

    monkeypatch.setattr(training_processes, "_check", kill_one)
    with pytest.raises(ContinuableError, match=r"Process 1 of recover.processes=2 .*SIGKILL.*goes on from checkpoint-"):
        recover(LLAMA, None, tmp_path / "out", spec, texts())
    assert gone(folder)
    monkeypatch.setattr(training_processes, "_check", real)
    assert recover(LLAMA, None, tmp_path / "out", spec, texts()) == whole
    left, right = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_what_a_process_refuses_is_said_as_one_process_says_it(tmp_path: Path) -> None:
    spec = recovery_spec("finetune", lora=(129, 8.0, ("v_proj",)), **SHORT, processes=2)
    with pytest.raises(UserError, match=r"lora_rank=129 is larger than the weight of .*v_proj") as caught:
        recover(LLAMA, None, tmp_path / "out", spec, texts())
    assert not isinstance(caught.value, ContinuableError)
    assert not (tmp_path / "out").exists()


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    for teacher, more in ((None, {"sharding": "full"}), (LLAMA, {"lora": LORA, "rounding": ROUNDED})):
        spec = recovery_spec("distill", **SHORT, **more, processes=2)
        job = training_processes.TrainingJob(LLAMA, teacher, tmp_path, tmp_path, spec, "cpu")
        written = training_processes.JOBS.dump_json(job)
        assert json.loads(written)["device"] == "cpu"
        assert training_processes.JOBS.validate_json(written) == job


def test_a_checkpoint_counts_when_every_process_has_written_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process waits for the others between its own random numbers and the file that stands for all."""
    folder, real, waited = tmp_path / "out" / PARTIAL, accelerate.Accelerator.wait_for_everyone, []

    def wait(self: accelerate.Accelerator) -> None:
        names = {path.name for path in folder.glob("checkpoint-2/*")}
        waited.append(("rng_state.pth" in names, "trainer_state.json" in names))
        real(self)

    monkeypatch.setattr(accelerate.Accelerator, "wait_for_everyone", wait)
    recover(LLAMA, None, tmp_path / "out", recovery_spec("finetune", lora=LORA, **SHORT), texts())
    assert (True, False) in waited


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "Traceback (most recent call last):\n  torch._C._cuda_setDevice(device)\n"
            "torch.AcceleratorError: CUDA error: invalid device ordinal\n"
            "GPU device may be out of range, do you have enough GPUs?\n"
            "CUDA kernel errors might be asynchronously reported at some other API call.\n"
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
            "torch.AcceleratorError: CUDA error: invalid device ordinal",
        ),
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: no\nW1 a warning at exit",
            "ValueError: no",
        ),
        ("ValueError: first\nduring which\nKeyError: 'x'\nmore", "KeyError: 'x'"),
        ("one\ntwo\nthree\nterminate called after throwing", "two"),
    ],
)
def test_the_reason_is_the_exception_and_not_what_follows_it(log, reason) -> None:
    """PyTorch ends its messages with advice for developers, which hid the line that says what happened."""
    said = training_processes._reason(log.splitlines())
    assert said[0] == reason
    assert len(said) <= training_processes.LINES
