"""A folder of a mixture of experts, of which config.json suffices, is sized as the model of that name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.language_model import language_config, whole
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.registry import LLM_API
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.models import engine_of, known_model, model_named
from pipelines.predict.performance.performance import PerformanceModel, Setup, checkpoint_text
from pipelines.predict.simulate.case import make_case
from pipelines.predict.sizing.question import ask
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from tests.unit.sizing.test_size_command import NO_GPU

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 61,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
IN_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 60, "hidden_size": 5120,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "n_routed_experts": 160,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "vocab_size": 102400,
}  # fmt: skip
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 46, "hidden_size": 4096, "head_dim": 128,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "num_attention_heads": 96, "num_key_value_heads": 8,
    "vocab_size": 151552, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "use_qk_norm": False,
}  # fmt: skip
LLAMA_4_TEXT = {
    "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "head_dim": 128,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 2,
    "num_local_experts": 128, "num_experts_per_tok": 1, "num_attention_heads": 40, "num_key_value_heads": 8,
    "attention_chunk_size": 8192, "vocab_size": 202048, "max_position_embeddings": 1048576, "rope_scaling": None,
}  # fmt: skip
LLAMA_4 = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": LLAMA_4_TEXT,
    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34},
}  # fmt: skip
SCOUT = {"interleave_moe_layer_step": 1, "num_local_experts": 16, "max_position_embeddings": 10485760}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960,
    "mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
QWEN3_235B = {"num_hidden_layers": 94, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_attention_heads": 64}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 36, "hidden_size": 2880, "head_dim": 64,
    "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 201088, "max_position_embeddings": 131072, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GPT_OSS_20B = {"num_hidden_layers": 24, "num_local_experts": 32}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 56, "hidden_size": 6144, "intermediate_size": 16384,
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 48, "num_key_value_heads": 8,
    "vocab_size": 32768, "max_position_embeddings": 65536, "sliding_window": None,
}  # fmt: skip


def shape_of(config: dict) -> ModelShape:
    text = language_config(config, "config.json") if whole(config) else config
    return ModelShape.from_hf_config(text, buildable=False)


def folder(path: Path, config: dict, quantization: dict | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if quantization is not None:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return path


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("deepseek-r1", DEEPSEEK_V3 | {"quantization_config": IN_BLOCKS}),
        ("deepseek-v3", DEEPSEEK_V3),
        ("llama-4-maverick", LLAMA_4),
        ("llama-4-maverick", LLAMA_4_TEXT | {"architectures": ["Llama4ForCausalLM"]}),
        ("llama-4-scout", LLAMA_4 | {"text_config": LLAMA_4_TEXT | SCOUT}),
        ("qwen3-30b-a3b", QWEN3_MOE),
        ("qwen3-235b-a22b", QWEN3_MOE | QWEN3_235B),
        ("gpt-oss-120b", GPT_OSS),
        ("gpt-oss-20b", GPT_OSS | GPT_OSS_20B | {"layer_types": ["sliding_attention", "full_attention"] * 12}),
        ("mixtral-8x22b", MIXTRAL),
    ],
)
def test_a_config_json_as_published_is_the_model_of_that_name(name, config):
    read, named = shape_of(config), model_named(name)
    assert (read, read.mxfp4) == (named, named.mxfp4)


@pytest.mark.parametrize(
    ("config", "total", "active", "kv_bytes"),
    [
        (DEEPSEEK_V2, 236e9, 21e9, 60 * 576 * 2),
        (DEEPSEEK_V3 | {"n_routed_experts": 384, "num_attention_heads": 64, "first_k_dense_replace": 1}
         | {"num_key_value_heads": 64, "vocab_size": 163840, "model_type": "kimi_k2"}, 1.03e12, 32e9, 70_272),
        (DEEPSEEK_V2 | {"num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944, "q_lora_rank": None}
         | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "num_attention_heads": 16}
         | {"num_key_value_heads": 16}, 15.7e9, 2.66e9, 31_104),
        (GLM_4_5_AIR, 106e9, 12.8e9, 46 * 8 * 2 * 128 * 2),
    ],
)  # fmt: skip
def test_siblings_have_their_published_sizes(config, total, active, kv_bytes):
    """DeepSeek V2, Kimi K2, DeepSeek V2 Lite and GLM-4.5 Air; of the last, 12e9 for a token leave the embedding out."""
    shape = shape_of(config)
    assert shape.num_params == pytest.approx(total, rel=0.01)
    assert shape.active_params + 2 * shape.head_params == pytest.approx(active, rel=0.05)
    assert 2 * shape.num_hidden_layers * shape.kv_width == kv_bytes


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"moe_layer_freq": 2}, "has moe_layer_freq=2. It must be 1"),
        ({"n_routed_experts": None}, "has no 'n_routed_experts'"),
        ({"kv_lora_rank": "x"}, "has kv_lora_rank='x'"),
        ({"first_k_dense_replace": 99}, "has 99 layers without experts, but num_hidden_layers=61"),
        ({"num_experts_per_tok": 999}, "num_experts_per_tok=999, but only 256 experts"),
    ],
)
def test_a_mixture_whose_layers_are_not_stated_is_refused(keys, fault):
    with pytest.raises(UserError, match=fault):
        shape_of(DEEPSEEK_V3 | keys)


def test_the_layers_with_chunks_are_those_that_config_json_names():
    stated = {"no_rope_layers": [1, 1, 1, 0] * 12, "moe_layers": list(range(1, 48, 2))}
    with_text = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": LLAMA_4_TEXT | stated}
    assert shape_of(with_text) == model_named("llama-4-maverick")
    in_whole = LLAMA_4 | {"text_config": LLAMA_4_TEXT | {"attention_chunk_size": None}}
    assert shape_of(in_whole).window_layers == 0
    uneven = LLAMA_4 | {"text_config": LLAMA_4_TEXT | {"no_rope_layers": [1, 0] * 12 + [1] * 24}}
    with pytest.raises(UserError, match="no regular pattern of layers with chunks"):
        shape_of(uneven)


PLAIN = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
FP8_OF_LLM_COMPRESSOR = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
    "ignore": ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:vision_model.*"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config", "quantization", "form", "kept"),
    [
        ("deepseek-r1", DEEPSEEK_V3 | {"quantization_config": IN_BLOCKS}, None, "fp8", "blocks"),
        ("deepseek-r1", DEEPSEEK_V3, [f"model.layers.{n}.self_attn.{each}" for n in range(61) for each in PLAIN],
         "nvfp4", "q_kv"),
        ("deepseek-v3", DEEPSEEK_V3, [f"model.layers.{n}.self_attn*" for n in range(61)], "nvfp4", "attention"),
        ("llama-4-maverick", LLAMA_4, None, "none", None),
        ("llama-4-maverick", LLAMA_4, ["*router*", "vision_model*"], "nvfp4", ""),
        ("", LLAMA_4 | {"quantization_config": FP8_OF_LLM_COMPRESSOR}, None, "fp8", "attention"),
        ("", DEEPSEEK_V3 | {"quantization_config": {"quant_method": "awq", "bits": 4}}, None, "awq", ""),
        ("", DEEPSEEK_V3 | {"quantization_config": {"quant_method": "modelopt", "quant_algo": [8]}}, None, "[8]", ""),
    ],
)  # fmt: skip
def test_a_folder_says_its_format_and_what_it_keeps(tmp_path, name, config, quantization, form, kept):
    """Bytes, iteration times and their provenance are those of the name, whose folder was published."""
    block = quantization and {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", *quantization]}
    settings = load([f"model.path={folder(tmp_path, config, block)}"])
    model = known_model(settings)
    assert (list(model.published), model.in_16_bit.get(form)) == ([form], kept)
    assert engine_of(settings, model) is LLM_API
    if name:
        gpu = gpu_named("b200_sxm")
        ours = Setup(model, gpu, QFormat(form), KvFormat.FP8, tp=8, attention_dp=True)
        theirs = replace(ours, model=model_named(name))
        cost, of_name = (PerformanceModel.load().cost(each) for each in (ours, theirs))
        assert cost == replace(of_name, why=of_name.why.replace(name, model.name))
        assert ours.weight_bytes == theirs.weight_bytes
        assert checkpoint_text(ours) == f"{tmp_path} as published, not made here"
        other = replace(ours, qformat=QFormat.INT4_AWQ)
        assert f"in int4_awq is known here (only {form}), and none is made" in checkpoint_text(other)


MIXED = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}},
}  # fmt: skip
GATE, BLOCKS = "quantized_layers.model.layers.0.mlp.up_proj.quant_algo='FP8'", "weight_block_size=[128, 128]"
IN_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
INT4 = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}


@pytest.mark.parametrize(
    ("block", "quant", "text"),
    [
        (INT4, "none", "is in int4_gptq; the figures are of quant=none of its 16-bit original"),
        (INT4, "int4_gptq", "as published"),
        (MIXED, "none", f"is in several formats with {GATE}; the figures are of quant=none of its 16-bit original"),
        ({"quant_method": "hqq"}, "fp8", "is in hqq; the figures are of quant=fp8 of its 16-bit original"),
        (IN_BLOCKS, "fp8", f"is in fp8 with {BLOCKS}; the figures are of quant=fp8 of its 16-bit original"),
        (IN_FP8, "fp8", "as published"),
        (None, "fp8", ""),
    ],
)
def test_a_quantized_folder_that_is_built_here_is_said(tmp_path, block, quant, text):
    """What would be made is not made from this folder; before, sizes of another format were given without a word."""
    llama = json.loads((BUNDLED / "models/tiny_llama/config.json").read_text())
    given = folder(tmp_path, llama | ({"quantization_config": block} if block else {}))
    settings = load(
        [f"model.path={given}", f"quant={quant}", "hardware=h100_sxm", "sizing.peak_rate=5", "sizing.tp=[1]"]
    )
    (setup,) = ask(settings, NO_GPU).setups()
    assert checkpoint_text(setup) == (f"{given} {text}" if text else "")
    folders = [note for note in make_case(settings, NO_GPU).notes if note.startswith("folder")]
    assert folders == ([f"folder: {given} {text}"] if text else [])


def test_other_commands_refuse_the_architecture_before_anybody_fetches_its_weights(tmp_path, capsys):
    assert main(["build", f"model.path={folder(tmp_path, LLAMA_4)}"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "'Llama4ForCausalLM', which this project does not build: some of its layers have experts" in error
    assert "Only make size and make simulate read its config.json." in error
    assert "safetensors" not in error
