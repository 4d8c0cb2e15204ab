"""Corrections to an exported config.json."""

import json

import pytest

from pipelines.compress.postprocess import correct_export, corrected
from pipelines.domain.formats import KvFormat, QFormat
from tests.support.specs import quant_spec

HF = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 200, "rope_theta": 5e5,
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96,
}  # fmt: skip


def exported(**quantization: object) -> dict[str, object]:
    """What ModelOpt leaves behind, cut down."""
    return {
        "architecture": "LlamaForCausalLM",
        "logits_dtype": "float16",
        "vocab_size": 256,
        "hidden_act": "silu",
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, **quantization},
    }


def test_the_fields_that_trtllm_build_needs_are_there() -> None:
    config = corrected(exported(), HF, quant_spec(QFormat.FP8))
    assert config["model_type"] == "llama"
    assert config["logits_dtype"] == "float32"
    assert config["vocab_size"] == 200
    assert config["rotary_base"] == 500000.0
    assert config["rotary_scaling"] is None
    assert config["mapping"] == {
        "world_size": 2,
        "tp_size": 2,
        "pp_size": 1,
        "cp_size": 1,
        "attn_tp_size": -1,
        "attn_cp_size": -1,
    }


@pytest.mark.parametrize(("theirs", "ours"), [("gelu_pytorch_tanh", "gelu"), ("gelu", "gelu"), ("silu", "silu")])
def test_the_activation_has_the_name_that_trtllm_build_fuses(theirs, ours) -> None:
    """Any other name than silu and gelu is skipped with one warning for each layer, 18 for Gemma 2B."""
    assert corrected({**exported(), "hidden_act": theirs}, HF, quant_spec(QFormat.FP8))["hidden_act"] == ours


def test_granites_multipliers_have_tensorrt_llms_names() -> None:
    """Source: models/llama/config.py; logits of attention are divided by q_scaling sqrt(64), q_scaling = 1 / 0.125."""
    own = {"embedding_multiplier": 12, "attention_multiplier": 0.015625, "residual_multiplier": 0.22}
    hf = HF | own | {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 8}
    config = corrected({**exported(), "head_size": 64}, hf, quant_spec(QFormat.FP8))
    assert {key: config[key] for key in (*own, "output_multiplier_scale")} == {
        "embedding_multiplier": 12, "attention_multiplier": 0.125, "residual_multiplier": 0.22,
        "output_multiplier_scale": 0.125,
    }  # fmt: skip


def test_unknown_keys_go_and_excluded_modules_are_sorted() -> None:
    """A set's order changes from run to run; TensorRT-LLM refuses unknown keys."""
    config = corrected(exported(exclude_modules=["router", "lm_head"], novel=1), HF, quant_spec(QFormat.FP8))
    assert "novel" not in config["quantization"]
    assert config["quantization"]["exclude_modules"] == ["lm_head", "router"]


def test_a_kv_format_that_nobody_asked_for_goes() -> None:
    block = exported(kv_cache_quant_algo="FP8")
    assert corrected(block, HF, quant_spec(QFormat.FP8))["quantization"]["kv_cache_quant_algo"] is None
    kept = corrected(block, HF, quant_spec(QFormat.FP8, KvFormat.FP8))
    assert kept["quantization"]["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize(("qformat", "algo"), [(QFormat.INT8_WO, "W8A16"), (QFormat.INT4_WO, "W4A16")])
def test_weight_only_formats_are_named_for_the_build(qformat, algo) -> None:
    assert corrected(exported(quant_algo=None), HF, quant_spec(qformat))["quantization"]["quant_algo"] == algo


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_taken_from_either_style(key) -> None:
    block = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    config = corrected(exported(), HF | {key: block}, quant_spec(QFormat.FP8))
    assert config["rotary_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["rotary_base"] == 1e6  # of the block, not the 5e5 beside it


def test_the_empty_quant_cfg_of_a_float_export_goes(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(exported(quant_algo=None)))
    (tmp_path / "quant_cfg.json").write_text("{}")
    correct_export(tmp_path, HF, quant_spec(QFormat.NONE))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
