"""What a config.json means is what Transformers makes of it: sizes, defaults, positions, attention windows."""

import dataclasses
import inspect
import json
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipelines.compress.by_modelopt import correct_unified
from pipelines.compress.by_tensor import Split, checkpoint_config
from pipelines.compress.model_folder import ModelFolder
from pipelines.compress.postprocess import corrected
from pipelines.domain.errors import UserError
from pipelines.domain.families import BUILT, FAMILIES, SIZED, Architecture
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.openvino.rope import attention_factor, inverse_frequencies
from pipelines.settings.model import BUNDLED
from pipelines.store.manifest import HashCache
from pipelines.store.sources import files_source, model_source
from tests.support.specs import quant_spec

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GEMMA, GEMMA2, GEMMA3, PHI3 = "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"
TYPES = {"gemma3": "gemma3_text"}
SIZES = {
    "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SLIDING, FULL = "sliding_attention", "full_attention"

LONG = {"short_factor": [1.0 + each / 8 for each in range(8)], "long_factor": [9.0] * 8}
OF_128K = {"max_position_embeddings": 131072, "original_max_position_embeddings": 2048}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": (LLAMA, {"rope_scaling": None, "max_position_embeddings": 4096, "pretraining_tp": 1}),
    "llama 2 of 2023, which names no theta": (LLAMA, {"rms_norm_eps": 1e-5, "num_key_value_heads": None}),
    "llama 3": (LLAMA, {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}),
    "llama 3.1": (LLAMA, {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "max_position_embeddings": 512}),
    "llama 3.2, saved by transformers 5": (LLAMA, {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "head_dim": 32}),
    "llama, nothing but its sizes": (LLAMA, {}),
    "llama with windows that mean nothing": (
        LLAMA, {"sliding_window": 32, "use_sliding_window": True, "layer_types": [SLIDING] * 6, "max_window_layers": 2},
    ),
    "tinyllama": (LLAMA, {"rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "float32"}),
    "yi": (LLAMA, {"rope_theta": 5000000.0, "tie_word_embeddings": False}),
    "vicuna 16k": (LLAMA, {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 4096}),
    "smollm2": (LLAMA, {"rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True}),
    "deepseek r1 distill llama": (LLAMA, {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "mlp_bias": False}),
    "unsloth": (LLAMA, {"rope_scaling": LLAMA3, "unsloth_fixed": True, "unsloth_version": "2026.1", "pad_token_id": 3}),
    "transformers 5 with rope_scaling added": (LLAMA, {"rope_parameters": PLAIN, "rope_scaling": YARN}),
    "rope_scaling null beside rope_parameters": (
        LLAMA, {"rope_parameters": {**YARN, "rope_theta": 5e4}, "rope_scaling": None, "rope_theta": 1e4},
    ),
    "theta inside rope_scaling": (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}),
    "theta inside and outside": (
        LLAMA, {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ),
    "rope_parameters without theta": (LLAMA, {"rope_theta": 2e4, "rope_parameters": {"rope_type": "default"}}),
    "original positions outside": (LLAMA, {"original_max_position_embeddings": 128, "rope_scaling": YARN}),
    "no original positions": (
        LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 512},
    ),
    "yarn with the ratio as factor": (
        LLAMA, {"rope_scaling": {**YARN, "factor": None}, "max_position_embeddings": 512},
    ),
    "type beside rope_type": (LLAMA, {"rope_scaling": {**YARN, "type": "linear"}}),
    "yarn with mscales": (LLAMA, {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "yarn with one mscale, which means nothing": (QWEN2, {"rope_scaling": {**YARN, "mscale_all_dim": 1.3}}),
    "yarn with mscales of null": (LLAMA, {"rope_scaling": {**YARN, "mscale": None, "mscale_all_dim": None}}),
    "yarn with an attention factor": (
        QWEN2, {"rope_scaling": {**YARN, "attention_factor": 0.9, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "ministral 3": (
        MISTRAL, {"rope_parameters": {**YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "a factor below 1": (LLAMA, {"rope_scaling": {**YARN, "factor": 0.5}}),
    "qwen 2.5 with the yarn of its card": (
        QWEN2, {"rope_theta": 1e6, "rope_scaling": {**YARN, "type": "yarn"}, "use_sliding_window": False},
    ),
    "qwen 1.5": (QWEN2, {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 4}),
    "qwen2 with windows": (QWEN2, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4}),
    "qwen2 with windows in no layer": (QWEN2, {"use_sliding_window": True, "sliding_window": 32}),
    "qwen2 with windows everywhere": (QWEN2, {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen2, use_sliding_window left out": (QWEN2, {"sliding_window": 32, "max_window_layers": 0}),
    "qwen2, saved by transformers 5": (
        QWEN2, {"use_sliding_window": True, "sliding_window": 32, "layer_types": [FULL, SLIDING, SLIDING] * 2},
    ),
    "qwen2 distilled, layer_types all full": (QWEN2, {"layer_types": [FULL] * 6, "use_sliding_window": True}),
    "qwen3 without head_dim": (QWEN3, {"rope_theta": 1e6}),
    "qwen3 with windows": (QWEN3, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 5}),
    "mistral v0.1": (MISTRAL, {"sliding_window": 4096, "rms_norm_eps": 1e-5}),
    "mistral v0.3": (MISTRAL, {"sliding_window": None, "rope_theta": 1e6}),
    "mistral nemo": (MISTRAL, {"sliding_window": None, "head_dim": 128, "rope_theta": 1e6}),
    "mistral that names no window": (MISTRAL, {"use_sliding_window": False, "attention_bias": True}),
    "gemma": (GEMMA, {"head_dim": 32}),
    "gemma without head_dim": (GEMMA, {"mlp_bias": True, "sliding_window": 16}),
    "gemma 2": (GEMMA2, {}),
    "gemma 2, saved by transformers 5": (GEMMA2, {"layer_types": [SLIDING, FULL, FULL] * 2, "sliding_window": 32}),
    "gemma 3": (GEMMA3, {"sliding_window": 32, "sliding_window_pattern": 3}),
    "gemma 3, saved by transformers 5": (
        GEMMA3, {
            "layer_types": [*[SLIDING] * 5, FULL],
            "rope_parameters": {SLIDING: PLAIN, FULL: {**PLAIN, "rope_theta": 1e6}},
        },
    ),
    "phi 3": (PHI3, {"sliding_window": 2047}),
    "phi 3 of 128k": (PHI3, {"rope_scaling": LONG | {"type": "longrope"}, **OF_128K}),
    "phi 3 of 128k, as it was first named": (
        PHI3, {"rope_scaling": {**LONG, "type": "su", "original_max_position_embeddings": 2048}, **OF_128K},
    ),
    "phi 3 of 128k, by an older name": (PHI3, {"rope_scaling": LONG | {"type": "yarn"}, **OF_128K}),
    "phi 4 mini": (
        PHI3, {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [3.0, 4.0, 5.0]},
            "partial_rotary_factor": 0.375, **OF_128K,
        },
    ),
    "phi 3 of 128k, saved by transformers 5": (
        PHI3, {
            "rope_parameters": {**LONG, "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
            | {"original_max_position_embeddings": 2048},
            **OF_128K,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {"logits_scaling": 8, "embedding_multiplier": 12, "attention_multiplier": 0.015625, "attention_bias": True},
    ),
    "llama with another family's local base": (
        LLAMA, {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_local_base_freq": 5e3},
    ),
    "blocks by layer type under a rope_scaling": (
        LLAMA, {"rope_parameters": {FULL: PLAIN}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "gemma, a newer function that is not read": (GEMMA, {"head_dim": 32, "hidden_activation": "silu"}),
    "gemma 2 with a pattern that means nothing": (GEMMA2, {"sliding_window_pattern": 3}),
    "qwen2 of as many KV heads": (QWEN2, {"num_key_value_heads": None}),
    "double precision": (LLAMA, {"dtype": "float64", "torch_dtype": "bfloat16"}),
    "mixtral": ("MixtralForCausalLM", {}),
    "mixtral, the other name of its experts": ("MixtralForCausalLM", {"num_experts": 4}),
    "gpt-oss": ("GptOssForCausalLM", {"rope_theta": 150000, "rope_scaling": {**YARN, "truncate": False}}),
    "gpt-oss that names no positions": ("GptOssForCausalLM", {"num_local_experts": 4, "sliding_window": 32}),
    "gpt-oss with other windows": ("GptOssForCausalLM", {"layer_types": [SLIDING, FULL, FULL] * 2}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}),
}  # fmt: skip


def stated(architecture: str, changes: dict[str, Any]) -> dict[str, Any]:
    name = FAMILIES[architecture].name
    return {"architectures": [architecture], "model_type": TYPES.get(name, name), **SIZES, **changes}


def read_by_transformers(config: dict[str, Any], folder: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


def windows_of(config: Any) -> list[int]:
    """Window per layer, 0 for none; a family whose code does not mention one has none."""
    module = sys.modules[type(AutoModel._model_mapping[type(config)]).__module__]  # to have it imported
    module = inspect.getmodule(AutoModel._model_mapping[type(config)])
    window = getattr(config, "sliding_window", None)
    if "sliding_window" not in inspect.getsource(module) or window is None:
        return [0] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) if "layer_types" in inspect.getsource(module) else None
    return [window if kind == SLIDING else 0 for kind in kinds or [SLIDING] * config.num_hidden_layers]


def ours_in_a_checkpoint(config: dict[str, Any], folder: Any) -> SimpleNamespace:
    """The configuration of the checkpoint that is written of this folder."""
    shape = ModelShape.from_hf_config(config)
    block = {"quant_algo": None, "kv_cache_quant_algo": None}
    raw = checkpoint_config(ModelFolder(folder, config, shape, ()), "bfloat16", block, {}, Split())
    found = corrected(raw, config, quant_spec(QFormat.NONE))
    return SimpleNamespace(raw=found, **found)


def rotary_of(config: Any) -> Any:
    module = inspect.getmodule(AutoModel._model_mapping[type(config)])
    (kind,) = {value for name, value in vars(module).items() if name.endswith("RotaryEmbedding")}
    return kind(config)


def test_every_layout_is_read_as_transformers_reads_it(tmp_path):
    assert len(LAYOUTS) > 40
    for name, (architecture, changes) in LAYOUTS.items():
        config = stated(architecture, changes)
        theirs, shape = read_by_transformers(config, tmp_path), ModelShape.from_hf_config(config)
        for ours, key in (
            ("num_key_value_heads", "num_key_value_heads"), ("max_position_embeddings", "max_position_embeddings"),
            ("tie_word_embeddings", "tie_word_embeddings"),
        ):  # fmt: skip
            assert getattr(shape, ours) == getattr(theirs, key), (name, ours)
        head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert shape.head_dim == head, name
        assert shape.num_experts == getattr(theirs, "num_local_experts", getattr(theirs, "num_experts", 1)), name
        whole = [0 if window >= shape.max_position_embeddings else window for window in shape.windows or (0,)]
        told = [whole[layer % len(whole)] for layer in range(shape.num_hidden_layers)]
        limit = shape.max_position_embeddings
        assert told == [0 if window >= limit else window for window in windows_of(theirs)], name
        assert shape.window_layers == sum(window > 0 for window in windows_of(theirs)), name
        if architecture in (*BUILT, PHI3):
            view = ours_in_a_checkpoint(config, tmp_path)
            rotary = rotary_of(theirs)
            np.testing.assert_allclose(inverse_frequencies(view), rotary.inv_freq.numpy(), rtol=1e-6, err_msg=name)
            assert attention_factor(view) == pytest.approx(rotary.attention_scaling), name
            assert view.norm_epsilon == theirs.rms_norm_eps, name
            read = "attention_bias" in inspect.getsource(inspect.getmodule(type(rotary)))
            assert view.attn_bias == (FAMILIES[architecture].qkv_bias or (read and theirs.attention_bias)), name
            assert view.mlp_bias == (architecture == LLAMA and theirs.mlp_bias), name
            acts = {"gelu_pytorch_tanh": "gelu", **({"silu": "swiglu"} if architecture == PHI3 else {})}
            assert view.hidden_act == acts.get(theirs.hidden_act, theirs.hidden_act), name


def test_a_unified_checkpoint_computes_the_same_positions(tmp_path):
    for name, (architecture, changes) in LAYOUTS.items():
        if architecture not in (LLAMA, QWEN2, GEMMA3, PHI3):
            continue
        config = stated(architecture, changes)
        given = read_by_transformers(config, tmp_path)
        written = correct_unified(tmp_path, config, "bfloat16")
        again = read_by_transformers(written, tmp_path)
        assert written["rope_theta"], name
        if architecture == GEMMA3:
            assert again.rope_parameters == given.rope_parameters, name
            continue
        if "longrope" in str(written["rope_scaling"]):  # 4.57 takes these three alone, and the number beside them
            assert written["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}, name
            assert written["original_max_position_embeddings"] == given.original_max_position_embeddings, name
        torch.testing.assert_close(rotary_of(again).inv_freq, rotary_of(given).inv_freq, msg=name)
        assert rotary_of(again).attention_scaling == rotary_of(given).attention_scaling, name


def test_defaults_are_those_of_transformers():
    """Of every key that is read, in every family; and no family lacks one that its class has."""
    every = {key for family in FAMILIES.values() for key in family.defaults} - {
        "rope_theta",
        "rope_parameters",
        "layer_types",
    }
    for family in FAMILIES.values():
        kind = CONFIG_MAPPING[TYPES.get(family.name, family.name)]
        theirs, named = kind(), set(inspect.signature(kind.__init__).parameters)
        for key, value in family.defaults.items():
            if family.architecture == Architecture.GEMMA3 and key.startswith(("rope_", "sliding_window_pattern")):
                continue  # see the layouts
            if key == "rope_theta":
                assert theirs.rope_parameters["rope_theta"] == value, family.name
            elif key == "rope_parameters":
                assert theirs.rope_parameters == value | {"rope_theta": family.defaults["rope_theta"]}, family.name
            elif key in ("sliding_window", "use_sliding_window", "layer_types", "mlp_only_layers"):
                assert inspect.signature(kind.__init__).parameters[key].default == value, (family.name, key)
            else:
                assert getattr(theirs, key) == value, (family.name, key)
        left_out = (named & every) - family.defaults.keys()
        assert left_out <= {"num_key_value_heads", "head_dim", "num_local_experts"}, (family.name, left_out)


def longrope(short: int = 8, long: int = 8, kind: str = "longrope") -> dict[str, Any]:
    return {
        "rope_type": kind, "short_factor": [1.0] * short, "long_factor": [2.0] * long,
        "original_max_position_embeddings": 1024,
    }  # fmt: skip


def test_defaults_of_sized_families_are_those_of_transformers():
    names = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind): kind for kind in CONFIG_MAPPING}
    known = {name: CONFIG_MAPPING[names[name]]() for name in SIZED if name in names}
    known["Llama4ForConditionalGeneration"] = CONFIG_MAPPING["llama4_text"]()  # the language model's part
    assert SIZED.keys() - known.keys() == {"InternLM3ForCausalLM"}  # its class comes with the model
    for name, theirs in known.items():
        given = {field.name: field.default for field in dataclasses.fields(type(theirs))}
        ours = {"tie_word_embeddings": False, **SIZED[name].defaults}
        assert {key: given[key] for key in ours} == ours, name
        read = {"head_dim", "sliding_window", "use_sliding_window", "layer_types", "num_local_experts"} & given.keys()
        assert {key for key in read if given[key] is not None} <= ours.keys(), name


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "a rope_scaling of type 'linear' without factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": None}}, "type 'linear' without factor"),
        (LLAMA, {"rope_scaling": {"type": "dynamic"}}, "type 'dynamic' without factor"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters of type 'yarn' with"),
        (LLAMA, {"rope_scaling": {**YARN, "original_max_position_embeddings": None}}, "without original_max_position"),
        (LLAMA, {"rope_scaling": YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings=n"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "type 'longrope' with short_factor=None"),
        (LLAMA, {"rope_scaling": longrope(short=7)}, r"json has .* short_factor of length 7\. It must have 8"),
        (LLAMA, {"rope_scaling": longrope(long=1, kind="su")}, r"type 'su' with long_factor of length 1\..* have 8"),
        (LLAMA, {"rope_scaling": longrope(), "head_dim": 32}, r"long_factor of length 8\. It must have 16"),
        (LLAMA, {"rope_scaling": longrope(), "partial_rotary_factor": 0.5}, "8. It must have 4"),
        (LLAMA, {"rope_parameters": {**longrope(), "partial_rotary_factor": 0.5}}, "8. It must have 4"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' without low_freq_factor"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, r"high_freq_factor=1\.0.*above low_freq_factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope_type='ntk'. Transformers knows default"),
        (LLAMA, {"rope_scaling": {"rope_type": None, "factor": 2.0}}, "rope_scaling.rope_type=None"),
        (LLAMA, {"rope_scaling": {**YARN, "rope_theta": None}}, "rope_scaling.rope_theta=null"),
        (LLAMA, {"rope_scaling": {**YARN, "beta_fast": "32"}}, "rope_scaling.beta_fast='32'"),
        (LLAMA, {"rope_parameters": {FULL: PLAIN}}, "rope_parameters for each type of layer"),
        (GEMMA3, {"rope_parameters": {FULL: {"rope_type": "linear"}}}, "full_attention of type 'linear' witho"),
        (GEMMA3, {"rope_parameters": {SLIDING: 3}}, r"rope_parameters\.sliding_attention=3"),
        (QWEN2, {"use_sliding_window": True, "layer_types": [FULL]}, "has 1 layer_types for num_hidden_layers=6"),
        (QWEN2, {"use_sliding_window": True, "layer_types": ["local"] * 6}, "has 'local' in layer_types"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window=0"),
        (QWEN2, {"num_key_value_heads": 3}, "num_key_value_heads=3, which does not divide"),
        (LLAMA, {"rope_scaling": {FULL: PLAIN, SLIDING: PLAIN}}, "rope_scaling for each type of layer"),
        (QWEN2, {"rope_scaling": {FULL: PLAIN}}, "rope_scaling for each type of layer"),
        (GEMMA3, {"rope_scaling": {FULL: PLAIN}}, "rope_scaling for each type of layer"),
        (GEMMA3, {"rope_parameters": PLAIN, "rope_scaling": YARN}, "rope_scaling beside one block of rope_parameters"),
        (GEMMA3, {"rope_parameters": {SLIDING: YARN, FULL: PLAIN}}, r"sliding_attention\.rope_type='yarn'"),
        (LLAMA, {"rope_theta": None}, "rope_theta=null"),
        (LLAMA, {"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "rope_theta=null"),
        (PHI3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "vocab_size": 32064}, "positions of type 'lin"),
        (LLAMA, {"tie_word_embeddings": None}, "tie_word_embeddings=null, which Llama does not take"),
        (GEMMA, {"head_dim": None}, "head_dim=null, which Gemma does not take.* Leave it out to have 256"),
        (GEMMA, {"num_key_value_heads": None}, "num_key_value_heads=null"),
        (QWEN2, {"head_dim": None}, "head_dim=null"),
        (LLAMA, {"attention_bias": None}, "attention_bias=null"),
        (LLAMA, {"mlp_bias": None}, "mlp_bias=null"),
        (QWEN3, {"use_sliding_window": None}, "use_sliding_window=null"),
        (QWEN2, {"max_window_layers": None}, "max_window_layers=null"),
        (GEMMA2, {"sliding_window": None}, "sliding_window=null"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling=0"),
        (GEMMA3, {"hidden_activation": None}, "hidden_activation=null"),
        (LLAMA, {"rms_norm_eps": None}, "rms_norm_eps=null"),
        (LLAMA, {"rms_norm_eps": 1}, "rms_norm_eps=1"),
        (LLAMA, {"max_position_embeddings": 4096.0}, r"max_position_embeddings=4096\.0"),
        (MISTRAL, {"sliding_window": 32.0}, r"sliding_window=32\.0"),
        (QWEN2, {"sliding_window": True}, "sliding_window=True"),
        (LLAMA, {"head_dim": 7}, "head_dim=7.* It must be even"),
        (LLAMA, {"hidden_size": 66, "head_dim": 16}, "hidden_size=66, which num_attention_heads=4 does not divide"),
        (LLAMA, {"hidden_act": "SiLU"}, "hidden_act='SiLU'. Engines compute silu, gelu_pytorch_tanh"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (GEMMA2, {"hidden_activation": "relu"}, "hidden_activation='relu'"),
        (LLAMA, {"torch_dtype": "auto"}, "torch_dtype='auto'"),
        (LLAMA, {"dtype": "torch.bfloat16", "torch_dtype": "bfloat16"}, r"dtype='torch\.bfloat16'"),
        (LLAMA, {"layer_types": [FULL] * 5}, "has 5 layer_types for num_hidden_layers=6"),
        (LLAMA, {"layer_types": []}, "has 0 layer_types for num_hidden_layers=6"),
        (MISTRAL, {"layer_types": ["chunked_attention"] * 6}, "has 'chunked_attention' in layer_types"),
        (LLAMA, {"layer_types": [SLIDING] * 6}, "has 'sliding_attention' in layer_types, but no sliding_window"),
        (QWEN3, {"layer_types": [SLIDING] * 6}, "has 'sliding_attention' in layer_types, but no sliding_window"),
        (LLAMA, {"model_type": "mistral"}, "model_type='mistral', but names the architecture LlamaForCausalLM"),
        (GEMMA3, {"model_type": "gemma3"}, "model_type='gemma3'"),
        (LLAMA, {"pad_token_id": 64}, "pad_token_id=64 with vocab_size=64"),
        (LLAMA, {"text_config": {"hidden_size": 128}}, "text_config"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
    ],
)  # fmt: skip
def test_what_is_incomplete_is_named(architecture, changes, message):
    with pytest.raises(UserError, match=message):
        ModelShape.from_hf_config(stated(architecture, changes))


def test_a_folder_that_is_read_in_another_way_has_another_key(tmp_path):
    """What is made of such a folder changed although its files did not; all others keep what was made of them."""
    hashes = HashCache(tmp_path / "hashes.json")
    folder, plain = tmp_path / "model", BUNDLED / "models" / "tiny_llama"
    shutil.copytree(plain, folder)
    assert model_source(folder, hashes)[0].digest == model_source(plain, hashes)[0].digest
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": PLAIN}))
    source, _ = model_source(folder, hashes)
    assert source.reading == json.dumps({"rope": [10000.0, config["rope_scaling"]]})
    assert source.digest != files_source(folder, hashes, "model.path").digest
    source.check(hashes)
