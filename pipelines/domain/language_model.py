"""The language model inside the Hugging Face folder of a model that also has an encoder of pictures.

Source: the configurations of these models in Transformers 5.14, and their defaults, on which such folders rely for
sizes of the language model. Without pictures, Qwen's positions of three axes (mrope) are equal on all, so that they
are those of Qwen2 and Qwen3.
"""

from collections.abc import Mapping
from typing import Any

from pipelines.domain.errors import UserError, shown
from pipelines.domain.families import FAMILIES, Architecture

LLAVA, LLAVA_NEXT = "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"
"""LLaVA 1.5 and 1.6."""
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Published without a block for the language model: `model_type` is that of the whole."""

_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
_MINISTRAL3 = _MISTRAL | {
    "vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5, "sliding_window": None,
    "rope_parameters": {
        "type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
        "original_max_position_embeddings": 16384, "max_position_embeddings": 262144, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_VL = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_QWEN3_VL = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6, "rope_theta": 5e5,
}  # fmt: skip
_QWEN2 = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
}  # fmt: skip
_QWEN3 = _QWEN2 | {"head_dim": 128}
Defaults = Mapping[str, Any]
_LLAVA_LANGUAGES: Mapping[str, tuple[str, Defaults]] = {
    "llama": (Architecture.LLAMA, _LLAMA),
    "mistral": (Architecture.MISTRAL, _MISTRAL),
}
_QWEN2_VL = (Architecture.QWEN2, _VL)
LANGUAGES: Mapping[str, Mapping[str, tuple[str, Defaults]]] = {
    LLAVA: _LLAVA_LANGUAGES,
    LLAVA_NEXT: _LLAVA_LANGUAGES,
    "Gemma3ForConditionalGeneration": {"gemma3_text": (Architecture.GEMMA3, _GEMMA3)},
    "InternVLForConditionalGeneration": {"qwen2": (Architecture.QWEN2, _QWEN2), "qwen3": (Architecture.QWEN3, _QWEN3)},
    "Llama4ForConditionalGeneration": {"llama4_text": ("Llama4ForCausalLM", {})},
    "Mistral3ForConditionalGeneration": {
        "mistral": (Architecture.MISTRAL, _MISTRAL),
        "ministral3": (Architecture.MISTRAL, _MINISTRAL3),
    },
    "Qwen2VLForConditionalGeneration": {"qwen2_vl": _QWEN2_VL, "qwen2_vl_text": _QWEN2_VL},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl": _QWEN2_VL, "qwen2_5_vl_text": _QWEN2_VL},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": (Architecture.QWEN3, _QWEN3_VL)},
}
"""By architecture of the whole and `model_type` of the language model: its architecture and defaults of its sizes."""
_AXES = ("mrope_section", "mrope_interleaved")
_PARTS = ("_name_or_path", "torch_dtype", "vision_config")
_OWN = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")


def whole(config: Mapping[str, Any]) -> str | None:
    """Return the architecture of a model whose language model is one part; None for any other."""
    named = config.get("architectures")
    only = named[0] if isinstance(named, list) and len(named) == 1 else None
    return only if isinstance(only, str) and only in LANGUAGES else None


def text_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return config.json of the text model: as it is, or of the language model if that is one part.

    Raises:
        UserError: as `language_config`.
    """
    return config if whole(config) is None else language_config(config, source)


def language_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return config.json of the language model alone.

    Raises:
        UserError: it is of a type that is not read, or of a family that is built and its weights are quantized.
    """
    architecture = str(whole(config))
    languages = LANGUAGES[architecture]
    text = config.get("text_config", config if config.get("model_type") in _FLAT else None)
    kind = text.get("model_type", next(iter(languages))) if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or str(kind) not in languages:
        raise UserError(
            f"{source} names {architecture} with a language model of type {shown(kind)}.",
            allowed=f"Read is {' or '.join(languages)}.",
        )
    block = config.get("quantization_config") or text.get("quantization_config")
    language, defaults = languages[str(kind)]
    built = FAMILIES.get(language)
    if block and built:
        raise UserError(f"{source} is of a quantized {architecture}.", todo="Give the folder in 16 bit, and quant=...")
    own = {key: value for key, value in text.items() if key not in _PARTS}
    if architecture not in (LLAVA, LLAVA_NEXT) and type(tied := config.get("tie_word_embeddings")) is bool:
        own["tie_word_embeddings"] = tied
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := own.get(key), Mapping) and any(axis in rope for axis in _AXES):
            own[key] = {
                name: "default" if value == "mrope" else value for name, value in rope.items() if name not in _AXES
            }
    dtype = next((each[key] for each in (text, config) for key in ("dtype", "torch_dtype") if each.get(key)), None)
    named: dict[str, Any] = {"architectures": [str(language)], "model_type": built.model_type if built else kind}
    if block:
        named["quantization_config"] = block
    return {**defaults, **own, **named, **({"dtype": dtype} if dtype else {})}


def language_name(name: str) -> str | None:
    """Return the name of a tensor in the language model alone; None for one of another part.

    Folders have `language_model.model.layers...`, or `model.layers...` beside `visual...`; Transformers 5 writes
    `model.language_model.layers...`.
    """
    if name.startswith(_OWN):
        return name
    own = name.removeprefix("model.")
    if not own.startswith("language_model."):
        return None
    rest = own.removeprefix("language_model.")
    return rest if own == name else f"model.{rest}"
