"""Train a compressed model on text or towards another model, and write it as it was.

What is trained, and what the forward pass sees of it: `trained_weights`. The training: `training`, in this process, or
in several of `training_processes`. Weights and Adam's moments are float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pipelines.checkpoint.tensors import read_header
from pipelines.compress import transformers_door
from pipelines.compress.loading import load_tokenizer
from pipelines.compress.model_folder import ModelFolder, look_at, pick_device
from pipelines.compress.progress_record import new_files_removed, stamp
from pipelines.compress.quiet import muted, transformers_to_log
from pipelines.compress.sparsegpt import LINEARS
from pipelines.compress.sparsifying import count_zeros, link_small_files
from pipelines.compress.specs import RecoverySpec
from pipelines.compress.texts import token_ids
from pipelines.compress.training import TrainingJob, train
from pipelines.compress.training_processes import train_in_processes
from pipelines.domain.errors import UserError
from pipelines.domain.progress import PARTIAL, Progress
from pipelines.host.files import write_json

LEAST_SEQUENCES = 2
IDENTITY = "recovery.json"
"""What determines the result, beside the Trainer's checkpoints."""


def run_recover(
    model_dir: Path,
    teacher_dir: Path | None,
    out_dir: Path,
    spec: RecoverySpec,
    texts: Iterable[str],
    *,
    device: str,
    progress: Progress,
) -> dict[str, Any]:
    """See `pipelines.compress.api.recover`."""
    source, device = look_at(model_dir), pick_device(device)
    with muted(), transformers_to_log():
        blocks = _blocks(texts, load_tokenizer(source), spec)
        if teacher_dir is not None:
            _check_teacher(source, look_at(teacher_dir))
        with new_files_removed(out_dir):
            folder = _work_folder(out_dir, _identity(source, teacher_dir, spec, blocks, device))
            job = TrainingJob(model_dir, teacher_dir, out_dir, folder, spec, device)
            report = (train if spec.processes == 1 else train_in_processes)(job, blocks, progress)
            link_small_files(model_dir, out_dir)
            shutil.rmtree(folder)
    facts: dict[str, Any] = {
        "method": spec.method,
        "device": device,
        "processes": spec.processes,
        "sequences": len(blocks),
        "tokens": int(blocks.numel()),
        **report,
        "total_bytes": sum((out_dir / path.name).stat().st_size for path in source.weight_files),
    }
    if spec.sharding != "none":
        facts["sharding"] = spec.sharding
    if spec.lora is not None:
        facts["lora"] = asdict(spec.lora)
    if spec.sparse:
        facts["sparse"] = count_zeros([out_dir / path.name for path in source.weight_files], _linears(source))
    return facts


def _blocks(texts: Iterable[str], tokenizer: Any, spec: RecoverySpec) -> torch.Tensor:
    """Join all texts and cut them into sequences, int64 [N, seq_len].

    Raises:
        UserError: the texts are too short for two sequences.
    """
    joined: list[int] = []
    for number, text in enumerate(texts):
        if spec.texts is not None and number >= spec.texts:
            break
        joined += token_ids(tokenizer, text)
    count = len(joined) // spec.seq_len
    if count < LEAST_SEQUENCES:
        raise UserError(
            f"The texts have {len(joined)} tokens, which are fewer than {LEAST_SEQUENCES} sequences of"
            f" recover.seq_len={spec.seq_len}.",
            todo="Give more text (calibration.*), or a smaller recover.seq_len.",
        )
    return torch.tensor(joined[: count * spec.seq_len], dtype=torch.int64).reshape(count, spec.seq_len)


def _check_teacher(source: ModelFolder, teacher: ModelFolder) -> None:
    """Compare the tokenizers.

    Raises:
        UserError: that of the teacher is another one.
    """
    ours, theirs = (load_tokenizer(each).get_vocab() for each in (source, teacher))
    if ours == theirs and source.shape.vocab_size == teacher.shape.vocab_size:
        return
    word = next((word for word in ours if ours[word] != theirs.get(word)), next(iter(theirs), ""))
    raise UserError(
        f"The teacher in '{teacher.folder}' has another tokenizer: the token {word!r} is {theirs.get(word)} there and"
        f" {ours.get(word)} in '{source.folder}'.",
        todo="Take a teacher of the same family, or recover=finetune.",
    )


def _linears(source: ModelFolder) -> set[str]:
    """Return the names of the weights of the layers' linears."""
    names = {name for path in source.weight_files for name in read_header(path)}
    return {name for name in names if name.endswith(tuple(f"{linear}.weight" for linear in LINEARS))}


def _identity(
    source: ModelFolder, teacher: Path | None, spec: RecoverySpec, blocks: torch.Tensor, device: str
) -> dict[str, Any]:
    """Return everything that determines the result."""
    tools = [torch.__version__, transformers_door.VERSION, *([metadata.version("peft")] if spec.lora else [])]
    return {
        "recover": asdict(spec),
        "model": stamp(source),
        "teacher": None if teacher is None else stamp(look_at(teacher)),
        "tokens": [list(blocks.shape), int(blocks.sum())],
        "device": device,
        "tools": tools,
    }


def _work_folder(out_dir: Path, identity: dict[str, Any]) -> Path:
    """Return the folder of the Trainer's checkpoints, empty unless it is of the same training."""
    folder, wanted = out_dir / PARTIAL, json.loads(json.dumps(identity, default=str))
    try:
        same = json.loads((folder / IDENTITY).read_text()) == wanted
    except (OSError, ValueError):
        same = False
    if not same:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / IDENTITY, wanted)
    return folder
