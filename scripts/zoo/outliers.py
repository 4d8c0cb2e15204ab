"""Give a trained model the outlier channels of large models, without changing what it computes.

In large language models a few channels have far larger activations than the rest, with smaller
weights. Plain rounding and magnitude pruning damage these channels; SmoothQuant (Xiao et al. 2022),
AWQ (Lin et al. 2023) and SparseGPT (Frantar and Alistarh 2023) handle them. A model of 3 million
parameters does not develop them by itself, so all methods look alike on it.

Therefore each channel between two linear maps is multiplied by a power of two on one side and
divided by it on the other: the product, and so the model's function, stays the same; scaling by
powers of two is exact in bf16. Where Gemma stores a norm weight minus one, that difference is
rounded again.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipelines.domain.families import FAMILIES


def _scales(count: int, spread: float, generator: torch.Generator) -> Tensor:
    """Return ``count`` powers of two whose exponents are normal with deviation ``spread``."""
    return torch.exp2(torch.round(torch.randn(count, generator=generator) * spread))


def _divide_columns(linears: list[nn.Linear], scale: Tensor) -> None:
    for linear in linears:
        linear.weight /= scale


def _scale_norm(norm: nn.Module, scale: Tensor, offset: float) -> None:
    """Multiply the norm's output; Gemma's norm multiplies by (1 + weight), so its offset is 1."""
    norm.weight.copy_((offset + norm.weight) * scale - offset)  # type: ignore[operator]


@torch.no_grad()
def plant_outliers(model: PreTrainedModel, *, spread: float, seed: int) -> None:
    """Rescale the channels of every decoder layer of ``model`` (float32) in place.

    Four places per layer: into q, k, v; into the gate and up projections; between up and down; and
    between v and o, where query heads that share a KV head share its scales.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    offset = FAMILIES[type(model).__name__].norm_offset
    sharing = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        scale = _scales(config.hidden_size, spread, generator)
        _scale_norm(layer.input_layernorm, scale, offset)
        _divide_columns([attention.q_proj, attention.k_proj, attention.v_proj], scale)

        scale = _scales(config.hidden_size, spread, generator)
        _scale_norm(layer.post_attention_layernorm, scale, offset)
        _divide_columns([mlp.gate_proj, mlp.up_proj], scale)

        scale = _scales(config.intermediate_size, spread, generator)
        mlp.up_proj.weight *= scale[:, None]
        _divide_columns([mlp.down_proj], scale)

        scale = _scales(config.num_key_value_heads * config.head_dim, spread, generator)
        attention.v_proj.weight *= scale[:, None]
        per_head = scale.view(config.num_key_value_heads, 1, config.head_dim)
        _divide_columns([attention.o_proj], per_head.expand(-1, sharing, -1).reshape(-1))
