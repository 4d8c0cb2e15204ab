"""Training by several processes on this machine, each with its part of every batch, and all of the model or a part.

`train_in_processes` starts them, shows the progress of the first, and stops all if one ends early. Each is a
`SupervisedProcess`, so none outlives its parent. They rendezvous through a file; on a CPU they use loopback only.

Files in the folder of the Trainer's checkpoints: job.json and blocks.safetensors for the processes to read,
events.jsonl and report.json by the first of them, fault-N.json by whichever fails, and a log of each.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from pipelines.checkpoint.tensors import read_header
from pipelines.compress import transformers_door
from pipelines.compress.calibration import ProgressRecord, new_files_removed, stamp
from pipelines.compress.config import RecoverSettings
from pipelines.compress.contexts import muted
from pipelines.compress.loading import load_tokenizer
from pipelines.compress.model_folder import ModelFolder, look_at, pick_device
from pipelines.compress.sparsegpt import LINEARS
from pipelines.compress.sparsifying import count_zeros, link_small_files
from pipelines.compress.specs import RecoverySpec
from pipelines.compress.texts import token_ids
from pipelines.compress.training import TrainingJob, last_checkpoint, train
from pipelines.domain.errors import ContinuableError, Fault, UserError
from pipelines.domain.progress import SILENT, Advance, Progress
from pipelines.domain.units import MIB
from pipelines.host.disk import why_not_written
from pipelines.host.files import write_json
from pipelines.host.lifetimes import SupervisedProcess
from pipelines.settings.paths import PROJECT_ROOT

JOB, BLOCKS, EVENTS, REPORT, MEETING = "job.json", "blocks.safetensors", "events.jsonl", "report.json", "meeting"
POLL_S = 0.1
LINES = 3
"""Of a log in a message."""
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?::|$)")
RANK = re.compile(r"^\[rank\d+\]: ?")
"""What torch.distributed writes before each line of a traceback."""
RETURNED_BYTES = 2**16
"""Memory of this size goes back to the system when it is freed; glibc would keep that of collected weights."""
JOBS = TypeAdapter(TrainingJob)


def train_in_processes(job: TrainingJob, blocks: torch.Tensor, progress: Progress) -> dict[str, Any]:
    """Do what `training.train` does, in `job.spec.processes` processes.

    Raises:
        UserError: what one of the processes has refused.
        ContinuableError: a process ended early; the same command goes on from the last checkpoint.
    """
    folder = job.folder
    for path in (folder / MEETING, folder / EVENTS, folder / REPORT, *folder.glob("fault-*.json")):
        path.unlink(missing_ok=True)
    (folder / JOB).write_bytes(JOBS.dump_json(job))
    save_file({"blocks": blocks}, folder / BLOCKS)
    (folder / EVENTS).touch()
    started: list[SupervisedProcess] = []
    try:
        for rank in range(job.spec.processes):
            started.append(_start(job, rank))
        with ExitStack() as tasks, (folder / EVENTS).open() as events:
            show = _replayed(progress, tasks)
            while any(process.poll() is None for process in started):
                show(events.read())
                _check(job, started)
                time.sleep(POLL_S)
            show(events.read())
            _check(job, started)
    finally:
        for process in started:
            process.kill()
    report: dict[str, Any] = json.loads((folder / REPORT).read_text())
    return report


def _start(job: TrainingJob, rank: int) -> SupervisedProcess:
    world, search = job.spec.processes, (str(PROJECT_ROOT), os.environ.get("PYTHONPATH", ""))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in search if part),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // world)),
    }
    if job.device == "cpu":
        env["GLOO_SOCKET_IFNAME"] = "lo"
        env["ACCELERATE_TORCH_DEVICE"] = "cpu"  # it would say cpu:1, as which torch.load restores no optimizer
        if job.spec.recover.sharding != "none":
            env["MALLOC_MMAP_THRESHOLD_"] = str(RETURNED_BYTES)
    command = [sys.executable, "-m", "pipelines.compress.training_processes", str(job.folder)]
    return SupervisedProcess(command, env=env, cwd=job.folder, log_file=job.log(rank))


def _check(job: TrainingJob, started: list[SupervisedProcess]) -> None:
    failed = [(rank, process) for rank, process in enumerate(started) if process.poll()]
    if not failed:
        return
    for path in sorted(job.folder.glob("fault-*.json")):
        failure = json.loads(path.read_text())
        kind = ContinuableError if failure["continuable"] else UserError
        raise kind.of([Fault(**{**fault, "command": tuple(fault["command"])}) for fault in failure["faults"]])
    if reason := why_not_written(job.folder / "probe", MIB):  # neither do they say it on a disk that is full
        raise reason
    rank, process = failed[0]
    lines = [line.strip() for line in job.log(rank).read_text(errors="replace").splitlines() if line.strip()]
    good = last_checkpoint(job.folder)
    raise ContinuableError(
        f"Process {rank} of recover.processes={job.spec.processes} ended early ({process.describe_exit()})"
        + (f": {' | '.join(_reason(lines))}" if lines else "."),
        todo=f"The same command goes on from {good.name}." if good else "",
    )


def _reason(log: Sequence[str]) -> Sequence[str]:
    """Return the lines that say why a process ended: its last exception, without one its last words."""
    lines = [RANK.sub("", line) for line in log]
    raised = [number for number, line in enumerate(lines) if EXCEPTION.match(line)]
    start = raised[-1] if raised else max(0, len(lines) - LINES)
    return lines[start : start + LINES]


def _replayed(progress: Progress, tasks: ExitStack) -> Callable[[str], None]:
    """Return a function that shows what the first process has written since."""
    rest, advance = "", None

    def show(text: str) -> None:
        nonlocal rest, advance
        *lines, rest = (rest + text).split("\n")
        for event in map(json.loads, lines):
            if "note" in event:
                progress.note(event["note"])
            elif "task" in event:
                advance = tasks.enter_context(progress.task(event["task"], event["total"], event["unit"]))
            elif advance is not None:
                advance(event["advance"])

    return show


class _ProgressFile:
    """Progress as lines of JSON; of all processes, the first writes them."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        self._write({"task": title, "total": total, "unit": unit})
        yield lambda amount: self._write({"advance": amount})

    def note(self, text: str) -> None:
        self._write({"note": text})

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a") as stream:
                stream.write(json.dumps(event) + "\n")


def main(folder: Path) -> None:
    """Train as one of several processes."""
    rank, job = int(os.environ["RANK"]), JOBS.validate_json((folder / JOB).read_bytes())
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        init_method=f"file://{folder / MEETING}",
        rank=rank,
        world_size=job.spec.processes,
    )
    blocks, first = load_file(folder / BLOCKS)["blocks"], rank == 0
    try:
        with muted():
            report = train(job, blocks, _ProgressFile(folder / EVENTS if first else None), rank)
    except UserError as error:
        continuable = isinstance(error, ContinuableError)
        write_json(
            folder / f"fault-{rank}.json",
            {"continuable": continuable, "faults": [asdict(fault) for fault in error.faults]},
        )
        sys.exit(2)
    if first:
        write_json(folder / REPORT, report)
    torch.distributed.destroy_process_group()


# Train a compressed model on text or towards another model, and write it as it was.
#
# `trained_weights` holds the parameters and their forward pass; `training` trains them, in one process or several.
# Weights and Adam's moments are float32.

LEAST_SEQUENCES = 2
PRUNED = tuple(f"{linear}.weight" for linear in LINEARS)


def recover(
    model_dir: Path,
    teacher_dir: Path | None,
    out_dir: Path,
    spec: RecoverySpec,
    texts: Iterable[str],
    *,
    device: str = "auto",
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Train a compressed Hugging Face model to win back what was lost.

    A stopped run goes on from the last evaluation. Of several processes, none is left when this returns.

    Args:
        model_dir: plain Hugging Face folder.
        teacher_dir: folder of the model to learn from; None trains on the texts.
        out_dir: receives a complete Hugging Face folder with files and types as before.
        spec: how to train.
        texts: to train on.
        device: "cpu", "cuda" or "auto".
        progress: shows steps.

    Returns:
        JSON-serializable facts: steps, losses before, during and after, tokens, bytes, and for a sparse model the
        zeros as counted in the written files.

    Raises:
        UserError: the texts are too short, the teacher has another tokenizer, or the model cannot be trained with low
            rank as it is asked for.
        ContinuableError: the loss is not finite, or one of several processes ended early.
    """
    source, device = look_at(model_dir), pick_device(device)
    with muted():
        blocks = _blocks(texts, load_tokenizer(source), spec.recover)
        if teacher_dir is not None:
            _check_teacher(source, look_at(teacher_dir))
        with new_files_removed(out_dir):
            record = _begun(out_dir, source, teacher_dir, spec, blocks, device)
            job = TrainingJob(model_dir, teacher_dir, out_dir, record.folder, spec, device)
            report = (train if spec.processes == 1 else train_in_processes)(job, blocks, progress)
            link_small_files(model_dir, out_dir)
            record.close()
    facts: dict[str, Any] = {
        "method": spec.recover.method,
        "device": device,
        "processes": spec.processes,
        "sequences": len(blocks),
        "tokens": int(blocks.numel()),
        **report,
        "total_bytes": sum((out_dir / path.name).stat().st_size for path in source.weight_files),
    }
    if spec.recover.sharding != "none":
        facts["sharding"] = spec.recover.sharding
    if spec.recover.lora is not None:
        facts["lora"] = spec.recover.lora
    if spec.sparse:
        linears = {name for path in source.weight_files for name in read_header(path) if name.endswith(PRUNED)}
        facts["sparse"] = count_zeros([out_dir / path.name for path in source.weight_files], linears)
    return facts


def _blocks(texts: Iterable[str], tokenizer: Any, recover: RecoverSettings) -> torch.Tensor:
    """Join all texts and cut them into sequences, int64 [N, seq_len]."""
    joined: list[int] = []
    for number, text in enumerate(texts):
        if recover.texts is not None and number >= recover.texts:
            break
        joined += token_ids(tokenizer, text)
    count = len(joined) // recover.seq_len
    if count < LEAST_SEQUENCES:
        raise UserError(
            f"The texts have {len(joined)} tokens, which are fewer than {LEAST_SEQUENCES} sequences of"
            f" recover.seq_len={recover.seq_len}.",
            todo="Give more text (calibration.*), or a smaller recover.seq_len.",
        )
    return torch.tensor(joined[: count * recover.seq_len], dtype=torch.int64).reshape(count, recover.seq_len)


def _check_teacher(source: ModelFolder, teacher: ModelFolder) -> None:
    ours, theirs = (load_tokenizer(each).get_vocab() for each in (source, teacher))
    if ours == theirs and source.shape.vocab_size == teacher.shape.vocab_size:
        return
    word = next((word for word in ours if ours[word] != theirs.get(word)), next(iter(theirs), ""))
    raise UserError(
        f"The teacher in '{teacher.folder}' has another tokenizer: the token {word!r} is {theirs.get(word)} there and"
        f" {ours.get(word)} in '{source.folder}'.",
        todo="Take a teacher of the same family, or recover=finetune.",
    )


def _begun(
    out_dir: Path, source: ModelFolder, teacher: Path | None, spec: RecoverySpec, blocks: torch.Tensor, device: str
) -> ProgressRecord:
    """Return the record whose folder has the Trainer's checkpoints, and is empty unless it is of the same training."""
    peft = [metadata.version("peft")] if spec.recover.lora_rank else []
    identity = {
        "recover": TypeAdapter(RecoverySpec).dump_python(spec, mode="json"),
        "model": stamp(source),
        "teacher": None if teacher is None else stamp(look_at(teacher)),
        "tokens": [list(blocks.shape), int(blocks.sum())],
        "device": device,
        "tools": [torch.__version__, transformers_door.VERSION, *peft],
    }
    record = ProgressRecord(out_dir, identity)
    record.complete(0)
    return record


if __name__ == "__main__":
    main(Path(sys.argv[1]))
