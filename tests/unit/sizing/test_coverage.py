"""Every setting is modelled, without effect, or refused by predictions of speed, and docs/sizing.md says which."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelines.checkpoint.llava import VisionShape
from pipelines.domain.errors import UserError
from pipelines.host.machine import gather
from pipelines.predict.performance.coverage import REFUSED as ROWS
from pipelines.predict.performance.coverage import unmodelled
from pipelines.predict.performance.deployment import PredictedDeployment, costs, gpu_model, tuned_for
from pipelines.predict.performance.gpus import data_sheet
from pipelines.predict.performance.limits import known_lengths
from pipelines.predict.performance.memory import device_memory, encoder_bytes
from pipelines.predict.performance.models import known_model
from pipelines.predict.performance.placement import EngineTerms
from pipelines.predict.simulate.case import make_case
from pipelines.predict.sizing.instance import instance
from pipelines.predict.sizing.question import ask
from pipelines.settings.base import OptionTable
from pipelines.settings.compose import load
from pipelines.settings.groups import choices, groups
from pipelines.settings.root import Settings
from tests.conftest import ROOT
from tests.support.choices import NEEDS


class Row(NamedTuple):
    """One row of the table in docs/sizing.md."""

    keys: tuple[str, ...]
    treatment: str
    how: str


def rows() -> Iterator[Row]:
    for line in (ROOT / "docs" / "sizing.md").read_text().splitlines():
        if match := re.fullmatch(r"\| (`.*`) \| (modelled|no effect|refused) \| (.*) \|", line):
            yield Row(tuple(re.findall("`([^`]*)`", match[1])), match[2], match[3])


COVERAGE = tuple(rows())
"""The first row with a matching key counts."""
BASE = ("engine=tensorrt_llm", "model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm")
LOAD = ("workload.isl=2000", "workload.osl=200")
MODELLED = {
    "model.*": "model=llama_3_2_1b",
    "hardware.*": "hardware=h200_sxm",
    "quant.qformat": "quant=int8_sq",
    "sparsity.method": "sparsity=magnitude_2_4",
    "kv_cache.dtype": "kv_cache=auto",
    "tuning.*": "tuning=plain",
    "kv_cache.enable_block_reuse": "workload.shared_prefix_share=0.5",
    "workload.shared_prefix_share": "workload.shared_prefix_share=0.5",
    "runtime.enable_chunked_context": "runtime=chunked",
    "triton.batch_scheduler_policy": "triton.batch_scheduler_policy=max_utilization",
    "build.max_batch_size": "build.max_batch_size=8",
    "build.max_num_tokens": "build.max_num_tokens=32768",
    "build.max_seq_len": "build.max_seq_len=8192",
    "build.max_input_len": "build.max_input_len=4096",
    "build.tokens_per_block": "build.tokens_per_block=64",
    "build.tp_size": "build.tp_size=2",
    "build.pp_size": "build.pp_size=2",
    "triton.kv_cache_free_gpu_mem_fraction": "triton.kv_cache_free_gpu_mem_fraction=0.5",
    "triton.max_tokens_in_paged_kv_cache": "triton.max_tokens_in_paged_kv_cache=64000",
    "triton.max_attention_window_size": "triton.max_attention_window_size=[1024]",
    "workload.*": "workload.osl=400",
}
"""An override for each modelled key of an engine; the others are named below."""
SEEING = ("build.max_batch_size=8", "multimodal=llava", *NEEDS["multimodal", "llava"])
OTHERWISE = {
    "quant.group_size": ("quant=int4_awq", "quant.group_size=64"),
    "build.weight_sparsity": ("sparsity=magnitude_2_4", "build.weight_sparsity=false"),
    "build.user_buffer": ("build.tp_size=2", "build.user_buffer=disable"),
    "build.weight_streaming": ("weights=streaming", "triton.gpu_weights_percent=0.4"),
    "triton.gpu_weights_percent": ("weights=streaming", "triton.gpu_weights_percent=0.4"),
    **dict.fromkeys(("multimodal.*", "build.max_prompt_embedding_table_size"), SEEING),
}
"""The same for keys that need another base, which comes first."""
ASKED = {"sizing.*", "simulator.*", "sizing.model", "benchmark.*"}
"""Groups that ask the question."""
REFUSED = {
    "quant.effective_bits": (("quant=auto",), "quant.effective_bits=6.0"),
    "prune.*": (("prune=depth", "prune.layers=8"), "prune=depth"),
    "speculative.*": (("speculative=lookahead",), "speculative=lookahead"),
    "lora.*": (("lora=adapters", "lora.adapters={1:/a,7:/b}"), "lora.adapters with id 1,7"),
    "build.trtllm.lora_*": (("build.trtllm.lora_plugin=auto",), "build.trtllm.lora_plugin=auto"),
    "build.trtllm.dora_plugin": (("build.trtllm.dora_plugin=enable",), "build.trtllm.dora_plugin=enable"),
    "workload.images": (("workload.images=1",), "workload.images=1"),
    "build.max_beam_width": (("build.max_beam_width=4",), "build.max_beam_width=4"),
    "build.trtllm.gather_context_logits": (
        ("build.trtllm.gather_context_logits=true",),
        "build.trtllm.gather_context_logits=true",
    ),
    "build.trtllm.gather_generation_logits": (
        ("build.trtllm.gather_generation_logits=true",),
        "build.trtllm.gather_generation_logits=true",
    ),
    "build.trtllm.gather_all_token_logits": (
        ("build.trtllm.gather_all_token_logits=true",),
        "build.trtllm.gather_all_token_logits=true",
    ),
    "build.trtllm.context_fmha": (("build.trtllm.context_fmha=disable",), "build.trtllm.context_fmha=disable"),
    "build.trtllm.remove_input_padding": (
        ("build.trtllm.remove_input_padding=disable",),
        "build.trtllm.remove_input_padding=disable",
    ),
    "build.kv_cache_type": (("build.kv_cache_type=continuous",), "build.kv_cache_type=continuous"),
    "build.trtllm.paged_kv_cache": (("build.trtllm.paged_kv_cache=disable",), "build.trtllm.paged_kv_cache=disable"),
    "build.trtllm.gpt_attention_plugin": (
        ("build.trtllm.gpt_attention_plugin=disable",),
        "build.trtllm.gpt_attention_plugin=disable",
    ),
    "build.trtllm.streamingllm": (("build.trtllm.streamingllm=enable",), "build.trtllm.streamingllm=enable"),
    "triton.max_queue_delay_microseconds": (
        ("triton.max_queue_delay_microseconds=500",),
        "triton.max_queue_delay_microseconds=500",
    ),
}
FOLLOWS = {
    "quant.candidates": "quant.effective_bits",
    "build.speculative_decoding_mode": "speculative.*",
    "build.max_draft_len": "speculative.*",
    "triton.decoding_mode": "speculative.*",
    "build.trtllm.max_lora_rank": "lora.*",
    "triton.lora_*": "lora.*",
    "workload.image_side": "workload.images",
    "triton.max_beam_width": "build.max_beam_width",
}
"""Keys that count only beside another key, whose finding refuses both."""
OTHER_ENGINES = {"engine", "experiment", "model", "hardware"}
"""Groups whose choices change the model, the GPU or the engine itself."""
SAME_LOAD = {
    ("kv_cache", "default"): "the default",
    ("kv_cache", "fp8"): "what the tuning sets for FP8 weights",
    ("kv_cache", "int8"): "as many bytes as FP8",
    ("tuning", "recommended"): "the default",
    ("window", "sinks"): "TensorRT-LLM 1.2 refuses sinks",
    ("reuse", "none"): "nothing is shared by the requests of the default load",
    ("parallel", "single"): "the default",
}


def coverage_of(key: str) -> Row | None:
    """Return the row of a setting; None if nothing is said of it."""
    return next((row for row in COVERAGE if any(fnmatchcase(key, pattern) for pattern in row.keys)), None)


def settings_of(*words: str) -> Settings:
    return load((*BASE, *LOAD, *words))


def tuned(settings: Settings) -> Settings:
    return tuned_for(settings, known_model(settings), settings.hardware)


def modelled(settings: Settings) -> PredictedDeployment:
    return gpu_model(tuned(settings), known_model(settings), data_sheet(settings.hardware), costs(settings))


def predicted(settings: Settings) -> Any:
    """Return everything that predictions rest on: engine, costs, limits and lengths."""
    found = modelled(settings)
    return found.deployment, found.limits, known_lengths(settings)


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, field) of every setting."""
    for name, field in model.model_fields.items():
        inner = [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        key = f"{prefix}{name}"
        if inner:
            yield from leaves(inner[0], f"{key}.")
        elif table := OptionTable.of(field):
            yield from ((f"{key}.{option}", FieldInfo(annotation=kind)) for option, kind in table.kinds.items())
        else:
            yield key, field


ALL = dict(leaves(Settings))


def test_every_setting_has_a_row():
    assert [key for key in ALL if coverage_of(key) is None] == []


def test_every_row_is_needed():
    used = {id(coverage_of(key)) for key in ALL}
    assert [row.keys for row in COVERAGE if id(row) not in used] == []
    patterns = [pattern for row in COVERAGE for pattern in row.keys]
    assert [pattern for pattern in patterns if not any(_matches(key, pattern) for key in ALL)] == []


def _matches(key: str, pattern: str) -> bool:
    row = coverage_of(key)
    return row is not None and pattern in row.keys


def test_every_modelled_and_refused_key_has_an_example():
    modelled = {pattern for row in COVERAGE if row.treatment == "modelled" for pattern in row.keys}
    missing = {p for p in modelled if p not in MODELLED and p not in OTHERWISE}
    assert {p for p in missing if not any(p.startswith(group[:-1]) for group in ASKED if group[-1] == "*")} <= ASKED
    refused = {pattern for row in COVERAGE if row.treatment == "refused" for pattern in row.keys}
    assert refused == {*REFUSED, *FOLLOWS}


@pytest.fixture(scope="module")
def usual():
    return predicted(settings_of())


@pytest.mark.parametrize("word", sorted(set(MODELLED.values())))
def test_a_modelled_setting_changes_the_prediction(usual, word):
    assert predicted(settings_of(word)) != usual


@pytest.mark.parametrize("words", sorted(set(OTHERWISE.values())))
def test_a_modelled_setting_changes_the_prediction_of_its_base(words):
    first, *others = words
    assert predicted(settings_of(first, *others)) != predicted(settings_of(first))


@pytest.mark.parametrize(("words", "shown"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_modelled_is_refused_everywhere(words, shown):
    settings = settings_of(*words, "sizing.average_rate=5")
    told = rf"{shown} changes the speed in a way that is not modelled"
    with pytest.raises(UserError, match=told):
        predicted(settings)
    with pytest.raises(UserError, match=told):
        ask(settings, gather())
    with pytest.raises(UserError, match=told):
        make_case(settings, gather())


def _changed(key: str, field: Any, value: Any) -> Any:
    """Return another value of a setting, or None where there is none to be guessed."""
    kinds = [field.annotation, *get_args(field.annotation)]
    if bool in kinds:
        return not value
    literals = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    others = [word for word in literals if word != value]
    if others:
        return others[-1]
    return value + 1 if isinstance(value, int | float) else None


def test_settings_without_effect_have_none(usual):
    settings, tried = settings_of(), 0
    for key, field in ALL.items():
        row, (group, *rest) = coverage_of(key), key.split(".")
        if row.treatment != "no effect" or group not in ("build", "triton", "quant", "calibration"):
            continue
        held, name = getattr(settings, group), rest[-1]
        value = _changed(key, field, held[name] if group == "build" else getattr(held, name))
        if value is not None:
            update = {"trtllm": {name: value}} if rest[:-1] == ["trtllm"] else {name: value}
            changed = settings.model_copy(update={group: held.model_copy(update=update)})
            assert predicted(changed) == usual, key
            tried += 1
    assert tried >= 55


def _flat(settings: Settings) -> dict[str, Any]:
    def walk(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
            for key, inner in value.items():
                yield from walk(inner, f"{prefix}{key}.")
        else:
            yield prefix[:-1], value

    return dict(walk(settings.model_dump(by_alias=True), ""))


CHOICES = [(group, choice) for group in groups() if group not in OTHER_ENGINES for choice in choices(group)]


def test_every_choice_is_modelled_without_effect_or_refused(usual, subtests):
    for group, choice in CHOICES:
        with subtests.test(f"{group}={choice}"):
            if (group, choice) == ("quant", "nvfp4"):
                pytest.skip("an H100 has no FP4 arithmetic; another GPU would change the prediction by itself")
            words = (f"{group}={choice}", *NEEDS.get((group, choice), ()))
            settings, base = settings_of(*words), _flat(tuned(settings_of()))
            keys = [key for key, value in _flat(tuned(settings)).items() if base.get(key) != value and coverage_of(key)]
            treatments = {coverage_of(key).treatment for key in keys}
            if unmodelled(settings):
                assert "refused" in treatments
                with pytest.raises(UserError, match="is not modelled: "):
                    predicted(settings)
            elif (group, choice) in SAME_LOAD or "modelled" not in treatments:
                assert group == "window" or predicted(settings) == usual
            elif {key.split(".")[0] for key in keys} & {"workload", "sizing", "simulator"}:
                predicted(settings)
            else:
                assert predicted(settings) != usual


def test_a_vision_encoder_takes_memory_from_the_kv_cache():
    """CLIP of LLaVA 1.5: 23 layers of 12.6 M weights that run, and a projector of 21 M."""
    clip = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    vision = {**clip, "image_size": 336, "patch_size": 14}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {}, "vision_config": vision}
    shape = VisionShape.of(config, "config.json")
    assert shape.visual_tokens == 576
    assert shape.weight_bytes == pytest.approx(2 * 312e6, rel=0.01)
    settings = settings_of(*SEEING)
    sizes = EngineTerms.of(settings, known_model(settings)).sizes
    beside, without = (device_memory(each, 80e9).kv_pool for each in (sizes, replace(sizes, encoder=None)))
    assert without - beside == pytest.approx(sizes.kv_fraction * encoder_bytes(sizes), rel=1e-6)
    assert encoder_bytes(sizes) > 0


def test_a_fit_with_pictures_is_for_as_many_pictures(tmp_path):
    file = tmp_path / "fit.json"
    file.write_text(json.dumps({"fitted_on": {"images": 1}}))
    fit = f"sizing.fit={file}"
    assert not unmodelled(settings_of(fit, "workload.images=1"))
    for images in (0, 2):
        (fault,) = unmodelled(settings_of(fit, f"workload.images={images}"))
        assert f"workload.images={images} changes the speed" in fault.message


def test_streamed_weights_take_the_time_of_the_host_link():
    """Llama-3-8B at 16 bit on an A10: 60 % of 15 GiB over 32 GB/s is about 300 ms in every iteration."""
    words = ("model=llama_3_8b", "quant=none", "hardware=a10", "weights=streaming", "triton.gpu_weights_percent=0.4")
    settings = settings_of(*words)
    held = settings_of(*words[:3], "build.gemm_plugin=disable")
    cost, resident = (modelled(one).deployment.cost for one in (settings, held))
    assert cost.fixed - resident.fixed == pytest.approx(0.6 * 16.06e9 / 32e9, rel=0.01)


def test_ranks_of_several_servers_are_refused():
    with pytest.raises(UserError, match=r"tp_size=16 on H100-SXM-80GB is not modelled: its ranks span several servers"):
        predicted(settings_of("model=llama_3_1_70b", "build.tp_size=16"))


@pytest.mark.parametrize(
    ("windows", "size", "every"),
    [([1024], 1024, 0), ([1024, 1024, 131072], 1024, 3), ([131072], 0, 0), ([500000], 0, 0)],
)
def test_windows_of_one_size_are_modelled(windows, size, every):
    shape = known_model(settings_of()).with_windows(windows)
    assert (shape.sliding_window, shape.global_every) == (size, every)


@pytest.mark.parametrize("windows", [[1024, 2048], [131072, 1024], [1024, 2048, 131072]])
def test_windows_of_several_sizes_are_refused(windows):
    with pytest.raises(UserError, match=rf"attention windows of {', '.join(map(str, windows))} tokens is not modelled"):
        known_model(settings_of()).with_windows(windows)


@pytest.mark.parametrize(
    "words",
    [(), ("weights=streaming",), ("window=sliding",), ("runtime=chunked",), ("workload.shared_prefix_share=0.5",)],
)
def test_plan_simulate_and_size_build_the_same_engine(words):
    settings = settings_of("sizing.average_rate=1", *words)
    question = ask(settings, gather())
    (setup,) = [each for each in question.setups() if (each.tp, each.pp) == (1, 1)]
    sized = instance(question, setup, costs(settings)(setup))
    found = modelled(settings).deployment
    simulated = make_case(settings, gather())
    assert sized.engine == found.engine == simulated.engines[-1]
    assert sized.costed.cost == found.cost == simulated.cost


def test_the_documentation_says_what_is_refused():
    assert [row.how for row in COVERAGE if row.treatment == "refused"] == [row.how for row in ROWS]


def test_formats_that_tensorrt_llm_lacks_for_a_family_are_not_tried():
    """`make plan` refuses NVFP4 for Gemma, so `make size sizing.formats=auto` must not rank it."""
    words = ("hardware=b200_sxm", "sizing.average_rate=1", "sizing.formats=auto")
    gemma, llama = (ask(settings_of(f"model={name}", *words), gather()).formats for name in ("gemma_2b", "llama_3_8b"))
    assert "nvfp4" in llama
    assert "nvfp4" not in gemma


def test_groups_asked_for_count_in_each_format_that_has_a_choice():
    """quant=fp8 has no groups, so `quant.group_size` can only mean the formats that are compared with it."""
    words = ("sizing.average_rate=1", "sizing.formats=[int4_awq]")
    groups = {each.group_size for each in ask(settings_of(*words, "quant.group_size=64"), gather()).setups()}
    assert groups == {64}
    of_nvfp4 = ("hardware=b200_sxm", "quant=nvfp4")
    groups = {each.group_size for each in ask(settings_of(*words, *of_nvfp4), gather()).setups()}
    assert groups == {128}  # the 16 of NVFP4 is its own
