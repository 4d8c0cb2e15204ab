"""Files that later fail are refused while planning: weights, tokenizers, calibration texts, traces; and memory."""

import json
import re
import shutil
import struct
from codecs import BOM_UTF8
from dataclasses import replace

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.rotary import Rotary
from pipelines.plan.plan import make_plan
from pipelines.plan.user_inputs import _source
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from pipelines.store.manifest import HashCache
from pipelines.store.sources import files_source
from pipelines.store.store import Store
from tests.unit.core.test_machine import MACHINE, with_gpu

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n"


def plan(tmp_path, overrides, target="all", machine=MACHINE):
    return make_plan(load(overrides), target, Store(tmp_path / "store"), machine)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "my_llama"
    shutil.copytree(BUNDLED / "models" / "tiny_llama", folder)
    return folder


def change(folder, **values):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def sharded(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors", "b": "two"}}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: cut(m / "model.safetensors"), r"model\.safetensors is damaged or truncated: '.*' ends at byte"),
        (lambda m: (m / "model.safetensors").write_text(LFS), r"model\.safetensors is a Git LFS pointer of \d+ bytes"),
        (sharded, r"lacks 2 of the 2 files that .*index\.json names: one\.safetensors, two"),
        (lambda m: (m / "model.safetensors.index.json").write_text("[]"), r"is not an index of safetensors"),
        (lambda m: (m / "tokenizer.json").unlink(), r"my_llama' has no tokenizer\.json"),
        (lambda m: (m / "tokenizer.json").write_text("{"), r"tokenizer\.json is not valid JSON"),
        (lambda m: (m / "tokenizer.json").write_text(LFS), r"tokenizer\.json is a Git LFS pointer"),
        (lambda m: (m / "tokenizer.json").write_text(""), r"tokenizer\.json is empty"),
        (
            lambda m: change(m, rope_scaling={"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.2}),
            r"rotary positions by yarn with attention_factor=1\.2",
        ),
        (lambda m: change(m, partial_rotary_factor=0.5), r"partial_rotary_factor=0\.5"),
    ],
)
def test_a_model_that_later_fails_is_refused(tmp_path, model, spoil, message):
    spoil(model)
    with pytest.raises(UserError, match=message):
        plan(tmp_path, [f"model.path={model}"])


def test_models_in_other_layouts_are_refused_by_name(tmp_path, model):
    (model / "model.safetensors").unlink()
    native, made = tmp_path / "native", tmp_path / "made"
    for folder in native, made:
        folder.mkdir()
    (made / "config.json").write_text('{"architecture": "LlamaForCausalLM"}')
    for folder, file, layout in (
        (made, "rank0.safetensors", "a TensorRT-LLM checkpoint"),
        (made, "openvino_model.xml", "an OpenVINO model"),
        (model, "model-q4_0.gguf", "GGUF, llama.cpp's format"),
        (native, "params.json", "the layout of Mistral or Meta"),
        (native, "adapter_config.json", "a LoRA adapter"),
        (native, "rank0.engine", "a TensorRT engine"),
    ):
        (folder / file).write_bytes(b"")
        with pytest.raises(UserError, match=rf"{folder.name}' is {layout} \({file}\)"):
            plan(tmp_path, [f"model.path={folder}"])
        (folder / file).unlink()
    (alone := tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.gguf' is GGUF"):
        plan(tmp_path, [f"model.path={alone}"])


def test_a_name_of_the_hub_in_place_of_a_folder_is_told_where_it_belongs(tmp_path):
    with pytest.raises(UserError, match=r"For a model of the Hub: model=hub model\.hub_id=Qwen/Qwen3-8B$"):
        plan(tmp_path, ["model.path=Qwen/Qwen3-8B"])
    with pytest.raises(UserError, match=r"nothing' is not a folder\. Give a Hugging Face model folder\.$"):
        plan(tmp_path, [f"model.path={tmp_path}/nothing"])
    by_hand = r"For a repository of the Hub, first: hf download org/name --local-dir FOLDER"
    with pytest.raises(UserError, match=rf"lora\.adapters\.1='org/name' does not exist\. .*{by_hand}$"):
        plan(tmp_path, ["lora.adapters={1: org/name}"])
    with pytest.raises(UserError, match=rf"^multimodal\.path='.*org/name' does not exist\. .*{by_hand}$") as caught:
        plan(tmp_path, ["model=tiny_llava", "multimodal.path=org/name"])
    assert len(caught.value.faults) == 1
    with pytest.raises(UserError, match=r"multimodal\.path='.*config\.json' has no config\.json\."):
        plan(tmp_path, ["model=tiny_llava", f"multimodal.path={BUNDLED}/models/tiny_llava/config.json"])


def test_tokens_that_the_model_does_not_have_are_warned_of(tmp_path, model):
    """They were added to the tokenizer, and the model was saved without them."""
    assert not any("tokenizer has" in str(each) for each in plan(tmp_path, [f"model.path={model}"]).warnings)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    raw = json.loads((model / "tokenizer.json").read_text())
    raw["added_tokens"] += [{"id": size + number, "content": f"<|new{number}|>"} for number in range(4)]
    (model / "tokenizer.json").write_text(json.dumps(raw))
    (found,) = [each for each in plan(tmp_path, [f"model.path={model}"]).warnings if "tokenizer has" in str(each)]
    told = rf"has 4 tokens .*\('<\|new0\|>', '<\|new1\|>', '<\|new2\|>', \.\.\.\).*vocab_size={size}\."
    assert re.search(told, found.message)


def test_a_folder_of_models_names_those_in_it(tmp_path, model):
    """A repository of the Hub's cache and the folder of a training run are the usual cases."""
    for place in ("snapshots/abc", "checkpoint-500"):
        shutil.copytree(model, tmp_path / "run" / place)
    (tmp_path / "run" / "empty").mkdir()
    named = rf"'{tmp_path}/run/checkpoint-500', '{tmp_path}/run/snapshots/abc'\.$"
    with pytest.raises(
        UserError, match=rf"run' is not a Hugging Face model: it has no config\.json\. These .*: {named}"
    ):
        plan(tmp_path, [f"model.path={tmp_path}/run"])
    with pytest.raises(
        UserError, match=r"it has no config\.json\. Give a Hugging Face folder: config\.json, tokenizer"
    ):
        plan(tmp_path, [f"model.path={tmp_path}/run/empty"])


def test_all_damaged_files_of_a_model_are_named(tmp_path, model):
    shutil.copy(model / "model.safetensors", model / "more.safetensors")
    for path in model.glob("*.safetensors"):
        cut(path)
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError) as refused:
        plan(tmp_path, [f"model.path={model}"])
    assert len(refused.value.faults) == 3


def test_a_build_that_reads_no_text_needs_no_tokenizer(tmp_path, model):
    (model / "tokenizer.json").unlink()
    assert plan(tmp_path, [f"model.path={model}", "quant=int4_wo"], "build").steps
    with pytest.raises(UserError, match="has no tokenizer"):
        plan(tmp_path, [f"model.path={model}", "quant=fp8"], "build")


def test_a_draft_model_is_read_as_well(tmp_path, model):
    change(model, rope_scaling={"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32})
    words = ["model=tiny_llama", "speculative=draft_target", "model@speculative.draft=tiny_llama_draft"]
    with pytest.raises(UserError, match=r"speculative\.draft: .*rope_type 'longrope'"):
        plan(tmp_path, [*words, f"speculative.draft.path={model}"], "repository")


PHI = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "original_max_position_embeddings": 64}
LONG = {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}}


@pytest.mark.parametrize(
    ("changes", "words", "match"),
    [
        (
            {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 64},
            ["engine=openvino"],
            r"speculative\.draft: Gemma2ForCausalLM is not supported by engine=openvino",
        ),
        (
            PHI | LONG,
            ["engine=openvino", "build.max_seq_len=65"],
            r"speculative\.draft: .* longrope: sequences of more than 64 tokens",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 64}
            | {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            ["engine=tensorrt_llm", "hardware=h100_sxm"],
            r"speculative\.draft: .* rope_type 'linear', which TensorRT-LLM's Gemma 3 would compute in another way",
        ),
    ],
)
def test_a_draft_model_is_judged_by_the_engine_that_builds_it(tmp_path, model, changes, words, match):
    change(model, **changes)
    draft = ["speculative=draft_target", "model@speculative.draft=tiny_llama_draft", f"speculative.draft.path={model}"]
    with pytest.raises(UserError, match=match):
        plan(tmp_path, ["model=tiny_llama", "quant=none", "build.max_input_len=40", *draft, *words], "repository")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Rotary("default", 1.0)),
        ({"rope_scaling": None}, Rotary("default", 1.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rotary("linear", 1.0)),
        ({"rope_parameters": {"rope_type": "llama3", "partial_rotary_factor": 0.25}}, Rotary("llama3", 0.25)),
    ],
)
def test_both_spellings_of_rotary_settings_are_read(config, expected):
    assert Rotary.of(config) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl contains no text\."),
        ("a.jsonl", b'{"words": "x"}', r"there is no column 'text'\. Columns: words"),
        ("a.jsonl", b"{", r"a\.jsonl, line 1: not valid JSON"),
        ("a.txt", b"\xff\xfe\x00", r"a\.txt, line 1: byte 1 \(0xff\) is not UTF-8"),
        ("a.parquet", b"x", r"a\.parquet is not a valid parquet file"),
        ("a.docx", b"x", r"unknown file type '\.docx'"),
    ],
)
def test_calibration_text_that_cannot_be_read_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    words = ["calibration=local", f"calibration.path={tmp_path / name}"]
    with pytest.raises(UserError, match=message):
        plan(tmp_path, words, "build")
    for qformat in ("none", "int4_rtn", "int4_wo"):
        assert plan(tmp_path, [*words, f"quant={qformat}"], "build").steps  # nothing reads it


def test_a_size_of_groups_is_used_or_said_to_have_no_effect(tmp_path):
    """Not refused, since several formats of one sweep get the same settings."""
    for words, groups in (
        (["quant=fp8"], "fp8 has no groups"),
        (["quant=nvfp4", "model=tiny_llama"], "nvfp4 has groups of 16"),
    ):
        made = plan(tmp_path, [*words, "quant.group_size=64"], "build")
        assert f"no effect: quant.group_size=64, because {groups}" in made.notes
    for words in (["quant=int4_rtn", "quant.group_size=64"], ["quant=auto", "quant.group_size=64"], ["quant=fp8"]):
        assert not [note for note in plan(tmp_path, words, "build").notes if "group_size" in note]


def test_a_format_without_calibration_reads_no_text_and_downloads_none(tmp_path):
    """Nor is one that is at hand in the key."""
    on_hub = ["calibration=hub", "calibration.dataset=org/name"]
    nodes = {step.node.id: step.node for step in plan(tmp_path, ["quant=int4_rtn", *on_hub], "build").steps}
    assert "download.calibration" not in nodes
    assert "calibration" not in nodes["quantize"].inputs
    made = plan(tmp_path, ["quant=int4_rtn"], "build")
    assert "calibration text: none, because int4_rtn rounds weights without one" in made.notes
    assert "calibration" not in made.steps[0].node.inputs
    for words in (["quant=int4_rtn", "kv_cache=int8"], ["quant=int4_gptq"], ["quant=int4_rtn", "prune=width"]):
        sizes = ["prune.mlp=256"] if "prune=width" in words else []
        made = plan(tmp_path, [*words, *sizes, *on_hub], "build")
        assert "calibration text: org/name on the Hub" in made.notes
        assert "download.calibration" in {step.node.id for step in made.steps}


def test_few_calibration_texts_cause_a_warning(tmp_path):
    file = tmp_path / "a.txt"
    words = ["calibration=local", f"calibration.path={file}"]
    file.write_text("one\n\ntwo\n")
    (warning,) = plan(tmp_path, words, "build").warnings
    assert "holds 2 texts" in str(warning)
    assert "At least 64" in str(warning)
    file.write_text("text\n\n" * 64)
    assert not plan(tmp_path, words, "build").warnings


def test_too_few_questions_for_go_cause_a_warning(tmp_path):
    """20 of each of 12 subjects are 240, GO takes 299, and 25 of each are 300."""
    (warning,) = plan(tmp_path, ["quant=fp8", "eval.limit=20"], "evaluate").warnings
    assert "eval.limit=20 asks 240 questions, which are too few for GO" in str(warning)
    assert "GO takes 299 or more" in str(warning)
    assert "Set eval.limit=25 or more" in str(warning)
    for enough in (
        ["eval.limit=25"],
        ["eval.limit=20", "eval.margin_points=2"],
        ["eval.limit=20", "eval.baseline=skip"],
    ):
        assert not plan(tmp_path, ["quant=fp8", *enough], "evaluate").warnings
    assert not plan(tmp_path, ["quant=fp8", "eval.limit=20"], "build").warnings
    (warning,) = plan(tmp_path, ["quant=fp8", "eval.margin_points=0.1"], "evaluate").warnings
    assert "eval.task=mini_mmlu asks 1,104 questions" in str(warning)
    assert "Give a larger eval.margin_points" in str(warning)


def test_a_reference_that_nobody_published_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no published accuracy of tiny_gemma on mini_mmlu is known"):
        plan(tmp_path, ["eval.baseline=reference"], "evaluate")
    assert plan(tmp_path, ["eval.baseline=reference"], "build").steps
    words = ["model=llama_3_1_8b", "eval=mmlu", "quant=fp8", "eval.baseline=reference", "engine=tensorrt_llm"]
    steps = plan(tmp_path, [*words, "hardware=h100_sxm"], "evaluate").steps
    assert not any(step.node.id.startswith("baseline.") for step in steps)


def test_a_trace_or_lengths_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"workload\.trace=/no/trace cannot be read"):
        plan(tmp_path, ["workload=trace", "workload.trace=/no/trace"])
    with pytest.raises(UserError, match=r"workload\.isl\.file=/no/lengths cannot be read"):
        plan(tmp_path, ["workload=empirical", "workload.isl.file=/no/lengths", "workload.isl.values=null"])
    assert plan(tmp_path, ["workload=trace", "workload.trace=/no/trace"], "repository").steps  # sends nothing


def test_streaming_needs_several_responses_per_request(tmp_path):
    message = r"benchmark\.streaming=true needs .*decoupled_mode=false sends one.*Set benchmark\.streaming=false"
    with pytest.raises(UserError, match=message):
        plan(tmp_path, ["triton.decoupled_mode=false"])
    assert plan(tmp_path, ["triton.decoupled_mode=false", "benchmark.streaming=false"]).steps
    assert plan(tmp_path, ["triton.decoupled_mode=false"], "repository").steps


def test_a_kv_pool_above_the_memory_of_the_machine_is_refused(tmp_path):
    """MACHINE has 64 GiB."""
    words = ["engine.openvino.kv_cache_bytes=68719476736"]
    with pytest.raises(UserError, match=r"cache 64\.0 GiB, .*Lower engine\.openvino\.kv_cache_bytes \(less than 68"):
        plan(tmp_path, words)
    assert plan(tmp_path, words, "build").steps  # the pool belongs to the server
    (warning,) = plan(tmp_path, ["build.max_num_tokens=4000000"]).warnings
    assert "Lower build.max_num_tokens" in str(warning)


def test_weights_above_the_memory_of_the_machine_are_refused(tmp_path):
    small = replace(MACHINE, memory_bytes=2**34)
    words = ["model=gemma_2b", "quant=int4_wo", "engine=openvino"]
    assert plan(tmp_path, words, machine=small).steps
    with pytest.raises(UserError, match=r"gemma_2b in int4_wo with engine=openvino needs .* this machine has 2\.0 GiB"):
        plan(tmp_path, words, machine=replace(MACHINE, memory_bytes=2**31))


def test_host_memory_of_the_server_is_checked(tmp_path):
    words = ["engine=tensorrt_llm", "triton.kv_cache_host_memory_bytes=1099511627776", "reuse=system_prompt"]
    with pytest.raises(UserError, match=r"kv_cache_host_memory_bytes=1099511627776 is 1024\.0 GiB of host memory"):
        plan(tmp_path, words, "repository", with_gpu())


def test_a_header_alone_is_a_valid_file(tmp_path, model):
    """The check reads headers, so it takes as long for 100 GB as for 100 MB."""
    header = b'{"w": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}'
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert plan(tmp_path, [f"model.path={model}"], "build").steps


def test_a_text_with_a_byte_order_mark_has_a_key_of_its_own(tmp_path):
    """The mark once was part of the first text: what was made with it is not what is made now."""
    hashes = HashCache(tmp_path / "hashes.json")
    for name, mark, other in (("a.txt", BOM_UTF8, True), ("b.txt", b"", False), ("c.jsonl", BOM_UTF8, False)):
        (tmp_path / name).write_bytes(mark + b'{"text": "a"}\n')
        plain = files_source(tmp_path / name, hashes, "calibration.path")
        for source in ("calibration", "text.user"):
            found = _source(source, tmp_path / name, hashes, "calibration.path")
            assert (found.digest != plain.digest) is other
            found.check(hashes)
