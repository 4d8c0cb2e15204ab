"""The plan checks every engine it contains: the 16-bit baseline, a draft model and a vision encoder too."""

import json
import struct
from dataclasses import replace

import pytest

from pipelines.domain.errors import UserError
from pipelines.plan.plan import make_plan
from pipelines.plan.user_inputs import vision_bytes
from pipelines.run.console import comparison
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.support.report_store import evaluation
from tests.support.small_models import write_model
from tests.unit.core.test_machine import MACHINE

BIG = replace(MACHINE, memory_bytes=2**40)
ON_H100 = ["engine=tensorrt_llm", "hardware=h100_sxm", "quant=fp8", "build.max_batch_size=64"]
DRAFTED = ["speculative=draft_target", "triton.kv_cache_free_gpu_mem_fraction=0.45"]


def plan(tmp_path, overrides, target="evaluate"):
    return make_plan(load([*ON_H100, *overrides]), target, Store(tmp_path / "store"), BIG)


def test_a_baseline_that_does_not_fit_is_refused_with_what_works(tmp_path):
    """Llama 3.1 70B in FP8 is 67.7 GiB, its 16-bit baseline 131.5 GiB: too much for one GPU of 80 GB."""
    message = r"16-bit baseline of llama_3_1_70b needs 131\.5 GiB of weights.*one h100_sxm has 79\.6 GiB"
    with pytest.raises(UserError, match=message) as refused:
        plan(tmp_path, ["model=llama_3_1_70b"])
    (fault,) = refused.value.faults
    assert "Add eval.baseline_tp_size=2, or eval.baseline=skip" in fault.todo


def test_what_the_refusal_offers_works(tmp_path):
    two = plan(tmp_path, ["model=llama_3_1_70b", "eval.baseline_tp_size=2"])
    stages = {step.node.id: step.node.stage for step in two.steps}
    assert (stages["baseline.quantize"].tp_size, stages["quantize"].tp_size) == (2, 1)
    skipped = plan(tmp_path, ["model=llama_3_1_70b", "eval.baseline=skip"])
    assert [step.node.id for step in skipped.steps] == ["download", "download.eval", "quantize", "build", "evaluate"]


def test_a_target_without_a_baseline_does_not_ask_for_its_memory(tmp_path):
    assert plan(tmp_path, ["model=llama_3_1_70b"], "build").steps


def test_more_ranks_than_a_server_has_are_not_offered(tmp_path):
    """At 16 bit, 70B needs 8 GPUs of 24 GB."""
    words = ["model=llama_3_1_70b", "hardware=a10", "quant=int4_awq", "build.tp_size=4"]
    with pytest.raises(UserError, match=r"baseline_tp_size=8, or eval\.baseline=skip"):
        plan(tmp_path, words)
    with pytest.raises(UserError, match=r"Add eval\.baseline=skip"):
        plan(tmp_path, [*words, "hardware.gpus_per_server=4"])


def test_ranks_that_divide_the_heads_are_offered(tmp_path):
    """At 16 bit, 8B needs 8 GPUs of 4 GB; 8 divides its 32 heads, not its 36 layers."""
    words = ["model=qwen3_8b", "hardware=l4", "hardware.memory_gb=4", "quant=int4_awq", "build.tp_size=2"]
    with pytest.raises(UserError, match=r"Add eval\.baseline_tp_size=8, or"):
        plan(tmp_path, [*words, "build.max_batch_size=1", "build.max_num_tokens=1024"])


def test_the_rules_hold_for_the_baseline_too(tmp_path):
    with pytest.raises(UserError, match=r"16-bit baseline \(eval\.baseline_tp_size=3\): tp_size=3 does not divide"):
        plan(tmp_path, ["model=llama_3_1_8b", "eval.baseline_tp_size=3"])


def test_a_draft_model_takes_memory_of_its_target(tmp_path):
    words = ["model=llama_3_1_8b", *DRAFTED]
    notes = plan(tmp_path, [*words, "model@speculative.draft=llama_3_2_1b"], "repository").notes
    (parts,) = [note for note in notes if "KV cache" in note and "weights" in note]
    assert "the draft model 2." in parts  # 1.4 GiB of weights at 8 bit, activations, buffers
    limits = ["build.max_num_tokens=8192", "build.max_seq_len=8192"]
    with pytest.raises(UserError, match=r"79\.6 GiB, of which the draft model takes 69\.\d GiB"):
        plan(tmp_path, [*words, *limits, "model@speculative.draft=llama_3_1_70b"], "repository")


def test_a_draft_model_that_fits_no_gpu_is_refused_by_itself(tmp_path):
    words = ["model=llama_3_1_8b", *DRAFTED, "model@speculative.draft=llama_3_1_70b", "speculative.draft_qformat=none"]
    with pytest.raises(UserError, match=r"speculative\.draft=llama_3_1_70b in none needs 131\.5 GiB of weights"):
        plan(tmp_path, words, "build")


def test_scales_that_only_modelopt_searches_need_its_export(tmp_path):
    """Checkpoints of such a family are written tensor by tensor."""
    phi = ["model=llama_3_2_1b", "model.shape.architecture=Phi3ForCausalLM", "model.shape.tie_word_embeddings=false"]
    plan(tmp_path, [*phi, "engine=openvino", "quant=int4_rtn"], "build")
    with pytest.raises(UserError, match=r"quant\.int4_scales=mse needs ModelOpt's export, which Phi-3"):
        plan(tmp_path, [*phi, "engine=openvino", "quant=int4_rtn", "quant.int4_scales=mse"], "build")


def weights(path, **shapes):
    path.parent.mkdir(parents=True, exist_ok=True)
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_a_vision_encoder_is_what_is_not_the_language_model(tmp_path):
    """Its engine holds 16-bit weights, whatever the file has."""
    llava = {"language_model.lm_head.weight": (8, 8), "vision_tower.a": (4, 8), "multi_modal_projector.b": (2, 8)}
    weights(tmp_path / "llava" / "model.safetensors", **llava)
    assert vision_bytes(tmp_path / "llava") == 2 * (4 * 8 + 2 * 8)
    weights(tmp_path / "vila" / "vision_tower" / "model.safetensors", a=(4, 8))
    weights(tmp_path / "vila" / "llm" / "model.safetensors", b=(8, 8))
    assert vision_bytes(tmp_path / "vila") == 2 * 4 * 8
    assert vision_bytes(tmp_path) == 2 * (4 * 8 + 2 * 8 + 4 * 8)


def test_without_a_baseline_no_loss_is_stated(tmp_path):
    evaluation("fp8", wrong=100).save(tmp_path / "evaluation.json")
    table = comparison([(None, tmp_path / "evaluation.json")], load(["eval.baseline=skip"]).eval)
    assert table.rows[0]["accuracy"] == 0.5
    assert "loss_percent" not in table.rows[0]
    assert "eval.baseline=skip" in table.text


def test_no_advice_breaks_a_rule(tmp_path):
    """Without chunks a prompt of 8,000 tokens needs as many per iteration, so fewer are not proposed."""
    words = ["model=gemma_7b", "hardware=a10", "quant=none", "build.max_num_tokens=65536", "build.max_seq_len=8192"]
    with pytest.raises(UserError, match=r"Fits with build\.max_batch_size=256 build\.max_num_tokens=2048"):
        plan(tmp_path, words, "build")
    with pytest.raises(UserError, match=r"leaves no KV cache") as refused:
        plan(tmp_path, [*words, "build.max_input_len=8000"], "build")
    assert "max_num_tokens=2048" not in str(refused.value)


def test_no_format_is_proposed_that_the_given_ones_refusal_would_refuse_too(tmp_path):
    """The LLM API has neither int8_sq nor int4_wo; the memory's advice used to name the latter."""
    words = ["model=llama_3_1_70b", "engine=tensorrt_llm_llmapi", "hardware=a100_sxm_40gb", "quant=int8_sq"]
    with pytest.raises(UserError, match=r"does not support quant=int8_sq") as refused:
        plan(tmp_path, words, "build")
    proposed = " ".join(f"{fault.allowed} {fault.todo}" for fault in refused.value.faults)
    assert "quant=int4_awq" in proposed
    assert "int4_wo" not in proposed


def test_the_cpu_engine_is_proposed_only_where_it_would_do(tmp_path):
    words = ["model=tiny_llama", "build.max_batch_size=8"]
    assert "use engine=openvino" in str(plan(tmp_path, words, "build").not_here[0])
    odd_window = ["window=sliding", "triton.max_attention_window_size=[100]"]
    (fault,) = plan(tmp_path, [*words, *odd_window], "build").not_here
    assert "openvino" not in str(fault)
    assert "make shell" in str(fault)


def test_the_model_itself_can_be_the_baseline(tmp_path):
    """It is evaluated in Transformers, and no 16-bit engine is built for the comparison."""
    made = plan(tmp_path, ["model=llama_3_1_8b", "eval.baseline=hugging_face", "build.max_seq_len=4096"])
    stages = {step.node.id: step.node for step in made.steps}
    assert [*stages] == ["download", "download.eval", "reference", "quantize", "build", "evaluate"]
    assert stages["reference"].inputs.keys() == {"model", "dataset"}
    assert stages["reference"].stage.max_length == 4096  # as the engine: both see the same prompts
    uncompressed = plan(tmp_path, ["model=llama_3_1_8b", "quant=none", "eval.baseline=hugging_face"])
    assert "reference" in {step.node.id for step in uncompressed.steps}


def test_a_model_that_does_not_fit_in_float32_is_no_baseline(tmp_path):
    """Two times 16.06 GB of 16-bit weights, and 2 GiB of libraries: 31.9 GiB."""
    small, words = replace(MACHINE, memory_bytes=24 * 2**30), ["quant=int4_awq", "eval.baseline=hugging_face"]
    with pytest.raises(UserError, match=r"llama_3_1_8b in float32.*31\.9 GiB.*this machine has 24"):
        make_plan(load(["model=llama_3_1_8b", *words]), "evaluate", Store(tmp_path / "store"), small)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("triton.gpu_device_ids=[[0,1]]", r"gpu_device_ids=\[\[0,1\]\] does not fit an engine of 1 rank"),
        ("triton.gpu_device_ids=[[0]] build.tp_size=2", r"gpu_device_ids=\[\[0\]\] does not fit an engine of 2 rank"),
        ("triton.gpu_device_ids=[[0,0]] build.tp_size=2", r"gpu_device_ids=\[\[0,0\]\] does not fit"),
        ("triton.gpu_device_ids=[[0,1],[2]] build.tp_size=2", r"gpu_device_ids=\[\[0,1\],\[2\]\] does not fit"),
        ("triton.gpu_device_ids=[[8]]", r"gpu_device_ids=\[\[8\]\] names a GPU that a server with h100_sxm"),
        ("triton.participant_ids=[[1,1]] build.tp_size=2", r"participant_ids=\[\[1,1\]\] does not fit"),
        ("triton.draft_gpu_device_ids=[[1,2]]", r"draft_gpu_device_ids=\[\[1,2\]\] does not fit"),
    ],
)
def test_devices_and_processes_go_with_the_ranks(words, said, tmp_path):
    base = ["engine=tensorrt_llm", "model=gemma_2b", "quant=fp8", "hardware=h100_sxm"]
    with pytest.raises(UserError, match=rf"triton\.{said}"):
        plan(tmp_path, [*base, *words.split()], "serve")
    plan(tmp_path, [*base, "build.tp_size=2", "triton.gpu_device_ids=[[0,1],[2,3]]"], "serve")
    plan(tmp_path, [*base, *words.split()], "build")  # which serves nothing


@pytest.mark.parametrize(
    ("words", "installed", "said"),
    [
        ([], "absent", ""),
        ([], "1.2.1", ""),
        ([], "1.2.0.post1", "TensorRT-LLM 1.2.0.post1 is installed; 1.2.1 is the newest that has TensorRT engines."),
        (["image.base_gpu=nvcr.io/nvidia/tritonserver:26.03-trtllm-python-py3"], "absent", "is older than 26.07"),
        (["image.base_gpu=nvcr.io/nvidia/tritonserver:26.03-trtllm-python-py3"], "1.2.1", ""),
        (["image.base_gpu=mine:1"], "absent", ""),
        (["engine=tensorrt_llm_llmapi", "image.base_llm_api=mine:1.3.0rc3"], "absent", "1.3.0rc3, which is older than"),
        (["engine=tensorrt_llm_llmapi", "image.base_llm_api=mine:1.4.0rc1"], "absent", ""),
        (["engine=tensorrt_llm_llmapi", "image.base_llm_api=mine:latest-1"], "absent", ""),
        (["engine=tensorrt_llm_llmapi"], "1.2.1", ""),
    ],
)
def test_a_plan_warns_of_an_older_tensorrt_llm(tmp_path, monkeypatch, words, installed, said):
    monkeypatch.setattr("pipelines.plan.checks.library_versions", lambda names: dict.fromkeys(names, installed))
    warnings = [str(fault) for fault in plan(tmp_path, ["model=llama_3_1_8b", *words], "build").warnings]
    found = [text for text in warnings if "image.base" in text or "is installed" in text]
    assert len(found) == bool(said)
    assert said in " ".join(found)


def test_only_a_mistral_with_a_window_has_another_checkpoint_than_before(tmp_path):
    """Those from before do not state it. Its baseline keeps to the window too, and is not refused."""
    for kind, stated in (("mistral", None), ("mistral_with_window", 40)):
        model = write_model(tmp_path / kind, kind)
        told = ["triton.max_attention_window_size=[40]"] if stated else []
        planned = plan(tmp_path, [f"model.path={model}", "build.max_seq_len=128", "eval=mini_mmlu", *told])
        stages = {step.node.id: step.node.stage for step in planned.steps}
        for name in ("quantize", "baseline.quantize"):
            assert stages[name].identity().get("sliding_window") == stated
