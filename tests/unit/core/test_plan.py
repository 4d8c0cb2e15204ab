"""What planning refuses, and what it says; it imports nothing heavy and writes nothing."""

import importlib.util
import json
import os
import re
import socket
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import Fault, UserError
from pipelines.engines.registry import TENSORRT_LLM
from pipelines.host.machine import GpuFacts
from pipelines.nightly import nightly_command
from pipelines.plan.checks import check_code
from pipelines.plan.plan import make_plan
from pipelines.plan.speed import modelled_text
from pipelines.run.console import plan_text
from pipelines.run.session import run_target
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.unit.core.test_machine import MACHINE, with_gpu

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def model_folder(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    header = b'{"w": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    return folder


@pytest.fixture
def model(tmp_path):
    return model_folder(tmp_path / "my_llama")


def plan(tmp_path, overrides, target="build", machine=MACHINE, only=None):
    """The questions that ship with the project, unless others are given."""
    words = [] if any(word.startswith("eval=") for word in overrides) else ["eval=mini_mmlu"]
    return make_plan(load([*words, *overrides]), target, Store(tmp_path / "store"), machine, only)


@pytest.fixture
def bare(monkeypatch):
    """A machine with neither a server nor its clients, as after `pip install trtllm-pipelines[size]`."""
    fault = Fault("tritonserver is not installed.", todo="Run: make setup")
    real = importlib.util.find_spec
    monkeypatch.setattr("pipelines.plan.checks.why_no_server", lambda _settings: fault)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tritonclient" else real(name, *rest)
    )
    return fault


def test_a_plan_says_what_this_machine_lacks(tmp_path, model, bare):
    """It is no reason not to plan, but one not to run."""
    made = plan(tmp_path, [f"model.path={model}", "engine=openvino"], "all")
    packages, server = made.missing
    assert (
        packages.message
        == "Stage benchmark, repository needs the Python package 'tritonclient', which is not installed."
    )
    assert server == bare
    said = " ".join(plan_text(made).split())
    assert "not run here: tritonserver is not installed. Run: make setup" in said
    with pytest.raises(UserError, match=r"'tritonclient'[\s\S]*tritonserver is not installed"):
        run_target(made, Store(tmp_path / "store"), [])


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_report_that_cannot_be_written_is_said_before_hours_are_spent_on_it(tmp_path, model, monkeypatch, package):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))
    words = [f"model.path={model}", "engine=openvino"]
    made = plan(tmp_path, words, "all")
    with pytest.raises(UserError, match=f"The report needs the Python package '{package}'"):
        run_target(made, Store(tmp_path / "store"), [])
    assert not plan(tmp_path, words, "benchmark").missing
    with pytest.raises(UserError, match=f"The report needs the Python package '{package}'"):
        nightly_command.run([f"nightly.history={tmp_path / 'history'}"])
    assert not (tmp_path / "history").exists()


def test_a_port_in_use_is_said_before_anything_is_made(tmp_path, model):
    words = [f"model.path={model}", "engine=openvino"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words.append(f"serving.metrics_port={taken.getsockname()[1]}")
        made = plan(tmp_path, words, "serve")
        with pytest.raises(UserError, match=rf"{words[-1]} is in use: .* \(process {os.getpid()}\) .*make repository"):
            run_target(made, Store(tmp_path / "store"), [])
        assert not plan(tmp_path, words, "benchmark").missing  # its server takes any free ports
    assert not (tmp_path / "store").exists()
    assert not plan(tmp_path, words, "serve").missing
    words.append("serving.host=192.0.2.1")
    assert not plan(tmp_path, words, "benchmark").missing  # nor does it listen for others
    (fault,) = plan(tmp_path, words, "serve").missing
    assert "serving.host='192.0.2.1' is not an address of this machine" in str(fault)


def test_one_stage_lacks_only_what_it_needs(tmp_path, model, bare):
    words = [f"model.path={model}", "engine=tensorrt_llm", "quant=fp8"]
    assert plan(tmp_path, words, "all", with_gpu(), only="quantize").missing == ()
    assert bare not in plan(tmp_path, words, "evaluate", with_gpu()).missing


def test_a_tritonserver_of_the_llm_api_lacks_nvidias_code(tmp_path, model):
    words = [f"model.path={model}", "engine=tensorrt_llm_llmapi", "quant=fp8"]
    for target in ("serve", "benchmark"):
        made = plan(tmp_path, words, target, with_gpu())
        with pytest.raises(UserError, match=r"tritonserver needs NVIDIA's code for engine=tensorrt_llm_llmapi"):
            run_target(made, Store(tmp_path / "store"), [])
    assert not (tmp_path / "store").exists()
    needless = [(words, "repository"), ([*words, "serving.server=trtllm_serve"], "benchmark")]
    for others, target in needless:
        assert "NVIDIA's code" not in str(plan(tmp_path, others, target, with_gpu()).missing)
    deployment = plan(tmp_path, words, "serve", with_gpu()).deployment
    code = tmp_path / "repository" / "tensorrt_llm" / "1" / "model.py"
    code.parent.mkdir(parents=True)
    assert check_code(deployment, tmp_path / "repository")
    code.touch()
    assert not check_code(deployment, tmp_path / "repository")


def test_a_tritonserver_of_images_lacks_nvidias_code_before_anything_is_built(tmp_path):
    words = ["model=tiny_llava", "engine=tensorrt_llm", "eval=mini_mmlu"]
    deployment = plan(tmp_path, words, "serve", with_gpu()).deployment
    (fault,) = check_code(deployment, None)
    assert "tritonserver needs NVIDIA's code for the images of engine=tensorrt_llm" in fault.message
    code = tmp_path / "repository" / "multimodal_encoders" / "1" / "model.py"
    code.parent.mkdir(parents=True)
    assert check_code(deployment, tmp_path / "repository")
    code.touch()
    assert not check_code(deployment, tmp_path / "repository")


def test_what_runs_on_another_machine_lacks_nothing_here(tmp_path, model, bare):
    made = plan(tmp_path, [f"model.path={model}", "engine=tensorrt_llm", "quant=fp8", "hardware=h100_sxm"], "all")
    assert made.not_here
    assert made.missing == ()
    assert bare.message not in plan_text(made)


def test_stages_in_order(tmp_path, model):
    made = plan(tmp_path, [f"model.path={model}", "sparsity=sparsegpt_2_4"], "evaluate")
    assert [step.node.id for step in made.steps] == [
        "baseline.quantize",
        "baseline.build",
        "baseline.evaluate",
        "sparsify",
        "quantize",
        "build",
        "evaluate",
    ]


def test_all_goes_from_the_model_to_the_benchmark(tmp_path, model):
    made = plan(tmp_path, [f"model.path={model}", "quant=none"], "all")
    assert [step.node.id for step in made.steps] == ["quantize", "build", "evaluate", "repository", "benchmark"]
    assert made.steps[-1].why == "it measures, so it runs every time"


def test_serving_asks_no_questions(tmp_path, model):
    """A server needs no accuracy: neither the evaluation nor the baseline is made for it."""
    for target, last in (("serve", "repository"), ("benchmark", "benchmark")):
        made = plan(tmp_path, [f"model.path={model}"], target)
        assert "evaluate" not in [step.node.stage.name for step in made.steps]
        assert made.steps[-1].node.id == last


def test_of_a_server_elsewhere_nothing_is_built_and_nothing_is_claimed(tmp_path, model):
    words = [f"model.path={model}", "benchmark.url=gpu7:8001", "benchmark.tp_size=2"]
    (step,) = plan(tmp_path, words, "benchmark").steps
    labels = step.node.stage.labels
    assert (labels["precision"], labels["engine"], labels["tp_size"]) == ("unknown", "unknown", 2)
    assert step.node.label == "my_llama-elsewhere"


def test_a_server_elsewhere_is_asked_and_nothing_is_built(tmp_path, model):
    """Neither the engine nor a baseline, and again in every run, because the server may have changed."""
    words = [f"model.path={model}", "eval.url=http://gpu7:8000/v1", "eval.limit=2"]
    (step,) = plan(tmp_path, words, "evaluate").steps
    assert (step.node.stage.name, step.node.label) == ("served", "my_llama-served")
    assert step.why == "it measures, so it runs every time"


@pytest.mark.parametrize(
    ("words", "target", "said"),
    [
        (
            ["eval.url=http://gpu7:8000/v1"],
            "all",
            r"eval\.url=.http://gpu7:8000/v1. only works with `make evaluate`, `make fidelity` and",
        ),
        (["eval.url=http://gpu7:8000/v1", "eval.baseline=hugging_face"], "evaluate", "not evaluated beside a server"),
        (["eval.guided=true"], "evaluate", r"eval\.guided=true has no effect on eval\.task='mini_mmlu'"),
        (["eval.apply_chat_template=true"], "evaluate", r"the tokenizer at '.*' has no chat template"),
        (
            ["eval.apply_chat_template=true", "eval=mini_answers", "eval.url=grpc://gpu7:8001"],
            "evaluate",
            r"eval\.apply_chat_template=true needs prompts as token ids where answers are written.*grpc://gpu7:8001",
        ),
        (
            ["eval=passkey", "eval.apply_chat_template=true"],
            "evaluate",
            r"apply_chat_template=true makes prompts longer",
        ),
        (["eval=passkey", "eval.system_instruction=Hi"], "evaluate", r"eval\.system_instruction makes prompts longer"),
        (["eval=passkey", "eval.baseline=hugging_face"], "evaluate", r"eval\.task='passkey' are written"),
        (["eval=gsm8k", "eval.baseline=hugging_face"], "evaluate", r"eval\.task='gsm8k' are written"),
        (["eval.task=mmlu"], "evaluate", r"eval\.task='mmlu' has no data"),
        (["eval.task=hellaswga"], "evaluate", r"'hellaswga' is not known.*Did you mean 'hellaswag'"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused_while_planning(tmp_path, model, words, target, said):
    with pytest.raises(UserError, match=said):
        plan(tmp_path, [f"model.path={model}", *words], target)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval.fewshot_as_multiturn=true"], r"fewshot_as_multiturn=true without apply_chat_template=true"),
        (["eval.fewshot_as_multiturn=false"], r"fewshot_as_multiturn=false without apply_chat_template=true"),
        (
            ["eval.fewshot_as_multiturn=true", "eval.apply_chat_template=true", "eval.num_fewshot=0"],
            r"fewshot_as_multiturn=true with num_fewshot=0",
        ),
        (["eval.system_instruction=''"], r"eval\.system_instruction"),
    ],
)
def test_settings_of_chats_without_effect_are_refused(tmp_path, model, words, said):
    with pytest.raises(UserError, match=said):
        plan(tmp_path, [f"model.path={model}", *words], "evaluate")


def test_a_chat_template_beside_the_tokenizer_is_found(tmp_path, model):
    """In a file of its own, or in tokenizer_config.json."""
    words = [f"model.path={model}", "eval.apply_chat_template=true", "eval.url=http://gpu7:8000/v1"]
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert plan(tmp_path, words, "evaluate").steps


def engine_folder(tmp_path, **quantization):
    """What trtllm-build leaves, as far as planning reads it."""
    folder = tmp_path / "engine"
    folder.mkdir()
    pretrained = {"quantization": quantization, "mapping": {"tp_size": 2, "pp_size": 1, "world_size": 2}}
    (folder / "config.json").write_text(json.dumps({"pretrained_config": pretrained, "build_config": {}}))
    (folder / "rank0.engine").write_bytes(b"plan")
    return folder


def test_an_engine_that_is_built_already_needs_only_a_repository(tmp_path, model):
    """Flavour, format and ranks are the engine's own; the model folder is there for its tokenizer."""
    engine = engine_folder(tmp_path, quant_algo="FP8", kv_cache_quant_algo="FP8")
    (model / "model.safetensors").unlink()
    made = plan(tmp_path, [f"model.path={model}", f"engine.path={engine}"], "repository")
    (step,) = made.steps
    assert (made.deployment.engine.name, step.node.label) == ("tensorrt_llm", "my_llama-fp8-kv_fp8")
    assert (step.node.stage.spec.tp_size, step.node.stage.spec.pp_size) == (2, 1)
    assert (made.settings.variant.label, made.settings.build.tp_size) == ("fp8-kv_fp8", 2)


def test_an_engine_with_a_kv_cache_that_no_setting_names_is_served_without_figures_of_speed(tmp_path, model):
    engine = engine_folder(tmp_path, quant_algo="NVFP4", kv_cache_quant_algo="NVFP4")
    made = plan(tmp_path, [f"model.path={model}", f"engine.path={engine}", "hardware=b200_sxm"], "serve")
    assert {step.node.label for step in made.steps} == {"my_llama-nvfp4-kv_nvfp4"}
    assert (made.settings.quant.qformat, made.settings.kv_cache.dtype) == ("nvfp4", "auto")
    assert modelled_text(made) == ""


def test_the_memory_of_an_engine_that_is_built_already_is_said_to_be_unknown(tmp_path, model):
    words = [f"model.path={model}", f"engine.path={engine_folder(tmp_path)}"]
    said = "memory: unknown, because engine.path is an engine that is already built"
    assert said in plan(tmp_path, words, "serve").notes
    assert said not in plan(tmp_path, words, "repository").notes


def test_options_of_the_cpu_engine_that_another_does_not_read_are_named(tmp_path, model):
    words = [f"model.path={model}", "quant=none", "engine.openvino.num_threads=3"]
    said = "not read by engine=tensorrt_llm: engine.openvino.num_threads"
    assert said in plan(tmp_path, [*words, "engine=tensorrt_llm"], "build").notes
    assert not [note for note in plan(tmp_path, words, "build").notes if "not read by" in note]


@pytest.mark.parametrize(
    ("engine", "words", "said"),
    [
        ("openvino", ["cuda_graph_mode=true"], "not read by engine=openvino: triton.cuda_graph_mode"),
        ("tensorrt_llm_llmapi", ["max_queue_size=5"], "not read by engine=tensorrt_llm_llmapi: triton.max_queue_size"),
        ("tensorrt_llm", ["retention_priority=5"], "no effect: triton.retention_priority, without triton.retention_"),
        ("tensorrt_llm", ["lookahead_ngram_size=5"], "triton.lookahead_ngram_size, without triton.decoding_mode=look"),
    ],
)
def test_settings_of_the_repository_that_an_engine_does_not_read_are_named(tmp_path, model, engine, words, said):
    base = [f"model.path={model}", "quant=none", f"engine={engine}"]
    made = plan(tmp_path, [*base, *(f"triton.{word}" for word in words)], "repository")
    assert [note for note in made.notes if said in note]
    assert not [note for note in plan(tmp_path, base, "repository").notes if "not read" in note or "no effect" in note]


@pytest.mark.parametrize(
    ("overrides", "target", "message"),
    [
        (
            ["engine=openvino"],
            "repository",
            r"engine=openvino is set, but engine\.path='.*' is an engine of tensorrt_llm",
        ),
        ([], "evaluate", r"is already built; `evaluate` starts from a model"),
        (["engine.openvino.head_precision=int8"], "repository", r"head_precision=int8 is asked of an engine that is b"),
        (["engine.openvino.experts=separate"], "repository", r"experts=separate is asked of an engine that is built"),
    ],
)
def test_what_does_not_go_with_a_built_engine_is_refused(tmp_path, model, overrides, target, message):
    engine = engine_folder(tmp_path)
    with pytest.raises(UserError, match=message):
        plan(tmp_path, [f"model.path={model}", f"engine.path={engine}", *overrides], target)


def test_an_engine_with_grouped_experts_is_served_where_there_is_amx(tmp_path, model, processor):
    """Its repository may be for another machine."""
    engine = engine_folder(tmp_path)
    config = json.loads((engine / "config.json").read_text())
    config["engine"] = {"flavour": "openvino", "experts": "grouped"}
    (engine / "config.json").write_text(json.dumps(config))
    words = [f"model.path={model}", f"engine.path={engine}"]
    for amx in (False, True):
        processor(amx=amx)
        plan(tmp_path, words, "repository")
    plan(tmp_path, words, "serve")
    for arithmetic in (["engine.openvino.inference_precision=f32"], []):
        processor(amx=bool(arithmetic))
        with pytest.raises(UserError, match=r"built with one product for all experts, which needs a processor with"):
            plan(tmp_path, [*words, *arithmetic], "serve")
    processor(amx=True)
    with pytest.raises(UserError, match=r"needs a processor with AMX and arithmetic in bf16"):
        plan(tmp_path, [*words, "engine.openvino.inference_precision=f32"], "repository")


@pytest.mark.parametrize("target", ["repository", "benchmark", "serve", "all"])
def test_there_is_nothing_to_plan_for_a_repository(tmp_path, model, target):
    """It was ignored, and another model was measured."""
    with pytest.raises(UserError, match=r"serving\.repository='/made' exists already.*`serve`, `manifests` and `scr"):
        plan(tmp_path, [f"model.path={model}", "serving.repository=/made"], target)


def test_without_engines_the_checkpoint_itself_is_served(tmp_path, model):
    """TensorRT-LLM 1.3 and later."""
    made = plan(tmp_path, [f"model.path={model}", "engine=tensorrt_llm_llmapi", "quant=none"], "repository")
    assert [step.node.id for step in made.steps] == ["build", "repository"]
    assert made.steps[0].node.inputs["checkpoint"] == made.steps[0].node.inputs["model"]
    with pytest.raises(UserError, match=r"cannot serve GemmaForCausalLM: .* only Gemma 3"):
        plan(tmp_path, ["engine=tensorrt_llm_llmapi", "quant=none", "model=tiny_gemma"], "repository")


def test_one_checkpoint_serves_every_split_of_the_llm_api(tmp_path, model):
    """It is not cut into ranks, so another tp_size quantizes nothing again."""
    words = [f"model.path={model}", "engine=tensorrt_llm_llmapi", "quant=fp8"]
    one, two = (plan(tmp_path, [*words, f"build.tp_size={ranks}"], "build").steps for ranks in (1, 2))
    assert [step.node.id for step in one] == ["quantize", "build"]
    assert one[0].key == two[0].key
    assert one[1].node.stage.identity() != two[1].node.stage.identity()


def test_the_llm_api_takes_a_draft_checkpoint(tmp_path, model):
    words = [f"model.path={model}", "engine=tensorrt_llm_llmapi", "quant=fp8", "speculative=draft_target"]
    words += [f"speculative.draft.path={model}"]
    made = plan(tmp_path, [*words, "speculative.draft_qformat=none"], "build")
    assert [step.node.id for step in made.steps] == ["quantize", "build"]  # the draft's own folder is its checkpoint
    stage = made.steps[1].node.stage
    assert stage.identity()["arguments"]["speculative_config"]["max_draft_len"] == 4
    other = plan(tmp_path, words, "build")
    assert [step.node.id for step in other.steps] == ["quantize", "draft.quantize", "build"]


@pytest.mark.parametrize(
    ("overrides", "target", "message"),
    [
        (
            ["quant=int8_sq"],
            "build",
            r"does not support quant=int8_sq: .* It supports none, fp8, int4_awq, int4_gptq, int4_rtn, w4a8_awq, nvfp4",
        ),
        (["kv_cache=int8"], "build", r"does not support kv_cache=int8"),
        (["sparsity=magnitude_2_4"], "build", r"does not support sparsity=magnitude"),
        (
            ["quant=int4_awq", "hardware=rtx_pro_6000"],
            "build",
            r"does not support quant=int4_awq on compute capability 12\.0",
        ),
        (["triton.decoding_mode=medusa"], "build", r"does not support triton\.decoding_mode=medusa"),
        (["speculative=lookahead"], "build", r"speculative=lookahead is not supported by engine=tensorrt_llm_llmapi"),
        (["build.gemm_plugin=auto"], "build", r"does not support build\.gemm_plugin=auto"),
        (["triton.lora_prefetch_dir=/adapters"], "build", r"lora_prefetch_dir='/adapters'"),
        ([], "evaluate", r"cannot evaluate: .* with engine=openvino"),
    ],
)
def test_what_the_llm_api_cannot_do_is_refused(tmp_path, model, overrides, target, message):
    with pytest.raises(UserError, match=message):
        plan(tmp_path, [f"model.path={model}", "engine=tensorrt_llm_llmapi", "quant=fp8", *overrides], target)


def test_the_llm_api_is_judged_on_the_gpu_of_this_machine(tmp_path, model):
    """hardware=auto stands for what nvidia-smi says, here an RTX 5090."""
    here = with_gpu(gpus=(GpuFacts("NVIDIA GeForce RTX 5090", 12.0, 32607 * 2**20),))
    words = [f"model.path={model}", "engine=tensorrt_llm_llmapi", "quant=int4_awq", "hardware=auto"]
    with pytest.raises(UserError, match=r"does not support quant=int4_awq on compute capability 12\.0"):
        plan(tmp_path, words, machine=here)


def test_ranks_go_with_the_llm_api(tmp_path, model):
    """conf/parallel says how many ranks trtllm-build makes at once, which is nothing to an engine that is not built."""
    made = plan(tmp_path, [f"model.path={model}", "engine=tensorrt_llm_llmapi", "quant=fp8", "parallel=tp2"])
    assert made.steps[-1].node.stage.identity()["arguments"]["tensor_parallel_size"] == 2


@pytest.mark.parametrize("mode", ["lookahead", "medusa", "redrafter", "eagle"])
@pytest.mark.parametrize(("engine", "target"), [("openvino", "repository"), ("tensorrt_llm_llmapi", "build")])
def test_what_guesses_ahead_is_refused_once(tmp_path, model, mode, engine, target):
    """What conf/speculative sets for build and server is no fault of its own."""
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "config.json").write_text("{}")
    heads = [] if mode == "lookahead" else [f"speculative.heads_path={tmp_path / 'heads'}"]
    with pytest.raises(UserError, match=rf"^speculative={mode} is not supported by engine={engine}") as refused:
        plan(tmp_path, [f"model.path={model}", f"engine={engine}", "quant=fp8", f"speculative={mode}", *heads], target)
    assert len(refused.value.faults) == 1


def test_what_was_set_beside_a_refused_speculation_is_told_as_well(tmp_path, model):
    words = [f"model.path={model}", "engine=openvino", "speculative=lookahead", "triton.decoding_mode=medusa"]
    with pytest.raises(
        UserError, match=r"speculative=lookahead is not supported(.|\n)*decoding_mode='medusa' is not supported"
    ):
        plan(tmp_path, words, "repository")


MIXTURE = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture
def processor(monkeypatch):
    """Give a processor AMX or none."""

    def has(*, amx):
        for name in ("has_amx", "native_bf16"):
            monkeypatch.setattr(f"pipelines.engines.openvino.memory.{name}", lambda: amx)

    return has


def experts_of(tmp_path, *words):
    """Return what a build is told of experts."""
    return plan(tmp_path, list(words)).steps[-1].node.stage.options.get("experts")


def test_experts_are_grouped_where_that_is_faster(tmp_path, model, processor):
    """Such an engine is another artifact; a dense model's is the same on every processor."""
    words = [f"model.path={model}", "quant=int8_wo"]
    for amx in (False, True):
        processor(amx=amx)
        assert experts_of(tmp_path, *words) is None
    (model / "config.json").write_text(json.dumps(LLAMA | MIXTURE))
    assert experts_of(tmp_path, *words) == "grouped"
    assert "experts: one product for all (engine.openvino.experts=auto)" in plan(tmp_path, words).notes
    assert experts_of(tmp_path, *words, "engine.openvino.experts=separate") is None
    assert experts_of(tmp_path, *words, "engine.openvino.inference_precision=f32") is None
    assert experts_of(tmp_path, words[0], "quant=fp8") is None
    (model / "config.json").write_text(json.dumps(LLAMA | MIXTURE | {"num_local_experts": 9}))
    assert experts_of(tmp_path, *words) is None  # prompts would take longer
    assert experts_of(tmp_path, *words, "engine.openvino.experts=grouped") == "grouped"
    processor(amx=False)
    assert experts_of(tmp_path, *words) is None


@pytest.mark.parametrize(
    ("mixture", "amx", "quant", "said"),
    [
        ({}, True, "int8_wo", r"experts=grouped needs a mixture of experts; LlamaForCausalLM is none"),
        (MIXTURE, True, "fp8", r"experts=grouped does not go with quant=fp8: its experts round activations"),
        (MIXTURE, False, "int8_wo", r"experts=grouped needs a processor with AMX and arithmetic in bf16"),
    ],
)
def test_experts_that_cannot_be_grouped_are_refused(tmp_path, model, processor, mixture, amx, quant, said):
    processor(amx=amx)
    (model / "config.json").write_text(json.dumps(LLAMA | mixture))
    with pytest.raises(UserError, match=said):
        plan(tmp_path, [f"model.path={model}", f"quant={quant}", "engine.openvino.experts=grouped"])


def test_a_folder_that_is_no_engine_is_refused(tmp_path, model):
    with pytest.raises(UserError, match=r"engine\.path='.*my_llama' is not an engine: it has no config\.json with"):
        plan(tmp_path, [f"model.path={model}", f"engine.path={model}"], "repository")


def test_the_baseline_is_not_made_twice(tmp_path, model):
    made = plan(tmp_path, [f"model.path={model}", "quant=none"], "evaluate")
    assert [step.node.id for step in made.steps] == ["quantize", "build", "evaluate"]


def test_hub_parts_are_downloaded_first(tmp_path):
    made = plan(tmp_path, ["model=gemma_2b", "calibration=cnn_dailymail", "eval=mmlu"], "evaluate")
    assert [step.node.id for step in made.steps][:2] == ["download", "download.eval"]
    assert "download.calibration" in [step.node.id for step in made.steps]


def test_a_format_without_calibration_fetches_no_text(tmp_path):
    made = plan(tmp_path, ["model=gemma_2b", "calibration=cnn_dailymail", "quant=int4_wo"])
    assert [step.node.id for step in made.steps] == ["download", "quantize", "build"]


def test_planning_writes_nothing(tmp_path, model):
    plan(tmp_path, [f"model.path={model}"], "evaluate")
    assert not (tmp_path / "store").exists()


def test_planning_imports_nothing_heavy(tmp_path, model):
    code = (
        "import sys; from pipelines.cli.main import main; "
        f"code = main(['plan', 'model.path={model}', 'eval=mini_mmlu', 'paths.store={tmp_path}/s']); "
        "heavy = {'torch', 'transformers', 'modelopt', 'openvino', 'openvino_genai', 'numpy', 'lm_eval', 'datasets'}; "
        "heavy |= {'jinja2', 'asyncio'}; "
        "print(sorted(heavy & sys.modules.keys())); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["quant=fp8", "hardware=a10"],
            r"fp8 needs FP8 arithmetic .*this GPU has 8\.6.*quant=none, int8_sq, int4_awq",
        ),
        (["quant=nvfp4", "hardware=h100_sxm"], r"nvfp4 needs FP4 arithmetic .*this GPU has 9\.0"),
        (["quant=int8_sq", "hardware=b200_sxm"], r"int8_sq is refused by TensorRT-LLM's builder .*10\.0"),
        (["kv_cache=int8", "kv_cache.enable_block_reuse=true"], r"kv_cache=int8 .* rules out KV-cache reuse"),
        (["kv_cache=int8", "runtime.enable_chunked_context=true"], r"rules out chunked context"),
        (["build.tp_size=3"], r"tp_size=3 does not divide num_attention_heads=4"),
        (["build.pp_size=4"], r"pp_size=4 does not divide num_hidden_layers=2"),
        (["build.max_num_tokens=512"], r"max_num_tokens=512 is less than max_input_len=1024"),
        (["build.max_seq_len=4096"], r"max_seq_len=4096 is more than my_llama supports.*2048 tokens"),
        (["build.max_input_len=2000", "build.max_seq_len=1500"], r"max_input_len=2000 is more than max_seq_len=1500"),
        (["build.tokens_per_block=48"], r"tokens_per_block=48 is not a power of two"),
        (["build.tokens_per_block=64", "engine=openvino"], r"tokens_per_block=64 is not supported by engine=openvino"),
        (["quant=int4_awq", "quant.group_size=256", "build.tp_size=2"], r"groups of 256 inputs"),
        (["calibration=local", "calibration.path=/no/such"], r"calibration\.path='/no/such' does not exist"),
        (["serving.tritonserver=/no/such"], r"serving\.tritonserver='/no/such' is not an executable program"),
        (["benchmark.request_rate=[2]"], r"request_rate=\[2\] conflicts with workload\.arrival=closed"),
        (["engine=tensorrt_llm_llmapi"], r"engine=tensorrt_llm_llmapi cannot all"),
        (["triton.decoding_mode=medusa"], r"decoding_mode.*medusa"),
        (["workload.isl=1500"], r"prompts of up to 1500 tokens; the engine is built with max_input_len=1024"),
        (
            ["workload.isl=1000", "workload.osl=1500"],
            r"1000 tokens and 1500 of output; the engine holds max_seq_len=2048.*: the model reads no more",
        ),
        (["build.max_seq_len=64"], r"the engine holds max_seq_len=64.*or set build\.max_seq_len=192 or more"),
        (["model=llama_3_8b"], r"is not a llama_3_8b: its num_hidden_layers is 2, model=llama_3_8b says 32"),
    ],
)
def test_impossible_combinations_are_refused(tmp_path, model, overrides, message):
    with pytest.raises(UserError, match=message):
        plan(tmp_path, [f"model.path={model}", *overrides], "all")


def test_the_longest_request_that_the_engine_takes_is_no_fault(tmp_path, model):
    assert plan(tmp_path, [f"model.path={model}", "workload.isl=1024", "workload.osl=1024"], "all").steps


def test_what_does_not_fit_the_gpu_is_refused_with_what_would(tmp_path):
    """Llama 3.1 70B at 16 bit: 131.4 GiB of weights and 64 MiB of rotary angles (131,072 x 128 x 4 bytes)."""
    big = replace(MACHINE, memory_bytes=2**40)
    message = r"needs 131\.5 GiB of weights per GPU; one h100_sxm has 79\.6 GiB.*tp_size=2 or quant=fp8"
    with pytest.raises(UserError, match=message):
        plan(tmp_path, ["model=llama_3_1_70b", "quant=none", "hardware=h100_sxm"], machine=big)


def test_what_does_not_fit_this_machine_is_refused(tmp_path):
    with pytest.raises(
        UserError,
        match=r"llama_3_1_70b needs about .* of memory while quantizing .*one layer.*this machine has 8",
    ):
        plan(tmp_path, ["model=llama_3_1_70b", "build.tp_size=4"], machine=replace(MACHINE, memory_bytes=2**33))


def test_a_tensorrt_engine_is_described_without_a_gpu_and_not_run(tmp_path, model):
    """`plan` shows it; a run stops at once with the reason and the way."""
    made = plan(tmp_path, [f"model.path={model}", "engine=tensorrt_llm", "hardware=h100_sxm"])
    (fault,) = made.not_here
    assert re.search(
        r"cannot run here: there is no NVIDIA GPU.*trtllm-build is not on PATH.*engine=openvino", str(fault)
    )
    with pytest.raises(UserError, match="cannot run here"):
        run_target(made, Store(tmp_path / "store"), [])
    assert not (tmp_path / "store").exists()


def test_the_key_of_a_tensorrt_engine_holds_the_gpu(tmp_path, model):
    words = [f"model.path={model}", "engine=tensorrt_llm", "quant=none"]
    here = replace(MACHINE, gpus=(GpuFacts("NVIDIA A10", 8.6, 23028 * 2**20),))
    stage = plan(tmp_path, words, machine=here).steps[-1].node.stage
    assert (stage.identity()["sm"], stage.libraries) == (8.6, ("tensorrt-llm", "tensorrt"))
    assert plan(tmp_path, [*words, "hardware=h100_sxm"]).steps[-1].node.stage.identity()["sm"] == 9.0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: (m / "config.json").unlink(), r"it has no config\.json"),
        (lambda m: (m / "config.json").write_text("{"), r"config\.json is not valid JSON"),
        (lambda m: (m / "model.safetensors").unlink(), r"has no \*\.safetensors file"),
        (
            lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"),
            r"only pickled weights \(pytorch_model\.bin\)",
        ),
        (
            lambda m: (m / "config.json").write_text('{"architectures": ["GPT2"]}'),
            r"architecture 'GPT2', which this project does not know\. Known: .*MixtralForCausalLM.*eval\.url",
        ),
        (
            lambda m: (m / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}'),
            r"has no 'num_attention_heads'",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path, model, spoil, message):
    spoil(model)
    with pytest.raises(UserError, match=message):
        plan(tmp_path, [f"model.path={model}"])


def test_a_store_that_cannot_be_made_is_refused(tmp_path, model):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(UserError, match=r"paths\.store='.*store' cannot be created: .* is a file"):
        plan(tmp_path, [f"model.path={model}"])


def test_all_faults_are_reported_at_once(tmp_path, model):
    with pytest.raises(UserError) as caught:
        plan(
            tmp_path,
            [f"model.path={model}", "build.tp_size=3", "quant=nvfp4", "hardware=a10", "build.max_num_tokens=9"],
        )
    assert len(caught.value.faults) >= 3


def test_the_text_fits_a_terminal_of_80_columns(tmp_path):
    text = plan_text(plan(tmp_path, ["experiment=gemma_2b_h100_fp8"], "evaluate"))
    assert max(map(len, text.splitlines())) <= 80
    assert "on h100_sxm: weights" in text


def test_a_gpu_by_name_is_planned_for_and_not_built_on_another_machine(tmp_path, model):
    """`hardware=a10` alone means a TensorRT engine for an A10, even where there is no GPU."""
    words = [f"model.path={model}", "quant=int4_wo", "hardware=a10"]
    made = plan(tmp_path, words)
    assert made.deployment.engine.name == "tensorrt_llm"
    assert made.reason == "engine=auto: planned for hardware=a10; engine=openvino plans for this machine's CPU"
    assert "there is no NVIDIA GPU" in str(made.not_here[0])
    assert plan(tmp_path, [*words, "engine=openvino"]).deployment.engine.name == "openvino"


def test_a_machine_with_another_gpu_does_not_build_for_the_one_named(tmp_path, model, monkeypatch):
    words = [f"model.path={model}", "quant=int4_wo", "engine=tensorrt_llm"]
    whole = replace(TENSORRT_LLM, lacks=lambda _machine: [])
    monkeypatch.setattr("pipelines.engines.registry.with_setting", lambda _name: whole)
    (fault,) = plan(tmp_path, [*words, "hardware=a10"], machine=with_gpu()).not_here
    assert str(fault).startswith("hardware=a10 is not here: this machine has NVIDIA H100 80GB HBM3.")
    assert not plan(tmp_path, [*words, "hardware=h100_sxm"], machine=with_gpu()).not_here
    assert not plan(tmp_path, words, machine=with_gpu()).not_here


def test_the_plan_goes_as_far_as_it_is_asked_to(tmp_path, capsys):
    assert main(["plan", "plan.target=build", f"paths.store={tmp_path}/s"]) == 0
    shown = capsys.readouterr().out
    assert "run     build" in shown
    assert "evaluate" not in shown
    assert main(["plan", "plan.target=everything"]) == 2
    assert "plan.target='everything' is not known. Choose one of build, evaluate" in " ".join(
        capsys.readouterr().err.split()
    )


def test_eight_billion_parameters_are_quantized_on_24_gib(tmp_path):
    """Quantizing holds one layer: the plan says how much that is, and refuses 8B on no machine of 8 GiB."""
    for memory in (24 * 2**30, 8 * 2**30):
        made = plan(
            tmp_path,
            ["model=llama_3_1_8b", "engine=tensorrt_llm", "hardware=h100_sxm", "quant=int4_awq"],
            machine=replace(MACHINE, memory_bytes=memory),
        )
        assert any(re.search(r"quantizing needs about [34]\.\d GiB of memory", note) for note in made.notes)


@pytest.mark.parametrize(("method", "gib"), [("magnitude", "12"), ("sparsegpt", "2[0-9]")])
def test_sparsifying_holds_one_layer_and_sparsegpt_its_hessians(tmp_path, method, gib):
    words = ["model=llama_3_1_70b", "build.tp_size=4", f"sparsity={method}_2_4"]
    small = replace(MACHINE, memory_bytes=10 * 2**30)
    with pytest.raises(UserError, match=rf"llama_3_1_70b needs about {gib}\.\d GiB of memory while sparsifying"):
        plan(tmp_path, words, machine=small)


def test_a_plan_says_that_the_memory_of_a_format_is_unknown(tmp_path):
    notes = plan(tmp_path, ["quant=w4a8_awq", "engine=openvino"]).notes
    assert "memory: unknown, because the CPU engine's was not measured for w4a8_awq" in notes
