"""Train a compressed model by Hugging Face's Trainer, on text or towards another model, and write it as it was.

Zeros of 2:4 sparsity stay zeros: they are put back after every update. Where the weights will be rounded when the
engine is built, the linears compute with rounded weights meanwhile. Weights and Adam's moments are float32.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from pipelines.checkpoint.tensors import read_header
from pipelines.compress.loading import ModelFolder, load_model, load_tokenizer, look_at
from pipelines.compress.progress_record import new_files_removed, stamp
from pipelines.compress.quiet import muted, transformers_to_log
from pipelines.compress.simulating import pick_device, seed_everything
from pipelines.compress.sparsegpt import LINEARS
from pipelines.compress.sparsifying import count_zeros, link_small_files
from pipelines.compress.specs import RecoverySpec
from pipelines.compress.weight_files import TensorWriter
from pipelines.compress.weight_rounding import compute_with_rounded_weights
from pipelines.domain.errors import UserError
from pipelines.domain.progress import PARTIAL, Progress
from pipelines.host.files import write_json

HELD_OUT = 20
"""One sequence in so many is not trained on."""
LEAST_SEQUENCES = 2
WARMUP = 0.05
IDENTITY, BEFORE = "recovery.json", "before.json"
"""Files beside the Trainer's checkpoints: what determines the result, and the held-out loss before training."""


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
    seed_everything(spec.seed)
    with muted() as quiet, transformers_to_log():
        loud = quiet.progress(progress)
        blocks = _blocks(texts, load_tokenizer(source), spec)
        model = load_model(source, "float32", device)
        teacher = _teacher(source, teacher_dir, device) if teacher_dir is not None else None
        masks = _masks(model) if spec.sparse else {}
        if spec.rounded is not None:
            compute_with_rounded_weights(model, spec.rounded)
        with new_files_removed(out_dir):
            folder = _work_folder(out_dir, _identity(source, teacher_dir, spec, blocks, device))
            report = _train(model, teacher, masks, blocks, spec, folder, loud)
            _write(model, source, out_dir)
            link_small_files(model_dir, out_dir)
            shutil.rmtree(folder)
    facts: dict[str, Any] = {
        "method": spec.method,
        "device": device,
        "sequences": len(blocks),
        "tokens": int(blocks.numel()),
        **report,
        "total_bytes": sum((out_dir / path.name).stat().st_size for path in source.weight_files),
    }
    if masks:
        facts["sparse"] = count_zeros([out_dir / path.name for path in source.weight_files], set(masks))
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
        joined += tokenizer(text)["input_ids"]
    count = len(joined) // spec.seq_len
    if count < LEAST_SEQUENCES:
        raise UserError(
            f"The texts have {len(joined)} tokens, which are fewer than {LEAST_SEQUENCES} sequences of"
            f" recover.seq_len={spec.seq_len}.",
            todo="Give more text (calibration.*), or a smaller recover.seq_len.",
        )
    return torch.tensor(joined[: count * spec.seq_len], dtype=torch.int64).reshape(count, spec.seq_len)


def _teacher(source: ModelFolder, folder: Path, device: str) -> torch.nn.Module:
    """Load the model to learn from.

    Raises:
        UserError: its tokenizer is another one.
    """
    teacher = look_at(folder)
    ours, theirs = (load_tokenizer(each).get_vocab() for each in (source, teacher))
    if ours != theirs or source.shape.vocab_size != teacher.shape.vocab_size:
        word = next((word for word in ours if ours[word] != theirs.get(word)), next(iter(theirs), ""))
        raise UserError(
            f"The teacher in '{folder}' has another tokenizer: the token {word!r} is {theirs.get(word)} there and"
            f" {ours.get(word)} in '{source.folder}'.",
            todo="Take a teacher of the same family, or recover=finetune.",
        )
    return load_model(teacher, "bfloat16" if device != "cpu" else "float32", device)


def _masks(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return which weights of the layers' linears are not zero, by name."""
    ends = tuple(f"{name}.weight" for name in LINEARS)
    return {name: weight != 0 for name, weight in model.named_parameters() if name.endswith(ends)}


def _identity(
    source: ModelFolder, teacher: Path | None, spec: RecoverySpec, blocks: torch.Tensor, device: str
) -> dict[str, Any]:
    """Return everything that determines the result."""
    return {
        "recover": asdict(spec),
        "model": stamp(source),
        "teacher": None if teacher is None else stamp(look_at(teacher)),
        "tokens": [list(blocks.shape), int(blocks.sum())],
        "device": device,
        "tools": [torch.__version__, transformers.__version__],
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


def _train(
    model: torch.nn.Module,
    teacher: torch.nn.Module | None,
    masks: dict[str, torch.Tensor],
    blocks: torch.Tensor,
    spec: RecoverySpec,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Train, and return steps and losses; the model then has the best weights that were seen."""
    held_out = max(1, len(blocks) // HELD_OUT)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(spec.seed))
    trained, judged = (_rows(blocks[order[part]]) for part in (slice(held_out, None), slice(held_out)))
    model.requires_grad_(True).train()
    every = min(spec.evaluate_every, spec.steps)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=spec.steps,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(WARMUP * spec.steps)),
        per_device_train_batch_size=spec.batch_size,
        per_device_eval_batch_size=spec.batch_size,
        gradient_accumulation_steps=spec.accumulation,
        gradient_checkpointing=spec.gradient_checkpointing,
        bf16=spec.precision == "bfloat16",
        use_cpu=not torch.cuda.is_available() or next(model.parameters()).device.type == "cpu",
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        logging_steps=max(1, every // 5),
        logging_nan_inf_filter=False,
        seed=spec.seed,
        data_seed=spec.seed,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        label_names=["input_ids"],
    )
    begun = sorted(folder.glob("checkpoint-*"), key=_number)
    done = _number(begun[-1]) if begun else 0
    if done:
        progress.note(f"continuing a run that was stopped: {done} of {spec.steps} steps are complete")
    with progress.task("training", spec.steps - done, "steps") as advance:
        trainer = _Recovery(
            model=model,
            args=arguments,
            train_dataset=trained,
            eval_dataset=judged,
            callbacks=[
                _KeepZeros(model, masks),
                _Watch(advance, progress),
                EarlyStoppingCallback(early_stopping_patience=spec.patience),
            ],
        )
        trainer.teacher = teacher
        if not done:
            write_json(folder / BEFORE, trainer.evaluate()["eval_loss"])
        trainer.train(resume_from_checkpoint=str(begun[-1]) if begun else None)
    return _report(trainer.state, json.loads((folder / BEFORE).read_text()))


def _report(state: Any, before: float) -> dict[str, Any]:
    """Return what happened."""
    log = state.log_history
    held_out = [[entry["step"], round(entry["eval_loss"], 6)] for entry in log if "eval_loss" in entry]
    return {
        "steps": state.global_step,
        "best_step": _number(Path(state.best_model_checkpoint)),
        "loss_before": round(before, 6),
        "loss_after": round(state.best_metric, 6),
        "losses": [[entry["step"], round(entry["loss"], 6)] for entry in log if "loss" in entry],
        "held_out_losses": [[0, round(before, 6)], *held_out],
    }


def _number(checkpoint: Path) -> int:
    """Return the step of one of the Trainer's checkpoints."""
    return int(checkpoint.name.rpartition("-")[2])


def _rows(blocks: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row} for row in blocks]


class _Recovery(Trainer):
    """Trains towards the next token, or towards a teacher's predictions."""

    teacher: torch.nn.Module | None = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean over tokens: cross entropy, or the Kullback-Leibler divergence from the teacher."""
        ids = inputs["input_ids"]
        outputs = model(input_ids=ids, use_cache=False)
        logits = outputs.logits.float()
        if self.teacher is None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        else:
            with torch.no_grad():
                wanted = torch.log_softmax(self.teacher(input_ids=ids, use_cache=False).logits.float(), dim=-1)
            own = torch.log_softmax(logits, dim=-1)
            pair = own.flatten(0, 1), wanted.flatten(0, 1)
            loss = torch.nn.functional.kl_div(*pair, reduction="batchmean", log_target=True)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the loss alone: logits of all tokens would be gathered otherwise."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None


class _KeepZeros(TrainerCallback):
    """Puts the zeros of a sparse model back after every update."""

    def __init__(self, model: torch.nn.Module, masks: dict[str, torch.Tensor]) -> None:
        weights = dict(model.named_parameters())
        self._pairs = [(weights[name], mask) for name, mask in masks.items()]

    def on_optimizer_step(self, *_given: Any, **_named: Any) -> None:
        """Multiply by the mask."""
        with torch.no_grad():
            for weight, mask in self._pairs:
                weight.mul_(mask)


class _Watch(TrainerCallback):
    """Shows progress, and stops where the loss is no number."""

    def __init__(self, advance: Callable[[float], None], progress: Progress) -> None:
        self._advance, self._progress = advance, progress

    def on_step_end(self, *_given: Any, **_named: Any) -> None:
        """Count a step."""
        self._advance(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_named: Any) -> None:
        """Look at the loss.

        Raises:
            UserError: it is NaN or infinite.
        """
        logs = logs or {}
        loss = logs.get("loss", logs.get("eval_loss"))
        if loss is not None and not math.isfinite(loss):
            rate = logs.get("learning_rate", args.learning_rate)
            raise UserError(
                f"The loss is {loss} at step {state.global_step}, with a learning rate of {rate:.2g}.",
                todo=f"Take a smaller recover.learning_rate than {args.learning_rate:g}, or recover.precision=float32.",
            )
        if "eval_loss" in logs and state.global_step:
            self._progress.note(f"step {state.global_step}: loss {loss:.4g} on texts that are not trained on")


def _write(model: torch.nn.Module, source: ModelFolder, out_dir: Path) -> None:
    """Write the weights into files of the same names, tensors and types as before."""
    trained = model.state_dict()
    for path in source.weight_files:
        header = read_header(path)
        with safe_open(path, framework="pt") as shard:
            layout = {name: (info.dtype, info.shape) for name, info in header.items()}
            TensorWriter.create(out_dir, {path.name: layout}, shard.metadata())
            writer = TensorWriter(out_dir, [path.name])
            for name in header:
                stored = shard.get_tensor(name)
                weight = trained[name].detach().to("cpu", stored.dtype) if name in trained else stored
                writer.write(path.name, name, _one(weight))
            writer.sync()


def _one(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    yield weight.contiguous()
