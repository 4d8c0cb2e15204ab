"""The cache key covers what changes bytes and nothing else: every setting is changed, one at a time."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.compress.config import Linear
from pipelines.engines.registry import choose
from pipelines.engines.tensorrt_llm.config import DECIDED, OF_A_FORMAT, OPTIONS, TABLE_OF_OTHERS, key_of
from pipelines.engines.tensorrt_llm.folder import NO_BYTES
from pipelines.host.machine import GpuFacts, Machine
from pipelines.plan.deployment import Deployment
from pipelines.plan.flow import nodes
from pipelines.plan.plan import node_key
from pipelines.plan.user_inputs import UserInputs
from pipelines.settings.base import Group
from pipelines.settings.compose import load
from pipelines.settings.groups import CONF
from pipelines.settings.root import Settings
from pipelines.store.sources import InputSource
from triton_repo.config import TritonSettings

MACHINE = Machine(2, 2**34, (), "a test", has_tensorrt_llm=False, platform="test")
NAMES = ("vision", "model", "calibration", "dataset", "draft", "text.bundled", "reference_model")
SOURCES = {name: InputSource(Path("/x"), f"digest of {name}") for name in NAMES}
REPOSITORY = {"repository"}
COMPARE = {"fidelity"}
QUANTIZE = {"quantize", "build", "evaluate", *COMPARE, *REPOSITORY}
RECOVER = {"recover", *QUANTIZE}
SPARSIFY = {"sparsify", *QUANTIZE}
PRUNE = {"prune_model", *SPARSIFY}
BASE = {*(f"baseline.{stage}" for stage in ("quantize", "build", "evaluate")), *COMPARE}
BUILD_ON_GPU = {"build", "evaluate", "baseline.build", "baseline.evaluate", *REPOSITORY}
BUILD = {*BUILD_ON_GPU, *COMPARE}  # TensorRT engines are not compared
EVALUATE = {"evaluate", "baseline.evaluate"}
NOTHING: set[str] = set()

LOCAL_TEXT = {"calibration.source": "local", "calibration.path": Path("/text")}
HUB_TEXT = {"calibration.source": "hub", "calibration.dataset": "org/text"}

TINY = {"name": "tiny", "hub_id": None, "revision": None, "bundled": "tiny_gemma", "path": None, "shape": None}
DRAFT = {
    "speculative.mode": "draft_target",
    "speculative.draft": TINY,
    "speculative.draft_qformat": "fp8",
    "speculative.num_draft_tokens": 4,
}
GUESS = {"draft.quantize", "draft.build", *REPOSITORY}

SEARCH = {
    "quant.qformat": "auto",
    "quant.effective_bits": 6.0,
    "quant.candidates": ("fp8", "int4_awq"),
    "quant.scoring": "gradient",
    "quant.scoring_texts": 128,
}
TRAINING = {
    "recover.method": "distill",
    "recover.steps": 300,
    "recover.learning_rate": 2e-4,
    "recover.seq_len": 256,
    "recover.batch_size": 8,
    "recover.accumulation": 1,
    "recover.evaluate_every": 50,
    "recover.patience": 3,
    "recover.seed": 1234,
}
OWN = {"eval.task": "local", "eval.path": Path("/questions.csv"), "eval.num_fewshot": None}
OWN_COLUMNS = ("question_column", "choices_column", "answer_column", "subject_column")
WIDTH = {"prune.method": "width", "prune.mlp": 384, "prune.texts": 64}
START = ["quant=int4_awq", "sparsity=sparsegpt_2_4", "engine=openvino"]
MUST_RERUN = {
    # setting: (another valid value, the stages that must run again)
    "model.name": ("other", EVALUATE | COMPARE | REPOSITORY),  # all carry the model's name
    # a folder is used, so the Hub is not asked
    "model.hub_id": ({"model.hub_id": "org/name", "model.path": Path("/elsewhere/tiny_gemma")}, NOTHING),
    "model.revision": ({"model.revision": "v2", "model.path": Path("/elsewhere/tiny_gemma")}, NOTHING),
    "model.bundled": ("tiny_llama", NOTHING),  # the weights count, through their digest
    "model.path": (Path("/elsewhere/tiny_gemma"), NOTHING),  # the place does not matter, the content does
    "model.shape": (None, NOTHING),
    "quant.qformat": ("fp8", QUANTIZE),
    "quant.dtype": ("float16", QUANTIZE),
    "quant.group_size": (64, QUANTIZE),
    "quant.smoothquant_alpha": (0.7, NOTHING),  # not read by int4_awq
    "quant.awq_alpha_step": (0.25, QUANTIZE),
    "quant.int4_scales": ("mse", NOTHING),  # not read by int4_awq
    "quant.fp4_inputs": ("headroom", NOTHING),  # not read by int4_awq
    # a search has no default, and other formats refuse its settings: they go together
    **dict.fromkeys(TRAINING, (TRAINING, RECOVER)),
    "recover.texts": (TRAINING | {"recover.texts": 9}, RECOVER),
    "recover.precision": (TRAINING | {"recover.precision": "bfloat16"}, RECOVER),
    "recover.gradient_checkpointing": (TRAINING | {"recover.gradient_checkpointing": True}, RECOVER),
    "recover.lora_rank": (TRAINING | {"recover.lora_rank": 8}, RECOVER),
    "recover.lora_alpha": (TRAINING | {"recover.lora_rank": 8, "recover.lora_alpha": 4.0}, RECOVER),
    "recover.lora_targets": (TRAINING | {"recover.lora_rank": 8, "recover.lora_targets": ("q_proj",)}, RECOVER),
    "recover.processes": (TRAINING | {"recover.processes": 2}, RECOVER),
    "recover.sharding": (TRAINING | {"recover.processes": 2, "recover.sharding": "full"}, RECOVER),
    "recover.teacher": (TRAINING | {"recover.teacher": Path("/teacher")}, RECOVER),
    "quant.effective_bits": (SEARCH, QUANTIZE),
    "quant.candidates": (SEARCH, QUANTIZE),
    "quant.scoring": (SEARCH, QUANTIZE),
    "quant.scoring_texts": (SEARCH, QUANTIZE),
    **dict.fromkeys(WIDTH, (WIDTH, PRUNE)),
    "prune.heads": (WIDTH | {"prune.heads": 2}, PRUNE),
    "prune.kv_heads": (WIDTH | {"prune.heads": 2, "prune.kv_heads": 1}, PRUNE),
    "prune.layers": ({"prune.method": "depth", "prune.layers": 3, "prune.texts": 64}, PRUNE),
    "sparsity.method": ("magnitude", SPARSIFY),
    "kv_cache.dtype": ("fp8", QUANTIZE),
    "kv_cache.enable_block_reuse": (False, REPOSITORY),  # a choice at run time
    "calibration.source": (LOCAL_TEXT, SPARSIFY),  # then the column counts
    "calibration.path": (LOCAL_TEXT, SPARSIFY),  # cannot be given alone; alone it is its digest that counts
    "calibration.dataset": (HUB_TEXT, SPARSIFY),  # cannot be given alone
    "calibration.revision": (HUB_TEXT | {"calibration.revision": "v2"}, SPARSIFY),
    "calibration.split": (HUB_TEXT | {"calibration.split": "test"}, SPARSIFY),
    "calibration.column": (LOCAL_TEXT | {"calibration.column": "body"}, SPARSIFY),
    "calibration.size": (64, SPARSIFY),
    "calibration.seq_len": (256, SPARSIFY),
    "calibration.batch_size": (4, SPARSIFY),
    # they are read by other engines and commands
    "llm_api.file": (CONF / "quant" / "fp8.yaml", NOTHING),
    "llm_api.extra": ({"dtype": "float16"}, NOTHING),
    "llm_api.tuned": ("none", NOTHING),
    "migrate.path": (Path("/engine"), NOTHING),
    "migrate.command": ("trtllm-build", NOTHING),
    "migrate.folder": (Path("/migrated"), NOTHING),
    "paths.edge": (Path("/edge"), NOTHING),
    "engine.name": ("auto", NOTHING),  # resolves to the same engine here
    "engine.path": (Path("/engine"), NOTHING),  # its content counts, as an input
    "engine.openvino.inference_precision": ("bf16", EVALUATE | COMPARE | REPOSITORY),
    "engine.openvino.dynamic_quantization": ("32", {"evaluate", *COMPARE, *REPOSITORY}),
    "engine.openvino.num_threads": (1, REPOSITORY),
    "engine.openvino.kv_cache_bytes": (2**20, REPOSITORY),
    "engine.openvino.kv_cache_precision": ("u8", REPOSITORY),
    "engine.openvino.head_precision": ("int8", {"build", "evaluate", *COMPARE, *REPOSITORY}),
    "engine.openvino.experts": ("separate", NOTHING),  # read of mixtures: test_plan.py
    "build.max_batch_size": (8, BUILD),
    "build.max_input_len": (512, BUILD),
    "build.max_seq_len": (1024, BUILD),
    "build.max_num_tokens": (4096, BUILD),
    "build.max_beam_width": (2, BUILD),
    "build.max_prompt_embedding_table_size": (64, BUILD),
    "build.tokens_per_block": (64, BUILD),
    "build.tp_size": (2, QUANTIZE | BASE),
    "build.pp_size": (2, QUANTIZE | BASE),
    "build.moe_ep_size": (2, QUANTIZE | BASE),
    "tuning.name": ("plain", NOTHING),  # TensorRT engines only
    "runtime.enable_chunked_context": (True, REPOSITORY),
    "lora.adapters": ({1: Path("/adapter")}, NOTHING),  # their content counts, as inputs
    "lora.max_rank": (32, NOTHING),  # read as build.trtllm.max_lora_rank
    "lora.target_modules": (("attn_q",), NOTHING),  # read as build.trtllm.lora_target_modules
    "speculative.mode": (DRAFT, GUESS),  # cannot be given alone
    "speculative.draft": (TINY, NOTHING),  # read with mode draft_target only, as are the others
    "speculative.draft_qformat": ("fp8", NOTHING),
    "speculative.num_draft_tokens": (3, NOTHING),
    "speculative.heads_path": (Path("/heads"), NOTHING),  # trained heads are for TensorRT engines
    "speculative.num_heads": (2, NOTHING),
    "speculative.num_layers": (2, NOTHING),
    "speculative.num_beams": (2, NOTHING),
    "speculative.draft_len_per_beam": (2, NOTHING),
    "multimodal.model_type": (
        {"multimodal.model_type": "llava", "multimodal.path": Path("/m"), "multimodal.visual_tokens": 4},
        {"vision", *REPOSITORY},
    ),
    "multimodal.path": (Path("/m"), NOTHING),
    "multimodal.visual_tokens": (4, NOTHING),
    "multimodal.images_per_request": (2, NOTHING),
    "eval.task": ("mmlu", EVALUATE),
    "eval.num_fewshot": (3, EVALUATE),
    "eval.limit": (10, EVALUATE),
    "eval.metric": ("acc", EVALUATE),
    "eval.guided": (True, EVALUATE),
    "eval.apply_chat_template": (True, EVALUATE),
    "eval.fewshot_as_multiturn": ({"eval.apply_chat_template": True, "eval.fewshot_as_multiturn": False}, EVALUATE),
    "eval.system_instruction": ("Be brief.", EVALUATE),
    "eval.dataset": ("org/mmlu", NOTHING),
    "eval.revision": ("v2", NOTHING),
    "eval.dataset_path": (Path("/questions"), NOTHING),  # the questions' digest counts
    "eval.path": (OWN, EVALUATE),
    "eval.name": (OWN | {"eval.name": "laws"}, EVALUATE),
    **{f"eval.{column}": (OWN | {f"eval.{column}": "x"}, EVALUATE) for column in OWN_COLUMNS},
    "eval.answers": (OWN | {"eval.answers": "letter"}, EVALUATE),
    "fidelity.texts": (("calibration",), COMPARE),
    "fidelity.path": (Path("/text.jsonl"), COMPARE),  # how it is read; besides, its digest counts
    "fidelity.column": ({"fidelity.path": Path("/text.jsonl"), "fidelity.column": "body"}, COMPARE),
    "fidelity.tokens": (64, COMPARE),
    "fidelity.window": (64, COMPARE),
    "fidelity.prompts": (2, COMPARE),
    "fidelity.new_tokens": (8, COMPARE),
    "fidelity.top_logprobs": (5, NOTHING),  # of a server that runs (eval.url), which a stage of its own asks
    "fidelity.by_layer": (True, COMPARE),
    "fidelity.reference_path": (Path("/other"), {"reference.quantize", "reference.build", *COMPARE}),
    "hardware.name": ("other", NOTHING),
    "hardware.sm": (9.0, NOTHING),
    "hardware.memory_gb": (80.0, NOTHING),
    "hardware.reported_gb": (79.6, NOTHING),
    "hardware.nvidia_smi": (["NVIDIA H100 PCIe"], NOTHING),
    "eval.baseline": ("skip", BASE),
    "eval.baseline_tp_size": (2, BASE),
    "eval.url": ("http://127.0.0.1:9/v1", NOTHING),  # a server that runs is asked by a stage of its own
    "eval.model": (None, NOTHING),
    "eval.concurrency": (2, NOTHING),
    "eval.timeout_s": (30.0, NOTHING),
    "eval.margin_points": (2.0, NOTHING),
    "eval.false_go": (0.01, NOTHING),
    "eval.sequential": (True, EVALUATE),
    "eval.max_questions": (100, EVALUATE),  # implies sequential
    "eval.judged_together": (3, NOTHING),  # see below for an evaluation that stops early
    "eval.fidelity": (True, NOTHING),  # `all` compares predictions anyway
    "plan.target": ("build", NOTHING),  # `make plan` alone reads it
    "stage.name": ("build", NOTHING),  # `make stage` alone reads them
    "stage.link": (Path("/link"), NOTHING),
    "paths.store": (Path("/store"), NOTHING),
    "paths.runs": (Path("/runs"), NOTHING),
    "paths.trtllm_examples": (Path("/examples"), NOTHING),  # scripts are run for TensorRT engines only
    "store.keep_days": (7, NOTHING),
    "store.remove": (True, NOTHING),
    "verify.path": (Path("/checkpoint"), NOTHING),
    "diagnose.checkpoint": (Path("/checkpoint"), NOTHING),  # `make diagnose` alone reads them, and runs every time
    "diagnose.engine": (Path("/engine"), NOTHING),
    "diagnose.repository": (Path("/repository"), NOTHING),
    "diagnose.simulate": (False, NOTHING),
    "diagnose.serve": (False, NOTHING),
    "doctor.format": ("json", NOTHING),
    "doctor.timeout_s": (0.5, NOTHING),
    "doctor.kubeconfig": ("pyproject.toml", NOTHING),
}

FREE = [option for name, option in OPTIONS.items() if name not in DECIDED and f"build.{name}" not in MUST_RERUN]


def another_value(option):
    """A value of trtllm-build's option that is not its default."""
    if option.type == "int":
        return (option.default or 0) + 1
    if option.choices:
        other = next(choice for choice in option.choices if choice != option.default)
        return {"log_level": "debug", "lora_target_modules": [other]}.get(option.key, other)
    return True


MUST_RERUN |= {key_of(option.key): (another_value(option), NOTHING) for option in FREE}  # read by trtllm-build only


@pytest.fixture(scope="module")
def start() -> Settings:
    return load(START)


def keys(configured: Settings, digests=None, machine=MACHINE) -> dict[str, str]:
    """Key of every stage; a stage counts as changed when anything before it is."""
    sources = {
        name: InputSource(source.path, (digests or {}).get(name, source.digest)) for name, source in SOURCES.items()
    }
    found: dict[str, str] = {}
    engine = choose(configured.engine.name, machine).engine
    for node in nodes(Deployment(configured, "all", engine, machine, UserInputs(sources))):
        if node.stage.measures:
            continue
        inputs = {name: src.digest if isinstance(src, InputSource) else found[src] for name, src in node.inputs.items()}
        found[node.id] = node_key(node, inputs)[0]
    return found


def change(configured: Settings, key: str, value) -> Settings:
    """A copy with one leaf replaced (or those that go only together) and validated."""
    raw = configured.model_dump()
    several = isinstance(value, dict) and all("." in str(name) for name in value)
    for name, new in (value if several else {key: value}).items():
        *path, leaf = name.split(".")
        group = raw
        for part in path:
            group = group.setdefault(part, {})  # a group that nobody set is not in the dump
        group[leaf] = new
    return Settings.model_validate(raw)


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_a_changed_setting_reruns_exactly_these_stages(start, subtests):
    for key in MUST_RERUN:
        with subtests.test(str(key)):
            value, expected = MUST_RERUN[key]
            assert changed(keys(start), keys(change(start, key, value))) == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("eval.margin_points", 2.0, {"evaluate"}),
        ("eval.false_go", 0.01, {"evaluate"}),
        ("eval.judged_together", 3, {"evaluate"}),
        ("eval.max_questions", 100, {"evaluate"}),
        ("eval.limit", 10, {"evaluate"}),
    ],
)
def test_what_decides_when_asking_stops_asks_again(start, key, value, expected):
    """The verdict decides how many questions are asked, of both engines in one stage."""
    until_known = change(start, "eval.sequential", True)
    assert "baseline.evaluate" not in keys(until_known)
    assert changed(keys(until_known), keys(change(until_known, key, value))) == expected


OTHER_TRITON = {
    "triton_max_batch_size": 4,
    "max_beam_width": 2,
    "batching_strategy": "inflight_batching",
    "batch_scheduler_policy": "max_utilization",
    "gpu_device_ids": [[0, 1]],
    "draft_gpu_device_ids": [[2, 3]],
    "retention_priority": 50,
    "participant_ids": [[1, 2]],
    "max_attention_window_size": [64],
    "decoding_mode": "top_k",
    "guided_decoding_backend": None,  # goes only with the path of its vocabulary
    "medusa_choices": "{0}",
    "eagle_choices": "{0}",
    "speculative_decoding_fast_logits": False,  # nothing else is accepted
}
"""Other valid values where flipping, adding one or naming a path is none."""


def another(name, now):
    """A valid value that is not the one a parameter has."""
    if name in OTHER_TRITON:
        return OTHER_TRITON[name]
    if isinstance(now, bool):
        return not now
    if isinstance(now, int | float):
        return now / 2 if isinstance(now, float) else now + 1
    return "/some/path" if now or "str" in str(TritonSettings.model_fields[name].annotation) else 1


def test_every_parameter_of_the_repository_changes_the_repository_alone(start, subtests):
    for name in sorted(TritonSettings.model_fields):
        with subtests.test(name):
            now = getattr(start.triton, name)
            new = another(name, now)
            expected = REPOSITORY if new != now else NOTHING
            assert changed(keys(start), keys(change(start, "", {f"triton.{name}": new}))) == expected


def test_how_a_server_is_run_and_measured_changes_nothing_that_is_kept(start):
    """Ports, loads, reports and images decide no bytes of an artifact; a measurement is made anew anyway."""
    ports_and_openai = ["serving.http_port=9999", "serving.openai=true"]
    load_and_limits = ["workload=poisson", "benchmark.request_rate=[1]", "benchmark.slo.ttft_ms=1"]
    images = ["image.uid=2000", "manifests.replicas=2", "cluster.partition=h100"]
    sizing = ["sizing.average_rate=5", "sizing.formats=[fp8]", "simulator.slots=8"]
    other = load([*START, *ports_and_openai, *load_and_limits, *images, *sizing, "report.max_accuracy_loss_percent=5"])
    assert changed(keys(start), keys(other)) == NOTHING


def test_every_setting_has_been_decided():
    """A new setting must be put into the table: does it change bytes?"""
    by_group = {"triton", "serving", "workload", "benchmark", "report", "image", "manifests", "cluster", "nightly"}
    by_group |= {"simulator", "sizing"}
    unused = {"gpu", "arch", "mem_bw_gb_s", "fp16_dense_tflops", "fp8_dense_tflops", "int8_dense_tops"}
    unused |= {
        "fp4_dense_tflops",
        "sparse_multiplier",
        "nvlink_gb_s_bidir",
        "pcie_gb_s_per_dir",
        "c2c_gb_s_per_dir",
        "gpus_per_server",
        "tdp_w",
    }

    def leaves(group, prefix=""):
        for name, field in group.model_fields.items():
            if not prefix and name in by_group:
                continue
            if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
                yield from leaves(field.annotation, f"{prefix}{name}.")
            elif prefix + name == "build.trtllm":
                yield from (f"build.trtllm.{option}" for option in TABLE_OF_OTHERS.kinds)
            elif prefix != "hardware." or name not in unused:
                yield prefix + name

    assert set(leaves(Settings)) == set(MUST_RERUN)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("model", SPARSIFY | BASE), ("calibration", SPARSIFY), ("dataset", EVALUATE), ("text.bundled", COMPARE)],
)
def test_a_changed_input_reruns_exactly_these_stages(start, source, expected):
    assert changed(keys(start), keys(start, {source: "other content"})) == expected


@pytest.mark.parametrize("key", ["name", *OWN_COLUMNS, "answers"])
def test_every_setting_of_own_questions_makes_another_evaluation(start, key):
    own = change(start, "", OWN)
    assert changed(keys(own), keys(change(own, f"eval.{key}", "letter"))) == EVALUATE


def test_a_changed_draft_model_reruns_its_own_stages_and_the_repository(start):
    guessing = change(start, "", DRAFT)
    assert changed(keys(guessing), keys(guessing, {"draft": "other content"})) == GUESS
    assert changed(keys(guessing), keys(change(guessing, "speculative.draft_qformat", "int8_sq"))) == GUESS
    assert changed(keys(guessing), keys(change(guessing, "speculative.num_draft_tokens", 3))) == REPOSITORY


def test_a_changed_adapter_reruns_the_repository(start, monkeypatch):
    monkeypatch.setitem(SOURCES, "lora.1", InputSource(Path("/x"), "digest"))
    assert changed(keys(start), keys(start, {"lora.1": "other content"})) == REPOSITORY


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("nvidia-modelopt", SPARSIFY),  # the baseline's checkpoint is a copy
        ("torch", SPARSIFY),
        ("openvino", BUILD),
        ("openvino-genai", EVALUATE | COMPARE),
        ("lm-eval", EVALUATE),
        ("hydra-core", NOTHING),
        ("rich", NOTHING),
    ],
)
def test_a_changed_library_reruns_exactly_these_stages(start, library, expected, monkeypatch):
    before = keys(start)
    import pipelines.host.machine as machine

    real = machine._version
    monkeypatch.setattr(machine, "_version", lambda path, name: "99" if name == library else real(path, name))
    assert changed(before, keys(start)) == expected


@pytest.fixture(scope="module")
def start_on_gpu() -> Settings:
    return load(["quant=int8_wo", "engine=tensorrt_llm", "tuning=plain"])  # each option by itself


ON_GPU = Machine(8, 2**38, (GpuFacts("NVIDIA A10", 8.6, 23028 * 2**20),), "", has_tensorrt_llm=True, platform="test")


def test_an_option_of_trtllm_build_reruns_the_build_unless_it_only_changes_how_it_runs(start_on_gpu, subtests):
    for option in FREE:
        with subtests.test(option.key):
            after = change(start_on_gpu, key_of(option.key), another_value(option))
            expected = NOTHING if option.key in NO_BYTES else BUILD_ON_GPU
            of_a_format = another_value(option) in OF_A_FORMAT.get(option.key, ())
            if of_a_format or option.key in (
                "speculative_decoding_mode",
                "max_draft_len",
            ):  # the baseline has none of it
                expected = BUILD_ON_GPU - BASE
            assert changed(keys(start_on_gpu, machine=ON_GPU), keys(after, machine=ON_GPU)) == expected


@pytest.mark.parametrize(("gpu", "expected"), [(("NVIDIA A40", 8.6), NOTHING), (("NVIDIA L4", 8.9), BUILD_ON_GPU)])
def test_another_compute_capability_is_another_engine(start_on_gpu, gpu, expected):
    other = replace(ON_GPU, gpus=(GpuFacts(*gpu, 23028 * 2**20),))
    assert changed(keys(start_on_gpu, machine=ON_GPU), keys(start_on_gpu, machine=other)) == expected


@pytest.mark.parametrize("key", ["smoothquant_alpha"])
def test_an_option_counts_only_for_the_format_that_reads_it(key):
    start = load(["quant=int8_sq", "engine=openvino"])
    assert changed(keys(start), keys(change(start, f"quant.{key}", 0.7))) == QUANTIZE
    assert changed(keys(start), keys(change(start, "quant.group_size", 64))) == NOTHING
    start = load(["quant=nvfp4", "model=tiny_llama", "engine=openvino"])
    assert changed(keys(start), keys(change(start, "quant.group_size", 64))) == NOTHING  # its groups are of 16


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("effective_bits", 7.0),
        ("candidates", ("fp8", "w4a8_awq")),
        ("scoring", "kl_div"),
        ("scoring_texts", 8),
        ("group_size", 64),
        ("awq_alpha_step", 0.25),
    ],
)
def test_every_setting_of_a_search_makes_another_checkpoint(key, value):
    start = load(["quant=auto", "engine=openvino"])
    assert changed(keys(start), keys(change(start, f"quant.{key}", value))) == QUANTIZE
    assert changed(keys(start), keys(change(start, "quant.smoothquant_alpha", 0.7))) == NOTHING


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", "finetune"),
        ("texts", 9),
        ("steps", 9),
        ("learning_rate", 1e-3),
        ("seq_len", 64),
        ("batch_size", 2),
        ("accumulation", 2),
        ("precision", "bfloat16"),
        ("gradient_checkpointing", True),
        ("evaluate_every", 9),
        ("patience", 1),
        ("seed", 9),
        ("lora_rank", 8),
        ("processes", 2),  # gradients are added up in another order
    ],
)
def test_every_setting_of_a_training_makes_other_weights(key, value):
    start = load(["recover=distill", "sparsity=magnitude_2_4", "quant=none", "engine=openvino"])
    assert changed(keys(start), keys(change(start, f"recover.{key}", value))) == RECOVER
    assert changed(keys(start), keys(change(start, "calibration.size", 9))) == COMPARE  # which reads these texts too


def test_parts_of_a_model_make_other_weights_than_whole_ones():
    """Gradients are added up in pieces of another size."""
    words = ["recover=distill", "recover.processes=2", "sparsity=magnitude_2_4", "quant=none", "engine=openvino"]
    start = load(words)
    assert changed(keys(start), keys(change(start, "recover.sharding", "full"))) == RECOVER


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("recover.lora_rank", 4, RECOVER),
        ("recover.lora_alpha", 3.0, RECOVER),
        ("recover.lora_alpha", 16.0, NOTHING),  # what null stands for
        ("recover.lora_targets", ("q_proj",), RECOVER),
        ("recover.lora_targets", ("down_proj", *get_args(Linear)), NOTHING),
        ("recover.processes", 1, NOTHING),
        ("quant.group_size", 64, RECOVER),
        ("quant.dtype", "float16", RECOVER),
        ("quant.int4_scales", "mse", RECOVER),  # which training does not see
    ],
)
def test_low_rank_and_rounding_count_by_what_they_come_to(key, value, expected):
    words = ["recover=distill", "recover.lora_rank=8", "sparsity=magnitude_2_4", "quant=int4_rtn", "engine=openvino"]
    start = load(words)
    assert changed(keys(start), keys(change(start, key, value))) == expected


@pytest.mark.parametrize(("key", "value"), [("quant.group_size", 64), ("quant.dtype", "float16")])
def test_what_only_quantizing_reads_trains_nothing_anew(key, value):
    """int4_wo has no groups, and training does not see the rounding of int4_awq."""
    for qformat in ("int4_awq", "int4_wo"):
        start = load(["recover=distill", "sparsity=magnitude_2_4", f"quant={qformat}", "engine=openvino"])
        seen = qformat == "int4_wo" and key == "quant.dtype"
        assert ("recover" in changed(keys(start), keys(change(start, key, value)))) == seen


def test_gpus_that_share_a_batch_make_other_weights(monkeypatch):
    for module in ("deployment", "weights_checks"):
        monkeypatch.setattr(f"pipelines.plan.{module}.torch_device", lambda _machine: "cuda")
    start = load(["recover=distill", "sparsity=magnitude_2_4", "quant=none", "engine=openvino"])
    gpu = GpuFacts("NVIDIA H100 80GB HBM3", 9.0, 81559 * 2**20)
    one, three, four = (keys(start, machine=replace(MACHINE, gpus=(gpu,) * count)) for count in (1, 3, 4))
    assert "recover" in changed(one, four)
    assert "recover" in changed(one, three)  # two of the three, because three do not divide a batch of eight
    assert keys(change(start, "recover.processes", 2), machine=replace(MACHINE, gpus=(gpu,) * 3)) == three


def test_a_teacher_and_the_rounding_of_a_format_make_other_weights():
    start = load(["recover=distill", "sparsity=magnitude_2_4", "quant=int4_wo", "engine=openvino"])
    other = load(["recover=distill", "sparsity=magnitude_2_4", "quant=int8_wo", "engine=openvino"])
    assert changed(keys(start), keys(other)) >= RECOVER
    assert changed(keys(start), keys(start, {"model": "another digest"})) >= RECOVER


@pytest.mark.parametrize(("key", "value"), [("mlp", 256), ("heads", 2), ("texts", 8)])
def test_every_setting_of_pruning_makes_another_model(key, value):
    start = load(["prune=width", "prune.mlp=384", "quant=none", "engine=openvino"])
    another = {"prune_model", *QUANTIZE}
    assert changed(keys(start), keys(change(start, f"prune.{key}", value))) == another
    assert changed(keys(start), keys(change(start, "calibration.seq_len", 64))) == another
    assert changed(keys(start), keys(change(start, "calibration.size", 9))) == COMPARE  # prune.texts counts instead


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(picked=st.lists(st.sampled_from(sorted(MUST_RERUN)), min_size=1, max_size=4, unique=True))
def test_several_changes_rerun_at_least_what_each_does(start, picked):
    """No combination of changes hides one of them."""
    together = start
    deciding = {
        *SEARCH,
        *(f"eval.{key}" for key in ("path", "name", "answers", *OWN_COLUMNS)),  # they go only with eval=local
        *(key for key in MUST_RERUN if key.startswith("recover.")),
        *(key for key in MUST_RERUN if key.startswith("prune.")),
        "sparsity.method",
        "calibration.source",
        "calibration.path",
        "calibration.dataset",
        "calibration.revision",
        "calibration.split",
        "calibration.column",
        "fidelity.column",
        *("model.path", "model.hub_id", "model.revision"),  # the last two come with a path
        "eval.url",
        "eval.fidelity",  # goes only with a baseline that is made here
    }
    if {"eval.sequential", "eval.max_questions", "eval.baseline_tp_size"} & set(picked):
        deciding.add("eval.baseline")  # they are refused with a baseline that is not made here
    picked = [key for key in picked if key not in deciding]  # these decide whether other settings are read at all
    for key in picked:
        together = change(together, key, MUST_RERUN[key][0])
    expected = set().union(*(MUST_RERUN[key][1] for key in picked))
    assert changed(keys(start), keys(together)) == expected
