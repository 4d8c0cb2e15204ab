"""The three model shapes, and their config.json as the Hugging Face Hub writes it.

The input size of every linear layer is a multiple of 128 (one INT4 group), also when split over two GPUs:
Gemma and Qwen 256, 512, 512 -> 256; Llama 256, 256 -> 128, 768 -> 384.
"""

import copy
from typing import Any

from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

MAX_POSITIONS = 2048
_VOCAB_MULTIPLE = 64
_ROPE_THETA = 10000.0
_QWEN_ROPE_THETA = 1000000.0
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

_CLASSES: dict[str, tuple[Any, Any]] = {
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def padded_vocab(tokens: int) -> int:
    """Round a vocabulary up to a multiple of 64: 1,775 -> 1,792."""
    return -(-tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def _shared(vocab_size: int, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
    return {
        "vocab_size": padded_vocab(vocab_size),
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": _ROPE_THETA,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def gemma_json(vocab_size: int, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
    """Return tiny_gemma's config.json: one KV head, heads x head_dim != hidden, tied embeddings."""
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        **_shared(vocab_size, bos=bos, eos=eos, pad=pad),
        "intermediate_size": 512,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def llama_json(vocab_size: int, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
    """Return tiny_llama's config.json: grouped-query attention, Llama-3 RoPE scaling, own head."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_shared(vocab_size, bos=bos, eos=eos, pad=pad),
        "intermediate_size": 768,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": dict(_LLAMA3_ROPE),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def qwen_json(vocab_size: int, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
    """Return tiny_qwen's config.json: norms of query and key heads, heads x head_dim != hidden, tied embeddings."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_shared(vocab_size, bos=bos, eos=eos, pad=pad),
        "intermediate_size": 512,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_window_layers": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": _QWEN_ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }


def draft_json(target: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a draft model for ``target``: a sixth of its parameters, the same vocabulary."""
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return {**target, **small, "head_dim": 64, "intermediate_size": 256}


def fresh_model(config_json: dict[str, Any]) -> PreTrainedModel:
    """Return a float32 model with random weights and the shape given by ``config_json``."""
    # A copy, because from_dict writes the RoPE base into the given rope_scaling.
    values = copy.deepcopy(config_json) | {"torch_dtype": "float32"}
    config, model = _CLASSES[config_json["model_type"]]
    return model(config.from_dict(values))  # type: ignore[no-any-return]
