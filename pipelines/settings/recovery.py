"""The group `recover`: training that wins back what compression lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from pipelines.settings.base import Group, Positive, Tokens

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
        batch_size: sequences at once; more takes more memory.
        accumulation: batches per update.
        precision: of the arithmetic; bfloat16 is faster where the processor has it. Weights are kept in float32.
        gradient_checkpointing: compute activations twice and keep few of them; less memory, slower.
        evaluate_every: steps between two looks at the loss on texts that are not trained on; also between two places
            from which a stopped run goes on.
        patience: training ends when so many looks in a row found nothing better; the best weights are kept.
        seed: of the order of the texts.
        teacher: distill: folder of another model with the same tokenizer to learn from; null is the original model.
    """

    TRAINING: ClassVar[tuple[str, ...]] = (
        *("steps", "learning_rate", "seq_len", "batch_size", "accumulation", "evaluate_every", "patience", "seed"),
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

    @property
    def trains(self) -> bool:
        """Whether anything is trained."""
        return self.method != "none"

    @model_validator(mode="after")
    def _goes_together(self) -> RecoverSettings:
        given = {name: getattr(self, name) for name in (*self.TRAINING, "texts", "precision", "teacher")}
        if not self.trains:
            for name, value in {**given, "gradient_checkpointing": self.gradient_checkpointing or None}.items():
                if value is not None:
                    raise ValueError(f"{name}={value} has no effect on recover=none: add recover=distill")
            return self
        for name in self.TRAINING:
            if given[name] is None:
                raise ValueError(f"{name} is null, but recover={self.method} needs it")
        if self.teacher is not None and self.method != "distill":
            raise ValueError(f"teacher='{self.teacher}' has no effect on recover={self.method}: add recover=distill")
        return self
