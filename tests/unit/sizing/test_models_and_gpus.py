"""Models and GPUs by name."""

import csv
import json
from dataclasses import replace

import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.predict.performance.gpus import gpu_named, gpus
from pipelines.predict.performance.memory import EngineSizes, activation_bytes, gathered_bytes, rank_weight_bytes
from pipelines.predict.performance.models import MODELS, model_named, models
from pipelines.settings.compose import load


def read(config):
    """The shape in a config.json of any architecture."""
    return ModelShape.from_hf_config(config, buildable=False)


def test_sizes_of_a_row_give_its_published_number_of_weights(subtests):
    """Parameters are counted from the sizes to within 1e-4 (routers, biases and QK norms are left out)."""
    for row in list(csv.DictReader(MODELS.open())):
        with subtests.test(row["model"]):
            model = models()[row["model"]]
            assert model.num_params == pytest.approx(float(row["params_total"]), rel=1e-4)
            assert EngineSizes(model, QFormat.NONE).kv_token_bytes == int(row["kv_bytes_per_token_16bit"])


@pytest.mark.parametrize(
    ("name", "total", "active", "kv_bytes"),
    [
        ("deepseek-ai/DeepSeek-R1", 671e9, 37e9, 61 * 576 * 2),
        ("deepseek-v3", 671e9, 37e9, 70_272),
        ("openai/gpt-oss-120b", 116.83e9, 5.13e9, 73_728),  # its card counts the output head and no embedding
        ("gpt-oss-20b", 20.91e9, 3.61e9, 49_152),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 400e9, 17e9, 196_608),
        ("llama-4-scout", 109e9, 17e9, 196_608),  # with 0.9e9 of the vision model
    ],
)
def test_mixtures_of_2026_are_known_by_name_with_their_published_sizes(name, total, active, kv_bytes):
    model = model_named(name)
    tables = model.head_params * (1 if name.endswith("b") else 2)
    assert model.num_params == pytest.approx(total, rel=0.013)
    assert model.active_params + tables == pytest.approx(active, rel=0.013)
    assert EngineSizes(model, QFormat.NONE).kv_token_bytes == kv_bytes


def test_latent_vectors_are_whole_on_each_rank_and_halved_by_an_8_bit_cache():
    sizes = EngineSizes(model_named("deepseek-r1"), QFormat.FP8, KvFormat.FP8, tp_size=8)
    assert sizes.kv_token_bytes == 61 * 576


def test_a_published_checkpoint_keeps_what_its_publisher_kept():
    """NVIDIA's DeepSeek R1 in NVFP4 has of attention only the output projection in 4 bit; V3 keeps all of it."""
    model, older = model_named("deepseek-r1"), model_named("deepseek-v3")
    kept = 61 * (7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256)
    assert model.params_in_16_bit(QFormat.NVFP4) == kept
    assert older.params_in_16_bit(QFormat.NVFP4) == kept + 61 * 128 * 128 * 7168
    whole = rank_weight_bytes(EngineSizes(model, QFormat.NVFP4))
    tables = 2 * 2 * 129280 * 7168
    assert whole == pytest.approx(2 * kept + 4.5 / 8 * (model.linear_params - kept) + tables, rel=1e-3)
    assert rank_weight_bytes(EngineSizes(model, QFormat.FP8)) == pytest.approx(model.linear_params + tables, rel=1e-3)


@pytest.mark.parametrize(("name", "stages", "layers"), [("deepseek-r1", 2, 30), ("deepseek-r1", 4, 15)])
def test_the_fullest_pipeline_stage_has_only_layers_with_experts(name, stages, layers):
    """DeepSeek R1 has 61 layers, of which the first 3 are dense: with 2 stages, the second has 30 with 256 experts."""
    shape = model_named(name)
    layer = shape.attention_params + 3 * shape.hidden_size * shape.shared_size + 256 * shape.expert_params
    stage = layers * layer * 2 + 2 * shape.head_params  # the last one also has the head
    held = rank_weight_bytes(EngineSizes(shape, QFormat.NONE, pp_size=stages))
    assert stage < held < 1.01 * stage


def test_experts_are_shared_and_attention_is_not_where_it_is_data_parallel():
    model = model_named("llama-4-maverick")
    own = 24 * (3 * 5120 * (8192 + 16384)) + 48 * model.attention_params
    sizes = EngineSizes(model, QFormat.FP8, tp_size=8, attention_dp=True)
    assert rank_weight_bytes(sizes) == pytest.approx(own + model.routed_params / 8 + 4 * 202048 * 5120, rel=0.02)
    assert sizes.kv_token_bytes == 196_608
    assert sizes.lanes == 8


def test_experts_have_room_for_the_tokens_of_all_attention_data_parallel_ranks():
    """DeepSeek R1 on 8 ranks: 15.0 GB of workspace, 1.9 GB of states gathered and to be scattered."""
    sizes = EngineSizes(model_named("deepseek-r1"), QFormat.FP8, tp_size=8, attention_dp=True)
    assert gathered_bytes(sizes) == 8 * 8192 * (8 * 4 * 7168 + 4 * 7168)
    assert 16.9e9 < activation_bytes(sizes) < 19e9
    assert activation_bytes(replace(sizes, attention_dp=False)) < 2e9


def test_active_weights_of_a_mixture_are_those_of_its_experts_per_token():
    """Mixtral 8x7B: 12.88e9 active, of which 2 x 32000 x 4096 are tables."""
    mixtral = model_named("mixtral-8x7b")
    assert mixtral.active_params + 2 * mixtral.head_params == pytest.approx(12_879_925_248, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-3.3-70b", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("mistral-7b", "mistral-7b-v0.3"),
    ],
)
def test_models_are_found_under_the_names_people_use(text, name):
    assert model_named(text).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [("H100-SXM-80GB", "h100_sxm"), ("h100_sxm", "h100_sxm"), ("L40S-48GB", "l40s"), ("RTX-4090-24GB", "rtx_4090")],
)
def test_gpus_are_found_under_the_names_people_use(text, name):
    assert gpu_named(text).name == name


def test_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(UserError, match=r"model 'llama-3\.1-9b' is not known.*Did you mean 'llama-3\.1-8b'"):
        model_named("llama-3.1-9b")
    with pytest.raises(UserError, match=r"GPU 'H100-SMX-80GB' is not known.*Did you mean 'h100-sxm-80gb'"):
        gpu_named("H100-SMX-80GB")


def test_gpus_are_those_of_the_configuration():
    """FP8 needs Ada or later, FP4 Blackwell; rates are dense."""
    assert len(gpus()) == 27
    assert "fp8" not in gpu_named("a100_sxm_80gb").peak
    assert "fp4" not in gpu_named("h100_sxm").peak
    assert gpu_named("b200_sxm").peak["fp4"] == 9e15
    assert gpu_named("h100_sxm").nvlink == 450e9


@pytest.mark.parametrize("name", ["gemma_2b", "llama_3_8b"])
def test_conf_and_table_give_the_same_shape(name):
    """Settings and models.csv are two readers of one record."""
    settings = load([f"model={name}"]).model
    row = next(row for row in csv.DictReader(MODELS.open()) if row["hf_id"] == settings.hub_id)
    assert settings.shape.to_shape() == models()[row["model"]]


def test_all_experts_are_in_memory():
    """Mixtral 8x7B at 16 bit: 46.7e9 weights x 2 bytes."""
    sizes = EngineSizes(model_named("mixtral-8x7b"), QFormat.NONE)
    assert rank_weight_bytes(sizes) == pytest.approx(2 * 46_702_792_704, rel=1e-3)


def test_gpt_oss_is_sized_as_published():
    """In MXFP4, 12.8 GiB of gpt-oss-20b and 60.8 GiB of 120b (model card, table 1)."""
    config = MIXTURES["GptOssForCausalLM"][0] | {"architectures": ["GptOssForCausalLM"]}
    config |= {"quantization_config": {"quant_method": "mxfp4"}}
    small = {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": None}
    for changes, size in (({}, 60.8), (small, 12.8)):
        assert rank_weight_bytes(EngineSizes(read(config | changes), QFormat.NONE)) / 2**30 == pytest.approx(
            size, rel=0.01
        )


def test_windows_of_gemma_are_per_layer():
    assert model_named("gemma-3-27b").windows == (1024,) * 5 + (131072,)
    assert model_named("gemma-3-27b").window_layers == 62 - 10
    assert model_named("mistral-7b-v0.1").windows == (4096,)
    assert model_named("llama-3-8b").windows == ()


def test_a_config_json_gives_the_sizes():
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768}
    mixtral = read(
        {**config, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    )
    assert mixtral == models()["mixtral-8x7b"]
    with pytest.raises(UserError, match="has no 'hidden_size'"):
        read({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8})


MIXTURES = {
    "Qwen3MoeForCausalLM": (
        {"num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4}
        | {"head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128}
        | {"num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960},
        *(235e9, 22e9, 192_512),  # Qwen3-235B-A22B
    ),
    "GptOssForCausalLM": (
        {"num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
        | {"head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4}
        | {"vocab_size": 201088, "max_position_embeddings": 131072, "sliding_window": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 18},
        *(117e9, 5.1e9, 73_728),  # gpt-oss-120b
    ),
}
"""config.json, published weights in all and for one token, and bytes of KV cache of a token at 16 bit."""


@pytest.mark.parametrize("architecture", MIXTURES)
def test_mixtures_with_equal_layers_have_the_published_sizes(architecture):
    config, total, active, kv_bytes = MIXTURES[architecture]
    shape = read({"architectures": [architecture], **config})
    assert shape.num_params == pytest.approx(total, rel=0.005)
    assert shape.active_params + shape.head_params == pytest.approx(active, rel=0.04)
    assert 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim == kv_bytes


@pytest.mark.parametrize(
    ("architecture", "keys", "why"),
    [
        ("DeepseekV32ForCausalLM", {"kv_lora_rank": 512, "index_topk": 2048}, "an indexer with a cache of its own"),
        ("MiniCPM3ForCausalLM", {"kv_lora_rank": 256}, r"latent vectors \(MLA\)"),
        ("Dots1ForCausalLM", {"n_routed_experts": 128, "first_k_dense_replace": 1}, "which of its layers have experts"),
        ("Qwen3NextForCausalLM", {"linear_num_value_heads": 32, "num_experts": 512}, "linear attention"),
        ("KimiK25ForConditionalGeneration", {"text_config": {"kv_lora_rank": 512}}, "sizes are in text_config"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-M*"}, "state-space layers"),
        ("InventedForCausalLM", {}, "not modelled"),
        (None, {}, "names the architecture None"),
    ],
)
def test_architectures_that_the_shape_cannot_state_are_refused_by_name(tmp_path, capsys, architecture, keys, why):
    config = {"architectures": [architecture] if architecture else None, **SIZES, **keys}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=why) as raised:
        read(config)
    assert str(architecture) in str(raised.value)
    assert "sizing.measured=" in str(raised.value)
    for command in ("size", "simulate"):
        assert main([command, f"model.path={tmp_path}", "hardware=h100_sxm", "sizing.peak_rate=1"]) == 2
        assert str(architecture) in capsys.readouterr().err


AS_PUBLISHED = {
    "SmolLM3ForCausalLM": (
        {"num_hidden_layers": 36, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
        | {"intermediate_size": 11008, "vocab_size": 128256, "layer_types": ["full_attention"] * 36},
        *(3.08e9, ()),
    ),
    "Ernie4_5ForCausalLM": (
        {"num_hidden_layers": 18, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 2}
        | {"intermediate_size": 3072, "vocab_size": 103424},
        *(0.36e9, ()),
    ),
    "Exaone4ForCausalLM": (
        {"num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8}
        | {"head_dim": 128, "intermediate_size": 27392, "vocab_size": 102400, "max_position_embeddings": 131072}
        | {"sliding_window": 4096, "sliding_window_pattern": "LLLG"}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16},
        *(32.0e9, (4096, 4096, 4096, 131072)),
    ),
    "Olmo3ForCausalLM": (
        {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
        | {"vocab_size": 100278, "max_position_embeddings": 65536},
        *(7.3e9, (4096, 4096, 4096, 65536)),
    ),
    "GptOssForCausalLM": (
        {"num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "intermediate_size": 2880}
        | {"vocab_size": 201088},
        *(116.8e9, (128, 131072)),
    ),
    "SeedOssForCausalLM": (
        {"num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 80, "intermediate_size": 27648}
        | {"vocab_size": 155136},
        *(36.15e9, ()),
    ),
    "Glm4ForCausalLM": (
        {"num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 13696}
        | {"vocab_size": 151552, "sliding_window": 4096},
        *(9.4e9, ()),
    ),
}
"""config.json with what a published one leaves out, the published weights, and the windows."""


@pytest.mark.parametrize("architecture", AS_PUBLISHED)
def test_what_a_sized_family_leaves_out_is_what_transformers_takes(architecture):
    config, total, windows = AS_PUBLISHED[architecture]
    shape = read({"architectures": [architecture], **config})
    assert shape.num_params == pytest.approx(total, rel=0.005)
    assert shape.windows == windows


def test_a_mixture_states_how_many_experts_a_token_uses():
    mixture = {"architectures": ["InternLM3ForCausalLM"], **SIZES, "num_local_experts": 8}
    with pytest.raises(UserError, match="has no 'num_experts_per_tok'"):
        read(mixture)
    with pytest.raises(UserError, match="num_experts_per_tok=9, but only 8 experts"):
        read({**mixture, "num_experts_per_tok": 9})


def test_a_config_json_of_gemma_2_gives_what_it_leaves_out():
    """The output head is the embedding, every second layer has the window, and a layer has four norms."""
    gemma = model_named("gemma-2-9b")
    config = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 42, "hidden_size": 3584, "head_dim": 256}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 14336, "sliding_window": 4096}
    config |= {"vocab_size": 256000, "max_position_embeddings": 8192}
    assert read(config) == gemma


SIZES = {
    "num_hidden_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "config", "wanted"),
    [
        ("MistralForCausalLM", {"sliding_window": 1024}, {"sliding_window": 1024, "global_every": 0}),
        ("Qwen2ForCausalLM", {"sliding_window": 1024, "use_sliding_window": False}, {"sliding_window": 0}),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": 512, "sliding_window_pattern": 6},
            {"global_every": 6, "window_layers": 10, "norms_per_layer": 4, "tie_word_embeddings": True},
        ),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": 512, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4},
            {"global_every": 3},
        ),
        ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}, {"num_experts": 8}),
        (
            "Qwen3MoeForCausalLM",
            {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
            {"num_experts": 16, "num_experts_per_token": 4, "intermediate_size": 128},
        ),
    ],
)
def test_families_state_windows_and_experts_in_their_own_words(architecture, config, wanted):
    shape = ModelShape.from_hf_config({"architectures": [architecture], **SIZES, **config})
    assert {name: getattr(shape, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias=true: TensorRT-LLM's Qwen3 has no such bias"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "mlp_only_layers": [0]}, "has layers without experts"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "decoder_sparse_step": 2}, "has layers without experts"),
        ("Gemma3ForCausalLM", {"layer_types": "full"}, "has layer_types='full'"),
    ],
)
def test_configurations_that_no_engine_computes_are_refused(architecture, config, message):
    with pytest.raises(UserError, match=message):
        ModelShape.from_hf_config({"architectures": [architecture], **SIZES, **config})
