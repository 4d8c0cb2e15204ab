"""A whole LLaVA in model.path: what is planned, and what is refused, from its config.json."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipelines.checkpoint.llava import VisionShape, check_processor, vision_name
from pipelines.checkpoint.tensors import stored_tensors
from pipelines.domain.errors import UserError
from pipelines.domain.language_model import language_config, language_name
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.domain.units import show_bytes
from pipelines.engines.openvino.memory import Precision, vision_memory
from pipelines.plan.memory_checks import ENGINE, MemoryFit, check_cpu, cpu_needs
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from pipelines.store.store import Store
from tests.unit.core.test_machine import MACHINE

TRAINED = BUNDLED / "models" / "tiny_llama"
LLAVA_1_5 = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
        "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064,
    },
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}  # fmt: skip
"""As llava-hf/llava-1.5-7b-hf has it: Llama's sizes are left out."""


def plan(tmp_path: Path, words: list[str], target: str) -> Any:
    return make_plan(load(words), target, Store(tmp_path / "store"), MACHINE)


def write_folder(folder: Path, **changes: Any) -> Path:
    """Write a folder with tiny_llama's sizes and one tensor."""
    folder.mkdir(parents=True)
    text = json.loads((TRAINED / "config.json").read_text())
    small = {"hidden_size": 48, "image_size": 32, "patch_size": 8, "num_attention_heads": 4, "num_hidden_layers": 4}
    vision = {**LLAVA_1_5["vision_config"], **small, **changes.pop("vision_config", {})}
    config = {
        **LLAVA_1_5,
        "text_config": {**text, **changes.pop("text_config", {})},
        "vision_config": vision,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"multi_modal_projector.linear_1.weight": np.zeros((2, 2), np.float16)}, folder / "model.safetensors")
    for file in TRAINED.glob("*token*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_sizes_of_llava_1_5_are_those_of_the_classes() -> None:
    shape = VisionShape.of(LLAVA_1_5, "config.json")
    assert (shape.visual_tokens, shape.layers, shape.output_size) == (576, 23, 4096)
    config = language_config(LLAVA_1_5, "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert [config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size", "dtype")] == [
        4096, 32, 32064, "float16",
    ]  # fmt: skip


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "gemma-3-4b-it": (
        3_880_000_000,
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
        },
    ),
    "Mistral-Small-3.1-24B-Instruct-2503": (
        23_570_000_000,
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {
                "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "model_type": "mistral",
                "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
                "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131072,
            },
        },
    ),
    "Qwen2.5-VL-7B-Instruct": (
        7_616_000_000,
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 3584,
            "intermediate_size": 18944, "max_position_embeddings": 128000, "num_attention_heads": 28,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1e6,
            "sliding_window": 32768, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
    ),
    "Qwen3-VL-8B-Instruct": (
        8_191_000_000,
        {
            "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": False,
            "text_config": {
                "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 262144,
                "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36,
                "num_key_value_heads": 8, "rope_theta": 5e6, "vocab_size": 151936,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            },
        },
    ),
}  # fmt: skip
"""Of the hub: parameters of the language model, and what config.json says of it."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_language_models_of_published_folders_have_their_size(name: str) -> None:
    params, config = PUBLISHED[name]
    read = language_config(config, "config.json")
    assert ModelShape.from_hf_config(read).num_params == pytest.approx(params, rel=1e-3)
    assert Rotary.of(read).kind == ("linear" if name.startswith("gemma") else "default")


def test_a_whole_model_in_another_place_is_refused_with_the_way() -> None:
    with pytest.raises(UserError, match=r"'Gemma3ForConditionalGeneration'.*Give its folder as model\.path"):
        ModelShape.from_hf_config(PUBLISHED["gemma-3-4b-it"][1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": {"model_type": "mistral4"}}, r"type 'mistral4'\. Read is mistral or ministral3"),
        (
            {"text_config": {"model_type": "mistral"}, "quantization_config": {"quant_method": "fp8"}},
            "is of a quantized",
        ),
    ],
)
def test_other_language_models_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        language_config({"architectures": ["Mistral3ForConditionalGeneration"], **changes}, "config.json")


def test_the_plan_says_that_pictures_are_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "llava")
    notes = plan(tmp_path, [f"model.path={path}", "engine=openvino", "quant=none"], "build").notes
    assert any("LlavaForConditionalGeneration alone; requests with pictures are refused" in note for note in notes)


def test_names_of_both_layouts(tmp_path: Path) -> None:
    for name in ("language_model.model.norm.weight", "model.language_model.norm.weight"):
        assert language_name(name) == "model.norm.weight"
    assert language_name("lm_head.weight") == language_name("language_model.lm_head.weight") == "lm_head.weight"
    names = ("vision_tower.vision_model.x", "model.vision_tower.vision_model.x", "vision_tower.x")
    assert {vision_name(name) for name in names} == {"vision_tower.x"}
    assert language_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert language_name("visual.blocks.0.norm1.weight") is language_name("model.visual.merger.mlp.0.bias") is None
    assert language_name("vision_tower.x") is vision_name("lm_head.weight") is None
    both = {name: np.zeros(1) for name in ("language_model.model.norm.weight", "model.language_model.norm.weight")}
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'language_model\.model\.norm.* 'model\.language_model\.norm"):
        stored_tensors(tmp_path, language_name)


def test_the_language_model_is_taken_out_first(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "llava")
    words = [f"model.path={path}", "multimodal=llava", "multimodal.visual_tokens=16", "engine=openvino", "quant=fp8"]
    found = {step.node.id: step.node for step in plan(tmp_path, words, "repository").steps}
    assert next(iter(found)) == "language_model"
    assert found["quantize"].inputs["model"] == found["repository"].inputs["model"] == "language_model"
    assert found["repository"].inputs["vision_engine"] == "vision"
    assert found["build"].stage.build.max_prompt_embedding_table_size == 16 * found["build"].stage.build.max_batch_size
    alone = {step.node.id for step in plan(tmp_path, [f"model.path={path}", "engine=openvino"], "build").steps}
    assert alone == {"language_model", "quantize", "build"}


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({}, (), "visual_tokens=576, but the encoder of .* gives 16"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, (), "an encoder of type 'siglip_vision_model'"),
        ({"vision_config": {"patch_size": 5}}, (), "do not divide its width or image_size"),
        ({"vision_feature_layer": [-2, -5]}, (), r"vision_feature_layer=\[-2, -5\]"),
        ({"projector_hidden_act": "relu"}, (), "projector_hidden_act='relu'"),
        (
            {"text_config": {"model_type": "qwen2"}},
            (),
            "language model of type 'qwen2'. Read is llama or mistral",
        ),
        ({"text_config": {"model_type": ["llama"]}}, (), r"language model of type \['llama'\]"),
        ({"text_config": {"hidden_size": "x"}}, (), "hidden_size='x'. It must be a whole number"),
        ({"vision_config": {"layer_norm_eps": None}}, (), "layer_norm_eps=None. It must be a number"),
        ({"image_token_index": None}, (), "image_token_index=None. It must be the number of a token"),
        ({"quantization_config": {"quant_method": "awq"}}, (), "is of a quantized LlavaFor"),
        ({}, ("multimodal.visual_tokens=16", "build.max_prompt_embedding_table_size=15"), "=15 is less than"),
        (
            {},
            ("multimodal.visual_tokens=16", "speculative=draft_target", "model@speculative.draft=tiny_llama_draft"),
            "with speculative=draft_target is not supported",
        ),
        (
            {},
            ("multimodal.visual_tokens=16", f"multimodal.path={TRAINED}"),
            r"names the architectures \['LlamaForCausalLM'\]",
        ),
        (
            {"architectures": ["LlavaOnevisionForConditionalGeneration"]},
            (f"multimodal.path={TRAINED}",),
            "LlavaOnevisionForConditionalGeneration",
        ),
    ],
)
def test_what_cannot_be_built_is_named(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...], said: str
) -> None:
    path = write_folder(tmp_path / "llava", **changes)
    with pytest.raises(UserError) as caught:
        plan(tmp_path, [f"model.path={path}", "multimodal=llava", "engine=openvino", *words], "repository")
    assert re.search(said, str(caught.value))


PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3,
    "do_center_crop": True, "crop_size": 32, "size": {"shortest_edge": 32}, "do_pad": None, "do_resize": True,
}  # fmt: skip


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    ("processor", "words"),
    [
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": True}, "do_pad=True, but .* with do_pad=False"),
        ({"size": {"height": 32, "width": 32}}, r"size=\{'height': 32, .* with size=\{'shortest_edge': 32\}"),
        ({"size": 64, "crop_size": {"height": 64, "width": 64}}, r"has size=64, (.|\n)* has crop_size=\{'height': 64"),
        ({"resample": 2}, "resample=2"),
        ({"do_center_crop": False}, "do_center_crop=False"),
        ({"do_normalize": False}, "do_normalize=False"),
        ({"rescale_factor": 1.0}, r"rescale_factor=1\.0"),
        ({"do_pad": True, "size": 32}, ""),  # CLIP's class does not read the one, and means the other
    ],
)
def test_a_processor_that_prepares_pictures_otherwise_is_named(
    tmp_path: Path, file: str, processor: dict[str, Any], words: str
) -> None:
    """Transformers' classes give other pixels for each of them."""
    path, whole = write_folder(tmp_path / "llava"), {**PROCESSOR, **processor}
    (path / file).write_text(json.dumps(whole if file.startswith("pre") else {"image_processor": whole}))
    with pytest.raises(UserError, match=words) if words else nullcontext():
        check_processor(path, VisionShape.read(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"image_processor_type": "LlavaImageProcessor", "do_pad": true}', "has do_pad=True"),  # the mean left out
        ("[]", r"preprocessor_config\.json is not a JSON object: it holds a list"),
        ("{bad", r"preprocessor_config\.json is not valid JSON"),
    ],
)
def test_a_processor_file_is_judged_or_refused_whatever_it_holds(tmp_path: Path, content: str, words: str) -> None:
    path = write_folder(tmp_path / "llava")
    (path / "preprocessor_config.json").write_text(content)
    with pytest.raises(UserError, match=words):
        check_processor(path, VisionShape.read(path))


def test_the_plan_names_a_processor_with_other_tiles(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "llava", **TILED)
    other = {**PROCESSOR, "image_grid_pinpoints": [[32, 64]], "size": {"height": 32, "width": 32}}
    (path / "preprocessor_config.json").write_text(json.dumps(other))
    with pytest.raises(UserError) as caught:
        plan(tmp_path, [f"model.path={path}", "multimodal=llava", "engine=openvino", *FITS], "repository")
    assert re.search(r"image_grid_pinpoints=\[\[32, 64\]\], but .*=\[\[32, 64\], \[64, 64\]\]", str(caught.value))
    assert "has size" not in str(caught.value)  # tiles are square already


TILED = {
    "architectures": ["LlavaNextForConditionalGeneration"],
    "model_type": "llava_next",
    "image_grid_pinpoints": [[32, 64], [64, 64]],
}  # fmt: skip
MOST = 16 + 8 * 9
"""Visual tokens of a picture that fills 64 x 64 pixels."""
FITS = (f"multimodal.visual_tokens={MOST}",)


def test_the_most_tokens_of_llava_1_6_are_those_of_its_largest_square() -> None:
    text = {"intermediate_size": 14336, "model_type": "mistral", "num_key_value_heads": 8, "vocab_size": 32064}
    config = {**LLAVA_1_5, **TILED, "image_grid_pinpoints": None, "text_config": {**text, "sliding_window": None}}
    shape = VisionShape.of(config, "config.json")
    assert (shape.visual_tokens, shape.tiling.features, shape.tiling.most_tiles) == (2928, 576, 5)
    assert shape.activation_bytes(2) == 10 * VisionShape.of(LLAVA_1_5, "config.json").activation_bytes(1)
    language = language_config(config, "config.json")
    assert [language[name] for name in ("architectures", "hidden_size", "sliding_window")] == [
        ["MistralForCausalLM"], 4096, None,
    ]  # fmt: skip


def write_newline(folder: Path, width: int = 256) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({"image_newline": np.zeros(width, np.float16)}, folder / "model-2.safetensors")


def test_the_table_has_room_for_the_most_and_a_load_counts_its_own(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "llava", **TILED)
    write_newline(path)
    words = [f"model.path={path}", "multimodal=llava", *FITS, "engine=openvino", "quant=int4_rtn"]
    made = plan(tmp_path, [*words, "workload.images=1", "workload.image_side=300"], "benchmark")
    found = {step.node.id: step.node.stage for step in made.steps}
    assert found["build"].build.max_prompt_embedding_table_size == MOST * found["build"].build.max_batch_size
    assert found["benchmark"].visual_tokens == MOST
    assert (
        "a picture: up to 88 tokens of up to 5 tiles, depending on its size; the engine has room for 704"
        in " ".join(made.notes)
    )
    made = plan(tmp_path, [*words, "workload.images=1", "workload.image_side=10"], "benchmark")
    assert {step.node.id: step.node.stage for step in made.steps}["benchmark"].visual_tokens == 16 + 4 * 5


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({}, (), r"visual_tokens=576, but the encoder of .* gives up to 88 for one picture\. Set .*=88"),
        ({}, (*FITS, "build.max_input_len=88"), "max_input_len=88 has no room for a picture's 88 visual tokens"),
        (
            {"image_grid_pinpoints": None},
            FITS,
            r"has no image_grid_pinpoints, so that they .*336.* multiples of .* 32\.",
        ),
        (
            {"image_grid_pinpoints": [[32, 65]]},
            FITS,
            r"pinpoints=\[\[32, 65\]\]: \[32, 65\] is not cut into whole tiles",
        ),
        (
            {"image_grid_pinpoints": [64]},
            FITS,
            r"pinpoints=\[64\]\. They must be a list of \[height, width\]",
        ),
        ({"image_grid_pinpoints": [[3200, 3200]]}, FITS, "gives up to 160,416 visual tokens"),
        ({"image_grid_pinpoints": [[32 * 10**8] * 2]}, FITS, "gives up to 160,000,000,400,000,016 visual tokens"),
        ({"vision_feature_select_strategy": "full"}, FITS, "strategy='full' with tiles"),
        ({}, ("engine=tensorrt_llm", "hardware=h100_sxm"), "of a LLaVA 1.6 is not supported by engine=tensorrt_llm"),
        ({"newline": 5}, FITS, r"has image_newline of the shape \[5\]; features have 256 values"),
        ({"newline": None}, FITS, "has no image_newline; features have 256 values"),
    ],
)
def test_tiles_that_cannot_be_built_are_named(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...], said: str
) -> None:
    changes = {**TILED, **changes}
    newline = changes.pop("newline", 256)
    path = write_folder(tmp_path / "llava", **changes)
    if newline is not None:
        write_newline(path, newline)
    with pytest.raises(UserError, match=said):
        plan(tmp_path, [f"model.path={path}", "multimodal=llava", "engine=openvino", *words], "repository")


@pytest.mark.parametrize(
    ("tiles", "activations"), [({}, 23_652_384), ({**TILED, "image_grid_pinpoints": None}, 118_261_920)]
)
def test_the_encoders_own_process_is_one_more_line_of_memory(tiles: dict[str, Any], activations: int) -> None:
    """LLaVA 7B, 23 of 24 layers: 311,571,456 weights; 2 * 577 * (7 * 1,024 + 4,096 + 16 * 577) bytes a tile."""
    encoder = VisionShape.of({**LLAVA_1_5, **tiles}, "config.json")
    memory, narrow = vision_memory(encoder, "f32"), vision_memory(encoder, "bf16")
    assert (memory.weights, narrow.weights, memory.activations) == (4 * 311_571_456, 2 * 311_571_456, activations)
    assert memory.total == (45 + 78) * 2**20 + 6 * 311_571_456 + activations


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_served_llava_lists_its_encoders_memory(tmp_path: Path, precision: Precision) -> None:
    words = ["model=tiny_llava", "engine=openvino", "quant=int4_awq"]
    words.append(f"engine.openvino.inference_precision={precision}")
    (line,) = [note for note in plan(tmp_path, words, "repository").notes if "a process of its own" in note]
    memory = vision_memory(VisionShape.read(BUNDLED / "models/tiny_llava"), precision)
    assert line.startswith(
        f"vision encoder, a process of its own: {show_bytes(memory.total)} (process 45.0 MiB, weights"
    )
    assert not [note for note in plan(tmp_path, words, "build").notes if "a process of its own" in note]


@pytest.mark.parametrize(
    ("target", "words"), [("serve", "vision encoder, a process of its own"), ("evaluate", "vision encoder")]
)
def test_memory_is_refused_by_the_sum_that_is_listed(target: Any, words: str, tmp_path: Path) -> None:
    """The engine alone would fit; where pictures are scored, the encoder is in the engine's process."""
    made = plan(tmp_path, ["model=tiny_llava", "engine=openvino", "quant=int4_awq"], target)
    needs = cpu_needs(made.deployment)
    engine, encoder = needs[ENGINE], needs[words]
    others = sum(each.process for name, each in needs.items() if name not in (ENGINE, words))
    assert all(
        any(note.startswith(f"{name}: {show_bytes(each.total)} (") for note in made.notes)
        for name, each in needs.items()
    )
    assert bool(encoder.process) == (target == "serve")
    held = int(engine.process + engine.weights + engine.kv_pool + encoder.own + others)
    for room, message in ((held - 2**16, "needs"), (int(engine.own + encoder.own + others) - 2**16, "may take")):
        fit = check_cpu(made.settings, needs, room)
        (fault,) = fit.faults + fit.warnings
        assert f" {message} " in fault.message
        assert f", {words} {show_bytes(encoder.own)}" in fault.allowed
    assert check_cpu(made.settings, needs, engine.own + encoder.own + others) == MemoryFit()
    small = replace(MACHINE, memory_bytes=held - 2**16)
    with pytest.raises(UserError, match=f"engine=openvino needs .*{words}"):
        make_plan(made.settings, target, Store(tmp_path / "store"), small)


def test_a_llava_is_no_draft(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "llava")
    words = ["model=tiny_llama", "speculative=draft_target", f"speculative.draft.path={path}", "engine=openvino"]
    with pytest.raises(UserError, match="is a whole LlavaForConditionalGeneration"):
        plan(tmp_path, words, "repository")


def test_tiny_llava_needs_no_other_setting(tmp_path: Path) -> None:
    made = plan(tmp_path, ["model=tiny_llava", "quant=int4_awq"], "all")
    assert made.settings.multimodal.visual_tokens == 36
    assert made.settings.eval.task == "mini_pictures"
    inputs = {step.node.id: step.node.inputs for step in made.steps}
    assert inputs["evaluate"]["vision_engine"] == inputs["baseline.evaluate"]["vision_engine"] == "vision"
    assert any("vision encoder: 16 bit" in note and "int4_awq" in note for note in made.notes)


def test_text_is_asked_without_the_encoder(tmp_path: Path) -> None:
    made = plan(tmp_path, ["model=tiny_llava", "quant=int4_awq", "eval=mini_mmlu"], "evaluate")
    assert "vision" not in [step.node.id for step in made.steps]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["model=tiny_llama", "eval=mini_pictures"], "tiny_llama reads text alone"),
        (["model=tiny_llava", "multimodal=none"], "tiny_llava reads text alone"),
        (["model=tiny_llava", "eval.baseline=hugging_face"], "eval.baseline=hugging_face is not shown"),
        (["model=tiny_llava", "eval.url=http://localhost:1/v1"], "eval.url=http://localhost:1/v1 is not shown"),
    ],
)
def test_questions_about_pictures_need_somebody_who_sees(tmp_path: Path, words: list[str], match: str) -> None:
    with pytest.raises(UserError, match=match):
        plan(tmp_path, words, "evaluate")
