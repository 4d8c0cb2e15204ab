"""The training itself, by Hugging Face's Trainer, in this process or as one of several that share each batch.

Sequences are visited in an order that is fixed beforehand, and each batch is split evenly, so that several processes
see what one process would see; only the order in which gradients are added up differs.
"""

import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler

# isort: split
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from pipelines.compress.calibration import seed_everything
from pipelines.compress.config import RecoverSettings
from pipelines.compress.contexts import gpu_memory_named
from pipelines.compress.loading import load_model
from pipelines.compress.model_folder import ModelFolder, look_at
from pipelines.compress.sharding import (
    empty_model,
    load_moments,
    load_sharded,
    load_weights,
    save_moments,
    save_weights,
)
from pipelines.compress.specs import RecoverySpec
from pipelines.compress.trained_weights import TrainedWeights, help_to_write, write_like
from pipelines.domain.errors import ContinuableError
from pipelines.domain.progress import Progress
from pipelines.host.disk import why_not_written

HELD_OUT = 20
"""One sequence in so many is not trained on."""
WARMUP = 0.05
SCHEDULER = "scheduler.pt"
STATE = "trainer_state.json"
"""What the Trainer writes last into a checkpoint."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What to train.

    Attributes:
        model_dir: plain Hugging Face folder.
        teacher_dir: folder of the model to learn from; None trains on the texts.
        folder: of the Trainer's checkpoints.
        device: "cpu" or "cuda".
    """

    model_dir: Path
    teacher_dir: Path | None
    out_dir: Path
    folder: Path
    spec: RecoverySpec
    device: str

    def log(self, rank: int) -> Path:
        """Return the log of one of several processes."""
        return self.folder / f"process-{rank}.log"


def train(job: TrainingJob, blocks: torch.Tensor, progress: Progress, rank: int = 0) -> dict[str, Any]:
    """Train on sequences [N, seq_len], let the first process write the weights, and return steps and losses."""
    spec, recover, source = job.spec, job.spec.recover, look_at(job.model_dir)
    _forget_accelerates_environment()
    seed_everything(recover.seed)
    device = f"cuda:{rank}" if job.device == "cuda" and spec.processes > 1 else job.device
    with gpu_memory_named("training", _smaller(recover)):
        weights, teacher = _untrained(source, spec, device), None
        if job.teacher_dir is not None:
            load = load_sharded if recover.sharding == "full" else load_model
            teacher = load(look_at(job.teacher_dir), "bfloat16" if job.device != "cpu" else "float32", device)
        report = _train(job, weights, teacher, blocks, progress)
        if report["best_step"] == 0:
            progress.note("training found nothing better than the weights from before it, which are kept")
            del weights, teacher
            gc.collect()  # the trainer's cycles hold two more models
            weights = _untrained(source, spec, device)
    if rank == 0:
        write_like(weights.finished(), source, job.out_dir)
    else:
        help_to_write(weights.finished(), source)
    return report


def _untrained(source: ModelFolder, spec: RecoverySpec, device: str) -> TrainedWeights:
    if spec.recover.sharding == "none":
        return TrainedWeights(load_model(source, "float32", device), source, spec)
    weights = TrainedWeights(empty_model(source, "float32"), source, spec)
    weights.shard(device)
    return weights


def _smaller(recover: RecoverSettings) -> str:
    """Return what would take less memory, of the settings that do not have that value."""
    could = {
        "recover.batch_size=1": recover.batch_size > 1,
        "recover.gradient_checkpointing=true": not recover.gradient_checkpointing,
        "recover.lora_rank=16": recover.lora_rank is None,
    }
    settings = [setting for setting, helps in could.items() if helps]
    return f"set {' or '.join(settings)}" if settings else "train a smaller model"


def _forget_accelerates_environment() -> None:
    """Remove Accelerate's environment variables, which override settings left at their defaults.

    Transformers 4 sets `ACCELERATE_MIXED_PRECISION` itself: after a training in bfloat16, the next one in the same
    process was narrowed as well.
    """
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def _train(
    job: TrainingJob,
    weights: TrainedWeights,
    teacher: torch.nn.Module | None,
    blocks: torch.Tensor,
    progress: Progress,
) -> dict[str, Any]:
    """Train; the model then has the best weights that were seen, unless these are from before training."""
    recover, folder = job.spec.recover, job.folder
    held_out = max(1, len(blocks) // HELD_OUT)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(recover.seed))
    rows = [{"input_ids": row} for row in blocks[order]]
    begun = last_checkpoint(folder)
    done = _number(begun) if begun else 0
    if done:
        progress.note(f"continuing a run that was stopped: {done} of {recover.steps} steps are complete")
    with progress.task("training", recover.steps - done, "steps") as advance:
        trainer = (_Sharded if recover.sharding == "full" else _Recovery)(
            model=weights.model.train(),
            args=_arguments(job, from_start=begun is None),
            train_dataset=_visited(rows[held_out:], recover),
            eval_dataset=rows[:held_out],
            # over the held-out sequences of all processes
            compute_metrics=lambda losses: {"loss": float(np.mean(losses.predictions, dtype="float64"))},
            callbacks=[_KeepZeros(weights), _Watch(advance, progress, recover, folder)],
        )
        trainer.teacher = teacher
        if begun and _is_complete(state := TrainerState.load_from_json(str(begun / STATE)), recover):
            trainer.state = state
        else:
            try:
                trainer.train(resume_from_checkpoint=str(begun) if begun else None)
            except RuntimeError as error:
                size = 2 * sum(each.nbytes for each in weights.model.parameters())  # of the moments
                # torch.save does not say why it could not write
                if "inline_container" in str(error) and (reason := why_not_written(folder / "probe", size)):
                    raise reason from error
                raise
    best = _best(_evaluations(trainer.state))
    if best:
        weights.load(folder / f"checkpoint-{best}")
    return _report(trainer.state, best)


def _arguments(job: TrainingJob, *, from_start: bool) -> TrainingArguments:
    """Return the Trainer's settings; sequences of a batch are shared by all processes.

    The loss before training is found by `eval_on_start`, because a call of `evaluate` before `train` prepares the model
    in such a way that several processes no longer share their gradients.
    """
    recover = job.spec.recover
    every, share = min(recover.evaluate_every, recover.steps), recover.batch_size // job.spec.processes
    arguments = TrainingArguments(
        output_dir=str(job.folder),
        max_steps=recover.steps,
        learning_rate=recover.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(WARMUP * recover.steps)),
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        gradient_accumulation_steps=recover.accumulation,
        gradient_checkpointing=recover.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},  # the other way needs inputs that are trained
        bf16=recover.precision == "bfloat16",
        use_cpu=job.device == "cpu",
        ddp_find_unused_parameters=False,
        eval_on_start=from_start,
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=2,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        logging_steps=max(1, every // 5),
        logging_nan_inf_filter=False,
        seed=recover.seed,
        data_seed=recover.seed,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        label_names=["input_ids"],
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # the Trainer would split over all that one process sees, unasked
    return arguments


def _visited(rows: Sequence[dict[str, torch.Tensor]], recover: RecoverSettings) -> list[dict[str, torch.Tensor]]:
    """Return the sequences of all steps in the order in which they are trained on: all of them shuffled, then again."""
    needed = recover.steps * recover.batch_size * recover.accumulation
    generator = torch.Generator().manual_seed(recover.seed)
    rounds = [torch.randperm(len(rows), generator=generator) for _ in range(-(-needed // len(rows)))]
    return [rows[number] for number in torch.cat(rounds)[:needed].tolist()]


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest of the Trainer's checkpoints that is complete."""
    complete = [path.parent for path in folder.glob(f"checkpoint-*/{STATE}")]
    return max(complete, key=_number, default=None)


def _number(checkpoint: Path) -> int:
    """Return the step of one of the Trainer's checkpoints."""
    return int(checkpoint.name.rpartition("-")[2])


def _evaluations(state: Any) -> list[tuple[int, float]]:
    """Return the steps and held-out losses; the first is from before training."""
    return [(entry["step"], entry["eval_loss"]) for entry in state.log_history if "eval_loss" in entry]


def _best(evaluations: Sequence[tuple[int, float]]) -> int:
    """Return the step of the lowest held-out loss, the first of equals."""
    return min(evaluations, key=lambda each: each[1])[0]


def _is_complete(state: Any, recover: RecoverSettings) -> bool:
    """Return whether all steps are done, or so many evaluations in a row found nothing better.

    The Trainer's own callback counts in memory, and would begin to count again when a stopped run goes on.
    """
    trained = _evaluations(state)[1:]
    since = [step for step, _ in trained if step > _best(trained)]
    return state.global_step >= recover.steps or len(since) >= recover.patience


def _report(state: Any, best: int) -> dict[str, Any]:
    held_out = {step: round(loss, 6) for step, loss in _evaluations(state)}
    return {
        "steps": state.global_step,
        "best_step": best,
        "loss_before": held_out[0],
        "loss_after": held_out[best],
        "losses": [[entry["step"], round(entry["loss"], 6)] for entry in state.log_history if "loss" in entry],
        "held_out_losses": [list(each) for each in held_out.items()],
    }


class _Recovery(Trainer):  # type: ignore[misc]
    """Trains towards the next token, or towards a teacher's predictions."""

    teacher: torch.nn.Module | None = None

    def _get_train_sampler(self, *_arguments: Any) -> Any:
        """Take the sequences in the order in which they are given."""
        return SequentialSampler(self.train_dataset)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state, then wait for all processes before the checkpoint is marked complete."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean over all tokens."""
        return self._losses(model, inputs["input_ids"]).mean()

    def _losses(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean of each sequence: cross entropy, or the Kullback-Leibler divergence from the teacher."""
        logits = model(input_ids=ids, use_cache=False).logits.float()
        if self.teacher is None:
            each = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
            return each.mean(dim=1)
        with torch.no_grad():
            target = torch.log_softmax(self.teacher(input_ids=ids, use_cache=False).logits.float(), dim=-1)
        own = torch.log_softmax(logits, dim=-1)
        divergence = torch.nn.functional.kl_div(own, target, reduction="none", log_target=True)
        return divergence.sum(dim=-1).mean(dim=1)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the losses of sequences in place of logits, which would be gathered from all processes."""
        with torch.no_grad():
            losses = self._losses(model, self._prepare_inputs(inputs)["input_ids"]).detach()
        return None, losses, losses


class _Sharded(_Recovery):
    """Trains a model that is sharded already; each process saves and reads its part of weights and moments."""

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Keep accelerate from wrapping the model for processes that each have all of it."""
        super().__init__(*arguments, **named)
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = partial(prepare, evaluation_mode=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        save_weights(self.model, Path(output_dir or str(self.args.output_dir)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.model, Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_moments(self.model, self.optimizer.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_moments(self.model, self.optimizer.optimizer, Path(checkpoint))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))


class _KeepZeros(TrainerCallback):  # type: ignore[misc]
    """Puts the zeros of a sparse model back after every update of its weights."""

    def __init__(self, weights: TrainedWeights) -> None:
        self._pairs = weights.zeros()

    def on_optimizer_step(self, *_arguments: Any, **_named: Any) -> None:
        with torch.no_grad():
            for weight, mask in self._pairs:
                weight.mul_(mask)


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Shows progress, and ends training that gets no better or whose loss is no number."""

    def __init__(
        self, advance: Callable[[float], None], progress: Progress, recover: RecoverSettings, folder: Path
    ) -> None:
        self._advance, self._progress, self._recover, self._folder = advance, progress, recover, folder

    def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
        self._advance(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_named: Any) -> None:
        if state.global_step and _is_complete(state, self._recover):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_named: Any) -> None:
        logs = logs or {}
        loss = logs.get("loss", logs.get("eval_loss"))
        if loss is not None and not math.isfinite(loss):
            rate = logs.get("learning_rate", args.learning_rate)
            good = last_checkpoint(self._folder)
            raise ContinuableError(
                f"The loss is {loss} at step {state.global_step}, with a learning rate of {rate:.2g}.",
                allowed=f"The weights of step {_number(good)} are kept in {good}." if good else "",
                todo=f"Take a smaller recover.learning_rate than {args.learning_rate:g}, or recover.precision=float32.",
            )
        if "eval_loss" in logs and state.global_step:
            self._progress.note(f"step {state.global_step}: loss {loss:.4g} on texts that are not trained on")
