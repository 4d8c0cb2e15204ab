"""A model in Transformers that can be watched: its weights, its predictions, and the size of what each linear sees.

Two of them are compared with each other: the model itself, and the one that a TensorRT-LLM checkpoint describes, in
float32. The second takes every number from the checkpoint, its config.json included; Transformers computes both, so
that neither shares code with an engine.

Shapes: B sequences, T tokens, V vocabulary, O output channels, I input channels.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.checkpoint.read import E2M1_VALUES, Checkpoint, dequantize
from pipelines.compress.by_tensor import NORMS
from pipelines.compress.contexts import muted
from pipelines.compress.loading import load_model
from pipelines.compress.model_folder import look_at
from pipelines.compress.postprocess import multipliers
from pipelines.compress.transformers_door import MAJOR, AutoConfig, AutoModelForCausalLM, DynamicCache
from pipelines.domain.families import FAMILIES
from pipelines.domain.formats import FLOAT_WEIGHTS, Activation, KvFormat

Array = np.ndarray[Any, Any]
Rounding = Callable[[torch.Tensor], torch.Tensor]

PARTS = {
    "attention.qkv.q": "self_attn.q_proj",
    "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj",
    "attention.dense": "self_attn.o_proj",
    "mlp.fc": "mlp.gate_proj",
    "mlp.gate": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}
"""Linears of a layer: TensorRT-LLM's name, with the part of a merged linear, and Hugging Face's."""
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbouring values of E2M1."""
SMALLEST_BLOCK_SCALE = 1e-5
"""ModelOpt's kernel divides a block with a smaller scale by 1."""


def norms(architecture: str) -> dict[str, str]:
    """Return the norms of a layer, those of its heads included: TensorRT-LLM's name and Hugging Face's."""
    heads = FAMILIES[architecture].head_norms.items()
    return NORMS | {f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in heads}


class TracedModel:
    """A float32 model of Transformers on the CPU."""

    def __init__(self, model: Any, cache: Callable[[], Any] = lambda: None) -> None:
        """Use `trace_model` or `trace_checkpoint` instead."""
        self._model, self._cache = model, cache

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self._model.model.layers)

    @property
    def norms(self) -> tuple[str, ...]:
        """Norms of each layer, by TensorRT-LLM's names."""
        return tuple(norms(type(self._model).__name__))

    def facts(self) -> dict[str, Any]:
        """Return what the model computes with, under the names of a checkpoint's config.json."""
        config, inner = self._model.config, self._model.model
        attention = inner.layers[0].self_attn
        granite = config.model_type == "granite"
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_size": attention.head_dim,
            "intermediate_size": inner.layers[0].mlp.gate_proj.out_features,
            "vocab_size": inner.embed_tokens.num_embeddings,
            "norm_epsilon": float(getattr(inner.norm, "variance_epsilon", getattr(inner.norm, "eps", 0.0))),
            "hidden_act": config.hidden_act,
            "attn_bias": attention.q_proj.bias is not None,
            "mlp_bias": inner.layers[0].mlp.gate_proj.bias is not None,
            "max_position_embeddings": config.max_position_embeddings,
            **(multipliers(config.to_dict(), attention.head_dim) if granite else {}),
            **({"sliding_window": config.sliding_window} if config.model_type == "mistral" else {}),
        }

    def rotary_factor(self) -> float:
        """Return the factor of rotated queries and keys, which is 1 but for yarn."""
        return float(self._model.model.rotary_emb.attention_scaling)

    def inverse_frequencies(self) -> Array:
        """Return the angle per position of each pair of channels [head size / 2]."""
        return _numpy(self._model.model.rotary_emb.inv_freq)

    def tied(self) -> bool:
        """Return whether the output head is the embedding."""
        head, embedding = self._model.lm_head.weight, self._model.model.embed_tokens.weight
        return bool(head.data_ptr() == embedding.data_ptr()) or torch.equal(head, embedding)

    def linear(self, layer: int, part: str) -> Array:
        """Return the weight [O, I] of a linear, by its name in `PARTS`."""
        return _numpy(self._model.model.layers[layer].get_submodule(PARTS[part]).weight)

    def bias(self, layer: int, part: str) -> Array | None:
        """Return the bias [O] of a linear; None if it has none."""
        bias = self._model.model.layers[layer].get_submodule(PARTS[part]).bias
        return None if bias is None else _numpy(bias)

    def other(self, name: str) -> Array:
        """Return a norm's factor, the embedding or the head, by its name in a checkpoint."""
        inner, offset = self._model.model, FAMILIES[type(self._model).__name__].norm_offset
        if name == "transformer.vocab_embedding":
            return _numpy(inner.embed_tokens.weight)
        if name == "lm_head":
            return _numpy(self._model.lm_head.weight)
        if name == "transformer.ln_f":
            return _numpy(inner.norm.weight) + np.float32(offset)
        _, _, layer, norm = name.split(".", 3)
        theirs = norms(type(self._model).__name__)[norm]
        return _numpy(inner.layers[int(layer)].get_submodule(theirs).weight) + np.float32(offset)

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Array]:
        """Return the logits after every token of each sequence, float32 [T, V]."""
        with torch.inference_mode():
            return [_numpy(self._forward(ids)[0]) for ids in sequences]

    def greedy(self, sequences: Sequence[Sequence[int]], new_tokens: int, stop: frozenset[int]) -> list[list[int]]:
        """Continue sequences with the likeliest tokens, up to a token of `stop`, which is left out."""
        continuations = []
        with torch.inference_mode():
            for ids in sequences:
                whole = list(ids)
                for _ in range(new_tokens):
                    token = int(self._forward(whole)[0, -1].argmax())
                    if token in stop:
                        break
                    whole.append(token)
                continuations.append(whole[len(ids) :])
        return continuations

    def largest_inputs(self, sequences: Sequence[Sequence[int]]) -> dict[tuple[int, str], Array]:
        """Return the largest magnitude of each input channel [I] of each linear, and of the keys and values [O].

        The keys are (layer, name in `PARTS`), and for what leaves k and v "k" and "v".
        """
        largest: dict[tuple[int, str], torch.Tensor] = {}

        def seen(key: tuple[int, str], values: torch.Tensor) -> None:
            here = values.detach().abs().reshape(-1, values.shape[-1]).amax(0)
            largest[key] = torch.maximum(largest[key], here) if key in largest else here

        with ExitStack() as hooks:
            for (number, layer), (part, name) in product(enumerate(self._model.model.layers), PARTS.items()):
                linear, key, out = layer.get_submodule(name), (number, part), (number, part[-1])
                before = linear.register_forward_pre_hook(lambda _, args, key=key: seen(key, args[0]))
                hooks.enter_context(before)
                if part in ("attention.qkv.k", "attention.qkv.v"):
                    after = linear.register_forward_hook(lambda _m, _a, values, key=out: seen(key, values))
                    hooks.enter_context(after)
            self.logits(sequences)
        return {key: _numpy(values) for key, values in largest.items()}

    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        cache = self._cache()
        extra = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        logits: torch.Tensor = self._model(torch.tensor([list(ids)]), **extra).logits
        return logits


def trace_model(model_dir: Path, dtype: str = "float32") -> TracedModel:
    """Load a Hugging Face folder; with "bfloat16" or "float16", every result is rounded to that type.

    Raises:
        UserError: the folder is not a readable model.
    """
    with muted():
        return TracedModel(load_model(look_at(model_dir), dtype, "cpu"))


def trace_checkpoint(model_dir: Path, checkpoint: Checkpoint) -> TracedModel:
    """Make the model that a checkpoint describes: its weights decoded, its inputs rounded, its own configuration.

    Args:
        model_dir: Hugging Face folder of the model; only what a checkpoint does not state is read from it.
        checkpoint: an open checkpoint.

    Raises:
        UserError: the checkpoint lacks a tensor.
    """
    with muted():
        config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True)
        model = AutoModelForCausalLM.from_config(_configured(config, checkpoint), dtype=torch.float32)
    model.eval().requires_grad_(False)
    _fill(model, checkpoint)
    rounding = _kv_rounding(checkpoint)
    return TracedModel(model, (lambda: _RoundedCache(rounding)) if rounding else lambda: None)


_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "output_multiplier_scale")


def _configured(config: Any, checkpoint: Checkpoint) -> Any:
    """Return a Transformers configuration with everything that a checkpoint states."""
    ours = checkpoint.config
    config.num_hidden_layers, config.hidden_size = ours.num_hidden_layers, ours.hidden_size
    config.num_attention_heads, config.num_key_value_heads = ours.num_attention_heads, ours.num_key_value_heads
    config.head_dim, config.intermediate_size = ours.head_size, ours.intermediate_size
    config.vocab_size, config.rms_norm_eps = ours.vocab_size, ours.norm_epsilon
    config.max_position_embeddings = ours.max_position_embeddings
    # TensorRT-LLM's only GELU is the tanh form
    config.hidden_act = "gelu_pytorch_tanh" if ours.hidden_act == "gelu" else ours.hidden_act
    config.hidden_activation = config.hidden_act
    config.attention_bias, config.mlp_bias = bool(ours.raw.get("attn_bias")), bool(ours.raw.get("mlp_bias"))
    if MAJOR < 5:  # see `loading._hf_config`
        config.rope_theta, config.rope_scaling = ours.rotary_base, ours.rotary_scaling
    else:
        scaling = dict(ours.rotary_scaling or {"rope_type": "default"})
        config.rope_parameters = {**scaling, "rope_theta": ours.rotary_base}
    if config.model_type == "granite":  # the reverse of `postprocess.multipliers`
        embedding, attention, residual, logits = (float(ours.raw.get(name, 1.0)) for name in _MULTIPLIERS)
        config.embedding_multiplier, config.residual_multiplier = embedding, residual
        config.attention_multiplier, config.logits_scaling = attention * ours.head_size**-0.5, 1 / logits
    if config.model_type == "mistral":
        config.sliding_window = ours.raw.get("sliding_window")
    config.tie_word_embeddings = "lm_head.weight" not in checkpoint
    config.pad_token_id = None
    return config


def _fill(model: Any, checkpoint: Checkpoint) -> None:
    """Put decoded weights into the model, and round the inputs of linears as the checkpoint says."""
    inner, offset = model.model, FAMILIES[checkpoint.config.architecture].norm_offset
    inner.embed_tokens.weight.data = _torch(checkpoint.tensor("transformer.vocab_embedding.weight"))
    inner.norm.weight.data = _torch(checkpoint.tensor("transformer.ln_f.weight")) - offset
    head = dequantize(checkpoint, "lm_head") if "lm_head.weight" in checkpoint else None
    model.lm_head.weight = inner.embed_tokens.weight if head is None else torch.nn.Parameter(_torch(head), False)
    for number, layer in enumerate(inner.layers):
        ours = f"transformer.layers.{number}"
        for norm, theirs in norms(checkpoint.config.architecture).items():
            layer.get_submodule(theirs).weight.data = _torch(checkpoint.tensor(f"{ours}.{norm}.weight")) - offset
        for module in dict.fromkeys(part.removesuffix(part[-2:]) if ".qkv." in part else part for part in PARTS):
            linears = [layer.get_submodule(theirs) for part, theirs in PARTS.items() if part.startswith(module)]
            name, rounding = f"{ours}.{module}", _input_rounding(checkpoint, f"{ours}.{module}")
            sizes = [linear.out_features for linear in linears]
            weights = torch.split(_torch(dequantize(checkpoint, name)), sizes)
            biases = (
                torch.split(_torch(checkpoint.tensor(f"{name}.bias")), sizes) if f"{name}.bias" in checkpoint else None
            )
            for place, linear in enumerate(linears):
                linear.weight.data = weights[place]
                if biases is not None:
                    linear.bias = torch.nn.Parameter(biases[place], False)
                linear.register_forward_pre_hook(lambda _, args, rounding=rounding: (rounding(args[0]),))


def _input_rounding(checkpoint: Checkpoint, module: str) -> Rounding:
    """Return what a format does to the input of a linear, from its definition."""
    form = checkpoint.config.format_of(module)
    if form.weights is FLOAT_WEIGHTS:
        return lambda x: x
    prequant, scale = (_leaf(checkpoint, module, f"{kind}_scaling_factor") for kind in ("prequant", "activation"))
    rounded = ROUNDINGS[form.activation]
    return lambda x: rounded(x * prequant, scale)


def _leaf(checkpoint: Checkpoint, module: str, leaf: str) -> torch.Tensor:
    name = f"{module}.{leaf}"
    return _torch(checkpoint.tensor(name)) if name in checkpoint else torch.ones(())


def nearest_e2m1(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the nearest values of E2M1; of two equally near, that whose code is even."""
    bounds, values = (torch.tensor(each, device=magnitudes.device) for each in (E2M1_BOUNDS, E2M1_VALUES))
    below, above = (torch.searchsorted(bounds, magnitudes, right=right) for right in (False, True))
    return values[torch.where(below % 2 == 0, below, above)]


def _nvfp4_round(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round blocks of 16 to E2M1 under an E4M3 scale."""
    blocks = x.reshape(-1, 16)
    block_scale = (blocks.abs().amax(1, keepdim=True) / (6 * scale)).clamp(max=448)
    block_scale = block_scale.to(torch.float8_e4m3fn).float() * scale
    block_scale = torch.where(block_scale >= SMALLEST_BLOCK_SCALE, block_scale, torch.ones_like(block_scale))
    return (nearest_e2m1(blocks.abs() / block_scale) * block_scale * blocks.sign()).reshape(x.shape)


def _fp8_round(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _int8_round(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).round().clamp(-128, 127) * scale


ROUNDINGS: Mapping[Activation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "16bit": lambda x, _: x,
    "fp8": _fp8_round,
    "int8": _int8_round,
    "fp4": _nvfp4_round,
}


def _kv_rounding(checkpoint: Checkpoint) -> list[Rounding]:
    """Return what each layer's KV cache does to keys and values; empty for a cache of 16 bit."""
    rounding = {KvFormat.FP8: _fp8_round, KvFormat.INT8: _int8_round}.get(checkpoint.config.kv_format)
    if rounding is None:
        return []
    scales = [
        _leaf(checkpoint, f"transformer.layers.{layer}.attention", "kv_cache_scaling_factor")
        for layer in range(checkpoint.config.num_hidden_layers)
    ]
    return [partial(rounding, scale=scale) for scale in scales]


class _RoundedCache(DynamicCache):  # type: ignore[misc]
    def __init__(self, rounding: Sequence[Rounding]) -> None:
        super().__init__()
        self._rounding = rounding

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        rounded = self._rounding[layer_idx]
        return super().update(rounded(key_states), rounded(value_states), layer_idx, *args, **kwargs)


def _torch(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _numpy(values: torch.Tensor) -> Array:
    array: Array = values.detach().float().numpy()
    return array
