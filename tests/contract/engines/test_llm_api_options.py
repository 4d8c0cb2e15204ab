"""NVIDIA's own files of LLM API options are read by the table of their version, and wrong ones are refused."""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.compress.config import KvCacheSettings
from pipelines.domain.errors import UserError
from pipelines.engines.tensorrt_llm.config import OWN_SETTINGS, BuildSettings
from pipelines.engines.tensorrt_llm.llm_api import complaints, split_fault, tables, tables_of
from pipelines.settings.base import flat
from pipelines.stages.unified import ConfigureLlm
from triton_repo.config import TritonSettings
from triton_repo.llmapi import read_arguments

FILES = json.loads((Path(__file__).parent / "nvidia_llm_api_files.json").read_text())
VERSIONS = ("1.3.0rc3", "1.4")
OF_AN_EARLIER_VERSION = {"kv_cache_free_gpu_memory_fraction", "moe_backend", "use_cuda_graph"}
"""Names in nine curated files of the 1.3.0rc3 tree that its own parser refuses as well."""


def refusals(options, version):
    found = complaints(options, version, "") + split_fault(options, options.get("tensor_parallel_size", 1), "")
    return [each for each in found if not each.ignored]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_file_of_nvidia_is_read_for_its_version(version):
    files = FILES[version]["files"]
    refused = {name: {each.option for each in refusals(options, version)} for name, options in files.items()}
    refused = {name: options for name, options in refused.items() if options}
    assert len(files) == {"1.3.0rc3": 178, "1.4": 17}[version]
    assert all(options <= OF_AN_EARLIER_VERSION for options in refused.values()), refused
    assert len(refused) == {"1.3.0rc3": 9, "1.4": 0}[version]


def test_a_version_between_two_tables_reads_the_files_of_both():
    files = {name: options for version in VERSIONS for name, options in FILES[version]["files"].items()}
    assert sum(not refusals(options, "1.3.0rc20") for options in files.values()) == 186


@pytest.mark.parametrize("table", tables(), ids=lambda table: table.version)
def test_the_tables_hold_every_option_with_a_setting(table):
    assert all(table.has(option) for option in OWN_SETTINGS)
    assert {row.get("status") for row in table.options.values()} <= {None, "prototype", "beta", "deprecated"}


def _groups(options):
    """Yield every mapping whose names are options."""
    yield "", options
    for name, value in options.items():
        if isinstance(value, dict) and name != "env_overrides":
            yield name, value


def _typo(rng, options):
    _, group = rng.choice(list(_groups(options)))
    name = rng.choice(list(group))
    at = rng.randrange(1, len(name))
    group[name[:at] + name[at] * 2 + name[at + 1 :]] = group.pop(name)


def _type(rng, options):
    _, group = rng.choice([(n, g) for n, g in _groups(options) if any(k != "load_balancer" for k in g)])
    name = rng.choice([name for name in group if name not in ("load_balancer", "backend")] or list(group))
    value = group[name]
    group[name] = {bool: "perhaps", int: "many", float: [0.5], str: 7, list: 5, dict: 3}[type(value)]


def _choice(rng, options):
    places = [("moe_config", "backend"), ("kv_cache_config", "dtype"), ("cuda_graph_config", "enable_padding")]
    group, name = rng.choice(places)
    options.setdefault(group, {})[name] = rng.choice(["TRTLM", "fp6", "sometimes"])


def _place(rng, options):
    group, name, value = rng.choice(
        [
            ("kv_cache_config", "max_batch_size", 8),
            ("moe_config", "stream_interval", 5),
            ("", "free_gpu_memory_fraction", 0.5),
            ("cuda_graph_config", "dtype", "fp8"),
            ("", "enable_padding", True),
        ]
    )
    (options.setdefault(group, {}) if group else options)[name] = value


def _speculation(rng, options):
    options["speculative_config"] = rng.choice(
        [
            {"decoding_type": "Medusa", "max_draft_len": 3},
            {"decoding_type": "MTP3", "max_draft_len": 3},
            {"max_draft_len": 3},
            {"decoding_type": "NGram", "max_draft_len": 3, "relaxed_topk": 2},
            {"decoding_type": "MTP", "max_draft_len": "three"},
        ]
    )


def _split(rng, options):
    options["tensor_parallel_size"] = 8
    options["moe_expert_parallel_size"] = rng.choice([3, 5, 16])
    options.pop("moe_tensor_parallel_size", None)


def _version(rng, options):
    options[rng.choice(["enable_trtllm_sampler", "pytorch_backend_config", "use_paged_kv", "gather_all_logits"])] = True


def _graphs(rng, options):
    options["cuda_graph_config"] = {"batch_sizes": [1, 2, 4], "max_batch_size": rng.choice([8, 3, 128])}


MUTATIONS = (_typo, _type, _choice, _place, _speculation, _split, _version, _graphs)


def test_of_200_seeded_wrong_files_at_least_198_are_refused():
    rng, missed = random.Random(20261128), []
    right = {
        version: {name: each for name, each in FILES[version]["files"].items() if not refusals(each, version)}
        for version in VERSIONS
    }
    for number in range(200):
        version = VERSIONS[number % 2]
        files = right[version]
        name = rng.choice(sorted(files))
        wrong, mutation = copy.deepcopy(files[name]), MUTATIONS[number % len(MUTATIONS)]
        mutation(rng, wrong)
        if not refusals(wrong, version):
            missed.append((name, mutation.__name__, flat(wrong)))
    assert len(missed) <= 2, missed


@pytest.mark.parametrize(
    ("options", "version", "message"),
    [
        ({"stream_intervall": 5}, "1.4", "Did you mean 'stream_interval'?"),
        (
            {"kv_cache_config": {"disk_cache_path": "/x"}},
            "1.3.0rc3",
            "1.3.0rc3: 1.3.0rc24 and 1.4 have it. Leave it out",
        ),
        ({"model_kwargs": {}}, "1.2.1", "unknown to TensorRT-LLM 1.2.1: 1.3.0rc3, 1.3.0rc24 and 1.4 have it."),
        ({"kv_cache_config": {"use_kv_cache_manager_v2": True}}, "1.2.0", "is unknown to TensorRT-LLM 1.2.0: 1.3.0rc3"),
        ({"moe_config": {"backend": "AUTO"}}, "1.2.1", "Choose one of CUTLASS, CUTEDSL, WIDEEP, TRTLLM"),
        (
            {"speculative_config": {"decoding_type": "Eagle3", "speculative_model": "/x"}},
            "1.2.1",
            "Did you mean 'Eagle'?",
        ),
        (
            {"speculative_config": {"decoding_type": "Draft_Target", "speculative_model": "/x"}},
            "1.2.1",
            "Did you mean 'DraftTarget'?",
        ),
        ({"enable_sleep": True}, "1.3.0rc24", "1.2.1 and 1.3.0rc3 have it. Leave it out, or give the container of"),
        (
            {"build_config": {"max_batch_size": 8}},
            "1.2.1",
            "has no effect in TensorRT-LLM 1.2.1: it is for TensorRT engines",
        ),
        ({"sampler_type": "TorchSampler"}, "1.4", "there is one sampler"),
        ({"kv_cache_config": {"kv_events_config": {}}}, "1.3.0rc24", "unknown to TensorRT-LLM 1.3.0rc24: 1.4 has it."),
        ({"cuda_graph_config": {"mode": "prefill"}}, "1.4", "Choose one of decode, encode."),
        (
            {"kv_cache_compression_config": {"algorithm": "triattention", "calibration_path": "/x.pt"}},
            "1.3.0rc24",
            "kv_cache_compression_config.model_path must be given.",
        ),
        ({"free_gpu_memory_fraction": 0.5}, "1.4", "Did you mean kv_cache_config.free_gpu_memory_fraction?"),
        ({"moe_backend": "TRTLLM"}, "1.4", "It is now moe_config.backend."),
        ({"stream_interval": "x"}, "1.4", "stream_interval='x' is not valid: it should be an integer."),
        ({"stream_interval": 0}, "1.4", "stream_interval=0 is out of range: it must be more than 0."),
        ({"stream_interval": 0}, "1.3.0rc3", "stream_interval=0 is out of range: it must be more than 0."),
        ({"batch_wait_max_tokens_ratio": 1.5}, "1.2.1", "batch_wait_max_tokens_ratio=1.5 is out of range: it must be"),
        ({"speculative_config": None}, "1.3.0rc3", "speculative_config=null is not valid: it should be a mapping."),
        (
            {"speculative_config": {"decoding_type": "Eagle3", "speculative_model": "/x"}},
            "1.3.0rc3",
            "speculative_config.max_draft_len must be given.",
        ),
        (
            {"ray_placement_config": {"placement_groups": "x"}, "orchestrator_type": "ray"},
            "1.4",
            "placement_groups='x' is not valid: it should be a list of any values, or null.",
        ),
        ({"kv_cache_config": {"max_attention_window": []}}, "1.4", "max_attention_window=[] is not valid: it must not"),
        ({"moe_config": {"backend": "TRITOM"}}, "1.4", "Did you mean 'TRITON'?"),
        (
            {"speculative_config": {"decoding_type": "Draft_Target", "speculative_model": "/x"}},
            "1.3.0rc3",
            "Did you mean 'DraftTarget'?",
        ),
        ({"speculative_config": {"max_draft_len": 3}}, "1.4", "speculative_config.decoding_type must be given."),
        (
            {"kv_cache_compression_config": {"algorithm": "triattention"}},
            "1.4",
            "kv_cache_compression_config.calibration_path must be given.",
        ),
        (
            {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3}},
            "1.4",
            "speculative_config.decoding_type='Eagle3' needs speculative_model, the draft model.",
        ),
        (
            {"speculative_config": {"decoding_type": "SA", "max_draft_len": 3, "max_matching_ngram_size": 0}},
            "1.4",
            "speculative_config.max_matching_ngram_size=0 is not valid for SA. It must be above 0, or -1",
        ),
        ({"ray_worker_extension_cls": "a.B"}, "1.3.0rc3", "ray_worker_extension_cls needs orchestrator_type='ray'."),
        ({"ray_placement_config": {}}, "1.4", "ray_placement_config needs orchestrator_type='ray'."),
        ({"kv_cache_config": {"sink_token_length": 4}}, "1.4", "drops it"),
        ({"mla_skip_correction_threshold": 4.0}, "1.4", "only enable_mla_skip_correction=true reads it"),
    ],
)
def test_what_is_wrong_is_one_sentence_that_helps(options, version, message):
    (found,) = complaints(options, version, "")
    assert message in str(found.fault)


@pytest.mark.parametrize("length", [None, 0])
@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc3", "1.3.0rc20", "1.3.0rc24", "1.4"])
def test_a_draft_without_length_is_refused(version, length):
    drafts = {"max_draft_len": length, "max_matching_ngram_size": 2}
    eagle = {"decoding_type": "Eagle", "max_draft_len": length, "speculative_model": "/x"}
    for given in ({"decoding_type": "NGram", **drafts}, eagle):
        (found,) = complaints({"speculative_config": given}, version, "")
        assert f"speculative_config.max_draft_len={json.dumps(length)} is " in found.fault.message


def test_mtp_leaves_its_length_to_the_checkpoint_but_takes_no_zero():
    assert not complaints({"speculative_config": {"decoding_type": "MTP", "max_draft_len": None}}, "1.4", "")
    (found,) = complaints({"speculative_config": {"decoding_type": "MTP", "max_draft_len": 0}}, "1.4", "")
    assert "max_draft_len=0 is out of range: it must be more than 0" in found.fault.message


def test_an_option_that_is_read_is_not_called_ignored():
    assert not complaints({"enable_mla_skip_correction": True, "mla_skip_correction_threshold": 4.0}, "1.4", "")
    assert not complaints({"kv_cache_config": {"sink_token_length": 4}}, "1.3.0rc3", "")
    assert not complaints({"sampler_type": "TorchSampler"}, "1.3.0rc24", "")


@pytest.mark.parametrize("word", ["Eagle3", "Eagle"])
def test_1_3_0rc3_drafts_with_eagle_3_by_both_names(word):  # from_dict; NVIDIA's guides of that version say Eagle3
    eagle = {"max_draft_len": 3, "speculative_model_dir": "/x", "eagle3_one_model": True}
    assert not complaints({"speculative_config": {"decoding_type": word, **eagle}}, "1.3.0rc3", "")


@pytest.mark.parametrize(
    ("options", "versions", "refused"),
    [
        (
            {"disable_flashinfer_sampling": True, "enable_sleep": False},
            ("1.2.0", "1.2.1", "1.3.0rc3"),
            ("1.3.0rc24", "1.4"),
        ),
        (
            {"speculative_config": {"decoding_type": "UserProvided", "drafter": 1}},
            ("1.2.1", "1.3.0rc3"),
            ("1.3.0rc24",),
        ),
        (
            {"speculative_config": {"decoding_type": "PARD", "max_draft_len": 4}},
            ("1.3.0rc24", "1.4"),
            ("1.2.1", "1.3.0rc3"),
        ),
        ({"cp_config": {"cp_type": "star", "cp_anchor_size": 4}}, ("1.2.1", "1.3.0rc24"), ("1.4",)),
        ({"cuda_graph_config": {"mode": "decode"}}, ("1.3.0rc24", "1.4"), ("1.2.1", "1.3.0rc3")),
        ({"multimodal_config": {"encoder_cache_max_bytes": "512MB"}}, ("1.3.0rc24", "1.4"), ("1.2.1",)),
        ({"moe_config": {"backend": "WIDEEP"}}, ("1.2.1", "1.3.0rc3", "1.3.0rc24"), ("1.4",)),
        ({"enable_mla_skip_correction": True}, ("1.3.0rc29", "1.4"), ("1.2.1", "1.3.0rc3", "1.3.0rc24")),
    ],
)
def test_each_version_has_options_that_others_lack(options, versions, refused):
    assert {version for version in (*versions, *refused) if complaints(options, version, "")} == {*refused}


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc24"])
def test_nvidias_files_of_1_3_0rc3_are_read_by_the_versions_around_it(version):
    refused = {name: refusals(options, version) for name, options in FILES["1.3.0rc3"]["files"].items()}
    assert sum(not wrong for wrong in refused.values()) == 169
    assert {each.option for wrong in refused.values() for each in wrong} <= OF_AN_EARLIER_VERSION


def test_a_group_within_a_kind_of_a_group_is_judged():
    drafts = {"decoding_type": "MTP", "max_draft_len": 3, "sa_config": {"threshold": 4}}
    assert not complaints({"speculative_config": drafts}, "1.4", "")
    (found,) = complaints({"speculative_config": drafts | {"sa_config": {"treshold": 4}}}, "1.4", "")
    assert "speculative_config.sa_config.treshold is unknown" in found.fault.message


@pytest.mark.parametrize("version", [table.version for table in tables()])
def test_what_is_not_set_has_the_librarys_default(version):
    stage = ConfigureLlm(BuildSettings(), TritonSettings(), KvCacheSettings(), enable_chunked_context=False)
    (table,) = tables_of(version)
    for option, value in flat(stage.arguments).items():
        assert table.options[option].get("default") in (None, value), option  # 1.3.0rc3 fills limits in later
    whole = replace(
        stage,
        triton=TritonSettings(max_attention_window_size=(512, 4096), batch_scheduler_policy="max_utilization"),
        num_draft_tokens=4,
        draft_word="DraftTarget" if version in ("1.2.1", "1.3.0rc3") else "Draft_Target",
        others={"moe_config": {"backend": "TRTLLM"}, "kv_cache_config": {"enable_partial_reuse": False}},
    ).arguments
    assert not complaints(whole, version, "")
    assert whole["kv_cache_config"]["max_attention_window"] == [512, 4096]
    assert whole["kv_cache_config"]["enable_partial_reuse"] is False
    assert "host_cache_size" not in whole["kv_cache_config"]  # what has no value is left to the library


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: many", "max_batch_size='many' is not valid"),
        ("kv_cache_config: {free_gpu_memory_fraction: x}", "free_gpu_memory_fraction='x'"),
        (
            "enable_trt_overlap: true",
            "enable_trt_overlap is unknown to TensorRT-LLM 1.2.1 or 1.3.0rc3 or 1.3.0rc24 or 1.4",
        ),
        ("[", r"is not valid YAML: line 1, column 2: [^\"]*$"),
        ("5", "holds a int"),
    ],
)
def test_a_wrong_argument_of_a_repository_is_named(tmp_path, text, message):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_arguments(path)


def test_the_newest_table_has_every_option_of_nvidias_manifest_and_beyond_it_only_what_that_leaves_out():
    """The manifest, another file of the same commit, leaves out free texts, paths, mappings and objects."""
    named = json.loads((Path(__file__).parent / "nvidia_llm_api_manifest.json").read_text())["paths"]
    manifest = {f"{group}.{name}" if group else name for group, names in named.items() for name in names}
    table = tables()[-1]
    chosen = {f"{path}.{row['by']}" for path, row in table.options.items() if "by" in row}
    assert len(manifest) == 310
    assert manifest <= table.plain | chosen
    beyond = {
        path for path in table.plain - manifest if "group" not in table.options.get(path, {"type": "group"})["type"]
    }
    assert len(beyond) == 46
    assert not any("bool" in table.options[path]["type"] or "choices" in table.options[path] for path in beyond)
