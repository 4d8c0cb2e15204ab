"""Every file under conf/ composes and validates; every mistake names the nearest valid word."""

import csv
import re
from functools import reduce

import pytest
import yaml

from pipelines.cli.words import groups_with_keys
from pipelines.domain.errors import UserError
from pipelines.domain.families import BUILT
from pipelines.domain.formats import QFormat
from pipelines.predict.performance.models import MODELS
from pipelines.settings.by_hydra import compose_config
from pipelines.settings.compose import load
from pipelines.settings.former import CHOICES_ELSEWHERE, ELSEWHERE, elsewhere
from pipelines.settings.groups import CONF, choices, groups
from pipelines.settings.plain import unresolved
from pipelines.settings.root import Settings
from tests.conftest import REFERENCE, ROOT
from tests.support.choices import NEEDS

FILES = [(group, name) for group in groups() for name in choices(group)]


def test_every_file_composes_and_validates(subtests):
    for group, name in FILES:
        with subtests.test(f"{group}={name}"):
            settings = load([f"{group}={name}", *NEEDS.get((group, name), [])])
            assert settings.model.label


@pytest.mark.parametrize(
    "override",
    [
        *("quant='fp8'", 'quant="fp8"', "quant={group_size: 64}", "model={path: /x}", "build={max_batch_size: 4}"),
        *("benchmark={concurrency: [1]}", "+model.path=/x", "+eval.limit=5", "+lora.adapters={3: /a}"),
    ],
)
def test_what_hydra_takes_is_taken(override: str) -> None:
    assert compose_config([override])


def test_all_groups_of_the_readme_are_there():
    assert {"model", "quant", "sparsity", "kv_cache", "calibration", "engine", "build", "eval", "hardware"} <= set(
        groups()
    )
    assert set(choices("quant")) == {q.value for q in QFormat}


def test_the_guide_names_every_group_and_choice():
    """Except for the GPUs, of which it names some."""
    rows = {}
    for names, row in re.findall(r"^\| ((?:`[a-z_/]+`(?:, )?)+) \|(.*)$", (ROOT / "docs/tasks.md").read_text(), re.M):
        rows |= dict.fromkeys(re.findall(r"`([a-z_/]+)`", names), row)
    assert sorted(set(groups_with_keys()) - rows.keys()) == []
    missing = [f"{name}={choice}" for name in groups() for choice in choices(name) if f"`{choice}`" not in rows[name]]
    assert [word for word in missing if not word.startswith("hardware=") and not word.endswith("=default")] == []


def test_no_file_repeats_a_default():
    """A default stands in the class of its group alone; a preset has what differs."""
    repeated = []
    for group, defaults in Settings.defaults().items():
        for name in choices(group):
            text = (CONF / group / f"{name}.yaml").read_text()
            if not text.startswith("# @package") and "\ndefaults:" not in text:
                values = yaml.safe_load(text) or {}
                repeated += [f"{group}={name}: {key}" for key in values if values[key] == defaults.get(key, MISSING)]
    assert repeated == []


MISSING = object()


def test_a_draft_model_can_be_of_the_hub():
    """As the refusal of `model@speculative.draft=org/name` says."""
    words = ["model=gemma_2b", "speculative=draft_target", "model@speculative.draft=hub"]
    assert load([*words, "speculative.draft.hub_id=org/name"]).speculative.draft.hub_id == "org/name"


def test_every_file_says_the_command_that_runs_it():
    silent = [path for path in CONF.glob("*/*.yaml") if "make" not in path.read_text() and path.stem not in SILENT]
    assert silent == []


SILENT = {"none", "base", "auto", "default"}


def test_hardware_equals_the_data_sheet_table():
    """One file per row of the reference table, with its numbers."""
    rows = {row["gpu"]: row for row in csv.DictReader((REFERENCE / "gpus.csv").open())}
    ours = {h.gpu: h for name in choices("hardware") if name != "auto" for h in [load([f"hardware={name}"]).hardware]}
    assert ours.keys() == rows.keys()
    for gpu, hardware in ours.items():
        for key in ("memory_gb", "mem_bw_gb_s", "fp16_dense_tflops", "fp8_dense_tflops", "int8_dense_tops", "sm"):
            given = rows[gpu][key]
            assert getattr(hardware, key) == (float(given) if given else None), f"{gpu} {key}"


def test_model_shapes_equal_the_published_table():
    """Shapes and their parameter counts are those of the reference table."""
    rows = {row["hf_id"]: row for row in csv.DictReader(MODELS.open())}
    checked = 0
    for name in choices("model"):
        model = load([f"model={name}", *NEEDS.get(("model", name), [])]).model
        if model.shape is None:
            continue
        row, shape = rows[model.hub_id], model.shape.to_shape()
        assert shape.num_params == int(row["params_total"])
        kv_bytes = 4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
        assert kv_bytes == int(row["kv_bytes_per_token_16bit"])
        checked += 1
    assert checked == 12


MISTAKEN_WORDS = [
    ("quant=fp9", r"quant=fp9 is not known\. Choose one of .*int4_awq.*Did you mean 'fp8'\?"),
    ("model=/data/llama", r"model=/data/llama is not known\. .* For a folder of yours: model\.path=/data/llama$"),
    ("model=org/name", r"=org/name is not known\. .*for a model of the Hub: model=hub model\.hub_id=org/name$"),
    (
        "model@speculative.draft=a/b",
        r": speculative\.draft\.path=a/b; .*: model@speculative\.draft=hub speculative\.draft\.hub_id=a/b$",
    ),
    ("calibration=my/t.txt", r"=my/t\.txt is not known\. .*calibration=local calibration\.path=my/t\.txt$"),
    ("modle=tiny_llama", r"'modle' is not a known setting\. Did you mean 'model'\?"),
    ("sizing.calibration=x", r"sizing\.calibration is not a known setting\. It is now 'sizing\.fit'"),
    (
        "build.dora_plugin=disable",
        r"'build\.dora_plugin' is not a known setting\. It is now build\.trtllm=\{dora_plugin: disable\}\.",
    ),
    (
        "build.dry_run=true",
        r"'build\.dry_run' is not a known setting\. It cannot be set: it makes no engine; `make pl",
    ),
    (
        "build.trtllm={dora_plugi: disable}",
        r"'build\.trtllm\.dora_plugi' is not .* Did you mean 'build\.trtllm\.dora_",
    ),
    ("max_batch_size=3", r"Did you mean 'build\.max_batch_size'\?"),
    (
        "workload.isl.mean=16",
        r"'workload\.isl\.mean' cannot be set alone: workload\.isl is no mapping here\. In its place goes a mapping"
        r" with the keys distribution, mean, .*together: workload\.isl=\{mean: 16, \.\.\.\}",
    ),
    ("workload.mix.share=1", r"'workload\.mix\.share' is not a known setting"),
    ("build.max_batchsize=3", r"'build\.max_batchsize' is not a known setting"),
    ("hardware.memory_gb=80", r"'hardware\.memory_gb' is not a known setting"),  # of no GPU: hardware=auto
    ("quant = fp8", r"Did you mean 'quant=fp8'\?$"),
    ("++quant=fp8", r"'\+\+quant=fp8' begins with '\+', which no group takes\. Write quant=fp8$"),
    (
        "store.path=/x",
        r"'store\.path' is not .* folder of the store is paths\.store\. Keys of store: keep_days, remove",
    ),
    ("store.root=/x", r"'store\.root' is not .* folder of the store is paths\.store\."),
    ("paths.artifacts=/x", r"folder of the store is paths\.store\. Keys of paths: edge, runs, store, "),
    ("store.keepdays=2", r"Did you mean 'store\.keep_days'\? Keys of store: keep_days"),
    ("quant.max_batch_size=3", r"Did you mean 'build\.max_batch_size'\? Keys of quant: awq_alpha_step, "),
    ("engine=onnx", r"engine=onnx is not known\. Choose one of auto, openvino, tensorrt_edge, tensorrt_llm"),
    ("build.max_batch_size", r"'build\.max_batch_size' is not a valid override.*Write key=value"),
    ("calibration.seed=7", r"calibration\.seed is no longer a setting\. Nothing is drawn"),
    ("hardware=H100", r"hardware=H100 is not known.*Did you mean 'h100_"),
    ("quant=FP8", r"quant=FP8 is not known.*Did you mean 'fp8'"),
    ("hardware=b200", r"hardware=b200 is not known.*Did you mean 'b200_sxm'"),  # gb200 is another machine
    ("hardware=h100", r"Did you mean 'h100_sxm', 'h100_nvl' or 'h100_pcie'\?"),
    ("quant=awq", r"Did you mean 'w4a8_awq' or 'int4_awq'\?"),
    ("quant=SmoothQuant", r"quant=SmoothQuant is not known.*Did you mean 'int8_sq'\?"),
    ("kv_cache=fp16", r"kv_cache=fp16 is not known.*Did you mean 'auto'\?"),
    ("engine=cpu", r"engine=cpu is not known.*Did you mean 'openvino'\?"),
    (
        "model=meta-llama/Llama-3.1-8B",
        r"3\.1-8B is not known\. .*The choice with this repository of the Hub is model=llama_3_1_8b\.$",
    ),
    ("tensor_parallel_size=2", r"'tensor_parallel_size' is not a known setting\. Did you mean 'build\.tp_size'\?"),
    ("build.tp=2", r"'build\.tp' is not .* Did you mean 'build\.tp_size'\?"),
    ("sizing.qps=2", r"Did you mean 'sizing\.average_rate'\?"),
    ("qps=2", r"Did you mean 'benchmark\.request_rate' or 'sizing\.average_rate'\?"),
    ("isl=9", r"'isl' is not a known setting\. Did you mean 'workload\.isl'\?"),
    ("seed=9", r"Did you mean 'recover\.seed' or 'workload\.seed'\?"),
    ("quant.format=fp8", r"'quant\.format' is not a known setting\. Did you mean 'quant\.qformat'\?"),
    ("report.format=pdf", r"'report\.format' is not a known setting\. Did you mean 'doctor\.format'\?"),
    ("gpu=h100", r"'gpu' is not a known setting\. Did you mean 'hardware'\?"),
    ("hardware=a100", r"hardware=a100 is not known.*Did you mean 'a100_"),
    ("sparsity=2_4", r"^sparsity=2_4 is not known"),
    ("sparsity=2:4", r"^sparsity=2:4 is not known"),
    ("lora.adapters={1: }", r"'\{1: \}' is no list .* a comma or colon has nothing beside it"),
    ("benchmark.concurrency=[1, ]", r"'\[1, \]' is no list \('\[8,16\]'\) and no mapping"),
    ("model.path=~/it's", r"quote in '~/it's' is not closed"),
    ("model.path=~/a b", r"""Quote the value, .* for this program: 'model\.path="~/a b"'$"""),
]
"""Each is told from the others in one composition by Hydra, which takes a tenth of a second."""


def test_names_of_other_tools_lead_to_settings_that_exist():
    config = unresolved([])
    for ours, names in ELSEWHERE.items():
        group, *inside = ours.split(".")
        assert group in groups()
        assert reduce(lambda values, key: values[key], inside, config[group]) is not Ellipsis
        assert not [name for name in names.split() if ours in elsewhere(name) and name in config[group]]
    for text in CHOICES_ELSEWHERE:
        group, _, choice = text.partition("=")
        assert choice in choices(group)


def test_every_mistaken_word_is_named(subtests):
    with pytest.raises(UserError) as caught:
        load([override for override, _ in MISTAKEN_WORDS])
    said = [str(UserError.of([fault])) for fault in caught.value.faults]
    assert len(said) == len(MISTAKEN_WORDS)
    for override, message in MISTAKEN_WORDS:
        with subtests.test(override):
            assert [each for each in said if re.search(message, each)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "build.trtllm.dry_run=true",
            r"build\.trtllm\.dry_run cannot be set to 'true': it makes no engine; `make plan`",
        ),
        (
            "build.trtllm={dora_plugin: on}",
            r"build\.trtllm\.dora_plugin='on' is not known\. Choose one of enable, disable",
        ),
        (
            "build.trtllm.lora_target_modules=attn_q",
            r"'attn_q' is not a list\. Write build\.trtllm\.lora_target_modules=\[attn_q\]",
        ),
        ("build.tp_size=two", r"build\.tp_size='two' is not valid: input should be a valid integer"),
        ("build.tp_size=0", r"build\.tp_size='0' is not valid: input should be greater than or equal to 1"),
        ("quant.qformat=fp7", r"quant\.qformat='fp7' is not known\. Choose one of none, fp8.*Did you mean 'fp8'\?"),
        ("eval.num_fewshot=99", r"eval\.num_fewshot='99' is not valid: input should be less than or equal to 64"),
        ("workload.mix=[{isl:1,os:1}]", r"workload\.mix\.0\.os is not a known key\. Did you mean 'osl'\?"),
        ("nightly.cells=[1]", r"nightly\.cells\.0='1' is not valid: nightly\.cells\.0 is a group of settings"),
        ("quant=[fp8]", r"'quant=\[fp8\]' is a list, and one choice is taken\. Write quant=fp8$"),
        ("~build.max_batch_size", r"'~build\.max_batch_size' removes a setting, and each needs a value\."),
        (
            "model@speculative.draft=tiny_gemma_draft",
            r"=tiny_gemma_draft' names a draft model, which is not used here\. Add speculative=draft_target\.$",
        ),
        ("model.hub_id=a/b", r"model has hub_id='a/b' beside bundled='tiny_gemma', which would be taken: .*model=hub"),
        ("model.revision=v1", r"model has revision='v1' beside bundled='tiny_gemma', which would be taken:"),
        ("model.path=[a,b]", r"model\.path='\['a', 'b'\]' is not valid: input should be a path\.$"),
        ("llm_api.extra=3", r"llm_api\.extra='3' is not valid: input should be a mapping, \{name: value\}\.$"),
        ("sizing.prices.server_usd=abc", r"='abc' is not valid: it should be a valid number, or a mapping\.$"),
        ("build.trtllm.lora_target_modules=[]", r"='\[\]' is not valid: input should have at least 1 in its list\.$"),
        (
            "serving.cors_origins=null",
            r"cors_origins='null' is not a list\. Write serving\.cors_origins=\[\]\.$",
        ),
        ("triton.gpu_device_ids=[1]", r"gpu_device_ids\.0='1' is not a list\. Write \[1\]\.$"),
        ("workload.mix=[{isl:3}]", r"workload\.mix\.0\.share must be given\. Add share: \.\.\. to it\."),
        ("quant.dtype=true", r"quant\.dtype='true' is not known\."),
        ("+build.extra=1", r"build\.extra is not a known key\. Nearest keys of build: (\w+, ){2}\w+;"),
        (
            "+store.dir=/x",
            r"store\.dir is not .* folder of the store is paths\.store\. Keys of store: keep",
        ),
        (
            "store=/tmp/x",
            r"store is a group .* folder of the store is paths\.store\. Keys of store: keep",
        ),
        ("doctor=x", r"doctor is a group of settings\. Keys of doctor: format, timeout_s"),
        ("calibration=local", r"calibration source 'local' needs calibration\.path"),
        ("model=hub", r"model has no source: hub_id \(org/name\) must be given, or path"),
        ("calibration.path=/x", r"path='/x' conflicts with source 'auto': add calibration=local"),
        ("calibration.split=test", r"split='test' conflicts with source 'auto': add calibration=hub"),
        ("calibration.revision=v2", r"revision='v2' conflicts with source 'auto': add calibration=hub"),
        ("calibration.column=body", r"column='body' conflicts .* add calibration=local or calibration=hub"),
        ("fidelity.column=body", r"column='body' has no effect without a file: add fidelity\.path"),
        ("benchmark.concurrency=8 16", r"'8 16' is not a list\. Write benchmark\.concurrency=\[8,16\]"),
        ("benchmark.concurrency={a: 1}", r"'\{'a': 1\}' is not a list\. Write benchmark\.concurrency=\[a\]"),
        ("model.path=", r"model\.path has an empty path: give a file or a folder"),
        ("lora.adapters={a: /x}", r"^lora\.adapters has the key 'a', which is not valid: .* a valid integer"),
        ("lora.adapters={1: ''}", r"lora\.adapters has an empty path"),
    ],
)
def test_a_mistake_is_named(override, message):
    with pytest.raises(UserError, match=message):
        load([override])


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(UserError) as caught:
        load(["quant=fp9", "modle=x", "hardware=b300"])
    assert len(caught.value.faults) == 3


def test_an_override_beats_the_experiment():
    settings = load(["quant=int4_awq", "experiment=gemma_2b_h100_fp8"])
    assert (settings.quant.qformat, settings.model.name) == (QFormat.INT4_AWQ, "gemma_2b")


def test_interpolation_cannot_fail_unseen():
    with pytest.raises(UserError, match="nothing_there"):
        load(["paths.store=${nothing_there}"])


def test_compose_leaves_hydra_out():
    assert "hydra" not in compose_config([])


def test_every_model_offered_can_be_built():
    """A model of conf/model whose family cannot be exported would be refused by every command."""
    shapes = [load([f"model={name}"]).model.shape for name in choices("model") if name != "hub"]
    assert {shape.architecture for shape in shapes if shape is not None} <= set(BUILT)


def test_the_window_of_a_stated_gemma_3_is_not_that_of_its_global_layers() -> None:
    sizes = "num_hidden_layers: 62, hidden_size: 5376, num_attention_heads: 32, num_key_value_heads: 16, head_dim: 128"
    sizes += ", intermediate_size: 21504, vocab_size: 262208, max_position_embeddings: 8192, tie_word_embeddings: true"
    word = f"model.shape={{architecture: Gemma3ForCausalLM, {sizes}, sliding_window: 1024}}"
    shape = load(["model=hub", "model.hub_id=google/gemma-3-27b-it", word]).model.shape
    assert shape is not None
    assert shape.to_shape().windows == (*(1024,) * 5, 8192)
    with pytest.raises(UserError, match=r"model\.shape has no sliding_window: those of Gemma3ForCausalLM differ"):
        load(["model=hub", "model.hub_id=google/gemma-3-27b-it", word.replace("1024", "null")])
