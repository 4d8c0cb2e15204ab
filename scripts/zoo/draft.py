"""Train the draft models: small models that guess the next tokens of the bundled models.

Speculative decoding keeps a guess if it equals the target's own token, so the draft learns from the target itself: from
its distribution after every token of the world's documents (Hinton et al., "Distilling the Knowledge in a Neural
Network", 2015) and, half of the time, of texts that the target has continued greedily on its own.

Shapes: B rows, T tokens, V vocabulary.
"""

# ruff: noqa: N806, N812, N815 (shape suffixes, and torch's own name for its functions)
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from scripts.zoo.documents import Writer
from scripts.zoo.train import Encoder, Recipe, Stage, advance, draw_documents, learning_rate_at, optimizer_of

LOG = logging.getLogger(__name__)

# Mostly statements and answers in words, because no model of this size can guess the letter of an answer.
DRAFT_RECIPE = Recipe(
    stages=(Stage("distil", steps=2400, rows=16, asked=3, shares=(0.5, 0.4, 0.1)),),
    learning_rate=3e-3,
    seed=20261121,
)
_TEXTS, _TEXT_TOKENS, _FEWEST_PROMPT_TOKENS, _MOST_PROMPT_TOKENS = 768, 96, 6, 40


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows and a mask of their real tokens, both [B, T]."""

    tokens_BT: Tensor
    real_BT: Tensor


def document_rows(writer: Writer, encoder: Encoder, stage: Stage) -> Rows:
    """Write one batch of documents."""
    batch = encoder.batch(draw_documents(writer, stage))
    real_BT = batch.weights_BT > 0
    real_BT[:, 0] = True  # BOS, which has no loss weight
    return Rows(batch.tokens_BT, real_BT)


@torch.no_grad()
def continued(target: PreTrainedModel, prompts: Rows, tokens: int, new_tokens: int) -> Rows:
    """Let the target continue the first ``tokens`` of each row, greedily, until EOS or ``new_tokens``."""
    config = target.config
    long_enough = prompts.real_BT.sum(1) > tokens
    start_BT = prompts.tokens_BT[long_enough, :tokens]
    text_BT = target.generate(  # type: ignore[operator]
        start_BT,
        attention_mask=torch.ones_like(start_BT),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    ended_BT = torch.cumsum(text_BT == config.eos_token_id, 1) - (text_BT == config.eos_token_id).long() > 0
    return Rows(text_BT, ~ended_BT)


def own_texts(target: PreTrainedModel, writer: Writer, encoder: Encoder, stage: Stage, count: int) -> list[Rows]:
    """Return at least ``count`` texts, in batches, that begin like a document and are continued by the target."""
    lengths, written, batches = random.Random(writer.rng.random()), 0, list[Rows]()
    wide = Stage(stage.name, stage.steps, 64, stage.asked, stage.shares)
    while written < count:
        prompt_tokens = lengths.randint(_FEWEST_PROMPT_TOKENS, _MOST_PROMPT_TOKENS)
        batches.append(continued(target, document_rows(writer, encoder, wide), prompt_tokens, _TEXT_TOKENS))
        written += len(batches[-1].tokens_BT)
    return batches


def distillation_loss(draft: PreTrainedModel, target: PreTrainedModel, rows: Rows) -> Tensor:
    """Return the mean over real tokens of KL(target || draft)."""
    with torch.no_grad():
        wanted_BTV = F.log_softmax(target(input_ids=rows.tokens_BT).logits.float(), -1)
    given_BTV = F.log_softmax(draft(input_ids=rows.tokens_BT).logits.float(), -1)
    losses_BT = F.kl_div(given_BTV, wanted_BTV, reduction="none", log_target=True).sum(-1)
    loss: Tensor = losses_BT[rows.real_BT].mean()
    return loss


@torch.no_grad()
def agreement(draft: nn.Module, target: PreTrainedModel, texts: Sequence[Rows]) -> float:
    """Return the share of positions at which the draft's most likely token is the target's."""
    same = total = 0
    for rows in texts:
        wanted_BT = target(input_ids=rows.tokens_BT).logits.argmax(-1)
        given_BT = draft(input_ids=rows.tokens_BT).logits.argmax(-1)
        same += int((wanted_BT == given_BT)[rows.real_BT].sum())
        total += int(rows.real_BT.sum())
    return same / total


def distil(
    draft: PreTrainedModel, target: PreTrainedModel, encoder: Encoder, writer: Writer, recipe: Recipe = DRAFT_RECIPE
) -> list[Rows]:
    """Train the draft in place.

    Returns:
        texts that the target has continued and that were not trained on, for measurements.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    stage = recipe.stages[0]
    unseen = own_texts(target, writer, encoder, stage, 64)
    texts = own_texts(target, writer, encoder, stage, _TEXTS)
    LOG.info("the target has continued %d texts", sum(len(rows.tokens_BT) for rows in texts))
    optimizer, started = optimizer_of([draft], recipe), time.monotonic()
    for step in range(1, recipe.steps + 1):
        rows = document_rows(writer, encoder, stage) if step % 2 else _some(writer.rng.choice(texts), stage.rows)
        loss = distillation_loss(draft, target, rows)
        advance(optimizer, loss, [draft], learning_rate_at(step - 1, recipe))
        if step % recipe.report_every == 0:
            share, minutes = agreement(draft, target, unseen), (time.monotonic() - started) / 60
            LOG.info(
                "step %d/%d loss %.3f agreement %.3f after %.1f min", step, recipe.steps, loss.detach(), share, minutes
            )
    return unseen


def _some(rows: Rows, count: int) -> Rows:
    chosen = torch.randperm(len(rows.tokens_BT))[:count]
    return Rows(rows.tokens_BT[chosen], rows.real_BT[chosen])
