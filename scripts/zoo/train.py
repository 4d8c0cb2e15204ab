"""Train one tiny model on the world: short documents first, then full six-question quizzes."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

from scripts.zoo.documents import Document, Writer
from scripts.zoo.quiz import Splits
from scripts.zoo.scoring import accuracy, score
from scripts.zoo.supervision import NOT_MARKED, Batch, Supervisor

LOG = logging.getLogger(__name__)
# Names cannot be predicted; a small weight still teaches the format without drowning the answers.
_TEXT_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of training on one mix of documents.

    ``shares`` are the shares of (passage, open quiz, quiz); ``asked`` is the number of questions in
    one quiz, and the other documents have about the same length.
    """

    name: str
    steps: int
    rows: int
    asked: int
    shares: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train: the stages, the peak learning rate and the seed."""

    stages: tuple[Stage, ...]
    learning_rate: float
    seed: int
    weight_decay: float = 0.02
    warmup_steps: int = 100
    report_every: int = 100

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of all stages together."""
        return sum(stage.steps for stage in self.stages)

    def schedule(self) -> Iterator[Stage]:
        """Yield the stage of every step in turn."""
        for stage in self.stages:
            yield from repeat(stage, stage.steps)


class Encoder:
    """Turns documents into token rows; segments repeat, so each is encoded only once."""

    def __init__(self, tokenizer: Tokenizer, *, bos: int | None, eos: int) -> None:
        self._tokenizer, self._bos, self._eos = tokenizer, bos, eos
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a segment."""
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._known[text]

    def row(self, document: Document) -> list[tuple[int, float, int, int, int]]:
        """Return (token, loss weight, recall, right, option) for each token; EOS, and BOS if there is one, too."""
        unmarked = (NOT_MARKED, NOT_MARKED, NOT_MARKED)
        row: list[tuple[int, float, int, int, int]] = []
        if self._bos is not None:
            row.append((self._bos, 0.0, *unmarked))
        for segment in document:
            ids = self.ids(segment.text)
            weight = 1.0 if segment.is_answer else _TEXT_WEIGHT
            row += [(token, weight, *unmarked) for token in ids[:-1]]
            recall = self.ids(f" {segment.recalls}")[0] if segment.recalls else NOT_MARKED
            right = int(segment.is_right) if segment.option != NOT_MARKED else NOT_MARKED
            row.append((ids[-1], weight, recall, right, segment.option))
        return [*row, (self._eos, _TEXT_WEIGHT, *unmarked)]

    def batch(self, documents: Sequence[Document]) -> Batch:
        """Return the documents as one batch, padded on the right with weight 0."""
        rows = [self.row(document) for document in documents]
        width = max(len(row) for row in rows)
        padding = (self._eos, 0.0, NOT_MARKED, NOT_MARKED, NOT_MARKED)
        padded = [row + [padding] * (width - len(row)) for row in rows]
        tokens, weights, *marks = (torch.tensor([[cell[i] for cell in row] for row in padded]) for i in range(5))
        return Batch(tokens, weights, *marks)


def draw_documents(writer: Writer, stage: Stage) -> list[Document]:
    """Write one batch of documents of about equal length (a quiz question is ~26 tokens)."""
    makers: tuple[Callable[[], Document], ...] = (
        lambda: writer.passage(3 * stage.asked + 1),
        lambda: writer.open_quiz(2 * stage.asked + 1),
        lambda: writer.quiz(stage.asked),
    )
    return [make() for make in writer.rng.choices(makers, weights=stage.shares, k=stage.rows)]


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Return the learning rate: linear warm-up, then half a cosine down to 2 % of the peak."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.learning_rate * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * done)))


def optimizer_of(modules: Sequence[nn.Module], recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW over all parameters, with weight decay only for matrices."""
    parameters = [p for module in modules for p in module.parameters()]
    decay = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay}
    no_decay = {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([decay, no_decay], lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


@dataclass(frozen=True, slots=True)
class Trainee:
    """The parts of a training run: the model, its tokenizer and the writer of its documents."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    encoder: Encoder
    writer: Writer


def advance(optimizer: torch.optim.Optimizer, loss: torch.Tensor, modules: Sequence[nn.Module], rate: float) -> None:
    """Take one step at a learning rate; the gradients of each of these modules are clipped.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    if not math.isfinite(float(loss.detach())):
        raise FloatingPointError(f"loss is {float(loss.detach())}; lower the learning rate")
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    for module in modules:
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


def train(trainee: Trainee, recipe: Recipe, splits: Sequence[Splits]) -> None:
    """Train the model in place; log loss and validation accuracy from time to time.

    Raises:
        FloatingPointError: when the loss is not finite.
    """
    supervisor = Supervisor(trainee.model.config.hidden_size)
    optimizer = optimizer_of([trainee.model, supervisor], recipe)
    started = time.monotonic()
    for step, stage in enumerate(recipe.schedule(), start=1):
        loss = supervisor(trainee.model, trainee.encoder.batch(draw_documents(trainee.writer, stage)))
        advance(optimizer, loss, [trainee.model], learning_rate_at(step - 1, recipe))
        if step % recipe.report_every == 0 or step == recipe.steps:
            share, _ = accuracy(score(trainee.model, trainee.tokenizer, splits, "validation"))
            minutes = (time.monotonic() - started) / 60
            progress = f"{stage.name} step {step}/{recipe.steps}"
            LOG.info("%s loss %.3f validation %.3f after %.1f min", progress, loss.detach(), share, minutes)
