"""Auxiliary losses that exist only during training; nothing of them is saved.

With the answer letter as the only signal, a model this small stays at 25 % for thousands of steps:
it has to learn three things at once before the letter carries any signal. Each gets its own signal:

1. recall: after the question, half-way up the layers, the model has the answer in mind (as its own
   embedding);
2. match: one layer before the top, each option knows whether it is the answer, and its letter;
3. the letter after ``Answer:``, which then needs only one look back (the ordinary next-token loss).

Shapes: B rows, T tokens, N marked tokens, D hidden size, V vocabulary.
"""

# ruff: noqa: N803, N806, N812, N815 (shape suffixes, and torch's own name for its functions)
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from scripts.zoo.quiz import LETTERS

NOT_MARKED = -1
_RECALL_WEIGHT, _MATCH_WEIGHT, _LETTER_WEIGHT = 0.5, 1.0, 0.3
_RECALL_LAYER, _MATCH_LAYER = 2, 3  # the layer (of 4) after which each loss applies
_EQUAL_CONTENT_STD = 0.05


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens with their loss weights and marks, all of shape [B, T].

    At marked tokens ``recall_BT`` holds a token id, ``right_BT`` 0 or 1 and ``option_BT`` 0..3; all
    others are ``NOT_MARKED``.
    """

    tokens_BT: Tensor
    weights_BT: Tensor
    recall_BT: Tensor
    right_BT: Tensor
    option_BT: Tensor


def _unit_rms(hidden_ND: Tensor) -> Tensor:
    return hidden_ND * torch.rsqrt(hidden_ND.pow(2).mean(-1, keepdim=True) + 1e-6)


class Supervisor(nn.Module):
    """The weighted next-token loss plus the auxiliary losses, with the two heads that these need."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.right = nn.Linear(hidden_size, 1)
        self.option = nn.Linear(hidden_size, len(LETTERS))

    def forward(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the loss to minimise (a scalar)."""
        output = model(input_ids=batch.tokens_BT[:, :-1], output_hidden_states=True)
        losses = F.cross_entropy(output.logits.flatten(0, 1), batch.tokens_BT[:, 1:].flatten(), reduction="none")
        weights = batch.weights_BT[:, 1:].flatten()
        loss: Tensor = (losses * weights).sum() / weights.sum()
        loss = loss + _RECALL_WEIGHT * self._recall_loss(model, output.hidden_states[_RECALL_LAYER], batch)
        return loss + self._match_loss(output.hidden_states[_MATCH_LAYER], batch)

    def _recall_loss(self, model: PreTrainedModel, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        wanted_BT = batch.recall_BT[:, :-1]
        marked_BT = wanted_BT != NOT_MARKED
        if not bool(marked_BT.any()):
            return hidden_BTD.new_zeros(())
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)  # for the type checker: a decoder's input is always one
        embedding_VD = _unit_rms(embedding.weight)
        scale = 1.0 / math.sqrt(hidden_BTD.shape[-1])
        logits_NV = _unit_rms(hidden_BTD[marked_BT]) @ embedding_VD.T * scale
        return F.cross_entropy(logits_NV, wanted_BT[marked_BT])

    def _match_loss(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        marked_BT = batch.option_BT[:, :-1] != NOT_MARKED
        if not bool(marked_BT.any()):
            return hidden_BTD.new_zeros(())
        hidden_ND = _unit_rms(hidden_BTD[marked_BT])
        right_N = batch.right_BT[:, :-1][marked_BT].float()
        match = F.binary_cross_entropy_with_logits(self.right(hidden_ND).squeeze(-1), right_N)
        letter = F.cross_entropy(self.option(hidden_ND), batch.option_BT[:, :-1][marked_BT])
        return _MATCH_WEIGHT * match + _LETTER_WEIGHT * letter


@torch.no_grad()
def seek_equal_content(model: PreTrainedModel, layer: int = _MATCH_LAYER - 1, std: float = _EQUAL_CONTENT_STD) -> None:
    """Start one head of a layer, by default the match layer, with equal query and key matrices.

    Its tokens then attend to tokens of similar content, so an option attends to the question that
    recalled it (Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers", 2023). Only
    the slowly rotating RoPE dimensions are used: in the others, distance would hide the similarity.
    """
    config = model.config
    attention = model.model.layers[layer].self_attn
    half = config.head_dim // 2
    slow = list(range(half - 3 * config.head_dim // 16, half))
    rows = [*slow, *(i + half for i in slow)]
    shared = torch.zeros(config.head_dim, config.hidden_size)
    shared[rows] = torch.randn(len(rows), config.hidden_size) * std
    attention.q_proj.weight[: config.head_dim] = shared
    attention.k_proj.weight[: config.head_dim] = shared
