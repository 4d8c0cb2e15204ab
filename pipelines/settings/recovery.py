"""The group `recover`: training that wins back what compression lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from pipelines.settings.base import Group, Positive, Ranks, Tokens

Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear of a decoder layer, by its Hugging Face name."""
Rate = Annotated[float, Field(gt=0, le=1)]


class RecoverSettings(Group):
    """Training between sparsifying and quantizing.

    It reads the texts of the group `calibration` (source, path, dataset, split, column), all of them or `texts`.

    Attributes:
        method: finetune predicts the next token of the texts, distill what the original model predicts; none trains
            nothing.
        texts: how many texts to read; null is all.
        steps: updates of the weights.
        learning_rate: the highest; it rises for a twentieth of the steps and then falls as a cosine.
        seq_len: tokens of a sequence; texts are joined and cut.
        batch_size: sequences at once, in all processes together; more takes more memory.
        accumulation: batches per update.
        precision: of the arithmetic; bfloat16 is faster where the processor has it. Weights are kept in float32.
        gradient_checkpointing: compute activations twice and keep few of them; less memory, slower.
        evaluate_every: steps between two looks at the loss on texts that are not trained on; also between two places
            from which a stopped run goes on.
        patience: training ends when so many looks in a row found nothing better; the best weights are kept.
        seed: of the order of the texts.
        teacher: distill: folder of another model with the same tokenizer to learn from; null is the original model.
        lora_rank: train matrices of this rank beside the weights, and add them to the weights at the end; null trains
            all weights.
        lora_alpha: scale of what is added, as a multiple of 1 / rank; null is twice the rank.
        lora_targets: linears of each layer that get such matrices; null is all.
        processes: that share each batch; null is one on a CPU, and on GPUs as many as divide the batch.
        sharding: what each of several processes holds: none is the whole model, full a part of every weight, gradient
            and moment (FSDP), for models that do not fit one GPU.
    """

    TRAINING: ClassVar[tuple[str, ...]] = (
        *("steps", "learning_rate", "seq_len", "batch_size", "accumulation", "evaluate_every", "patience", "seed"),
    )
    OPTIONAL: ClassVar[tuple[str, ...]] = (
        *("texts", "precision", "teacher", "lora_rank", "lora_alpha", "lora_targets", "processes"),
    )

    method: Literal["none", "finetune", "distill"] = "none"
    texts: Positive | None = None
    steps: Positive | None = None
    learning_rate: Rate | None = None
    seq_len: Tokens | None = None
    batch_size: Positive | None = None
    accumulation: Positive | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    gradient_checkpointing: bool = False
    evaluate_every: Positive | None = None
    patience: Positive | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    teacher: Path | None = None
    lora_rank: Positive | None = None
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    lora_targets: tuple[Linear, ...] | None = None
    processes: Ranks | None = None
    sharding: Literal["none", "full"] = "none"

    @property
    def trains(self) -> bool:
        """Whether anything is trained."""
        return self.method != "none"

    @property
    def word(self) -> str:
        """What is trained, as part of a variant's name: "distill", or "finetune_lora_16"."""
        return self.method if self.lora_rank is None else f"{self.method}_lora_{self.lora_rank}"

    @property
    def alpha(self) -> float | None:
        """Scale of low-rank training, given or usual; None if all weights are trained."""
        return self.lora_alpha or (None if self.lora_rank is None else 2.0 * self.lora_rank)

    @property
    def targets(self) -> tuple[Linear, ...]:
        """Linears of low-rank training, each once."""
        wanted = self.lora_targets or get_args(Linear)
        return tuple(name for name in get_args(Linear) if name in wanted)

    def sharing(self, gpus: int) -> int:
        """Return how many processes train on a machine with so many GPUs that are trained on."""
        if self.processes is not None:
            return self.processes
        batch = self.batch_size or 1
        return max(number for number in range(1, max(1, gpus) + 1) if batch % number == 0)

    @model_validator(mode="after")
    def _low_rank(self) -> RecoverSettings:
        for name, value in {"lora_alpha": self.lora_alpha, "lora_targets": self.lora_targets}.items():
            if value is not None and self.trains and self.lora_rank is None:
                shown = f"[{','.join(value)}]" if isinstance(value, tuple) else value
                raise ValueError(f"{name}={shown} has no effect without low rank: add recover.lora_rank=16")
        if self.lora_targets == ():
            raise ValueError("lora_targets=[] leaves nothing to train: give at least one, or null for all")
        return self

    @model_validator(mode="after")
    def _shares(self) -> RecoverSettings:
        if self.batch_size is not None and self.batch_size % (self.processes or 1):
            raise ValueError(
                f"processes={self.processes} cannot share batch_size={self.batch_size} evenly: give a divisor of it"
            )
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> RecoverSettings:
        given = {name: getattr(self, name) for name in (*self.TRAINING, *self.OPTIONAL)}
        if not self.trains:
            given["gradient_checkpointing"] = self.gradient_checkpointing or None
            given["sharding"] = None if self.sharding == "none" else self.sharding
            for name, value in given.items():
                if value is not None:
                    raise ValueError(f"{name}={value} has no effect on recover=none: add recover=distill")
            return self
        for name in self.TRAINING:
            if given[name] is None:
                raise ValueError(f"{name} is null, but recover={self.method} needs it")
        if self.teacher is not None and self.method != "distill":
            raise ValueError(f"teacher='{self.teacher}' has no effect on recover={self.method}: add recover=distill")
        return self
