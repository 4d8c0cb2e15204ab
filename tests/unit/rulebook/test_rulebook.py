"""Every rule of the table: what breaks it, what it says, and that the nearest deployment does not break it."""

import re
from dataclasses import replace
from typing import Any

import pytest

from pipelines.domain.formats import FORMATS, UNIFORM, KvFormat, QFormat, formats_for
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.engines.tensorrt_llm.llm_api import LlmApiOptions
from pipelines.rules import edge
from pipelines.rules.llmapi import WHY_NOT
from pipelines.rules.rulebook import RULES, check, check_checkpoint, refused, warned
from pipelines.settings.features import lookahead_draft_len, lookahead_sizes
from tests.support.rule_cases import CASES, GEMMA, LLAMA, deployment
from tests.support.rule_cases.rotary import PHI
from tests.support.rule_cases.words import GEMMA3, MISTRAL, MIXTRAL

ONE_MODEL = LlmApiOptions("1.3.0rc24", extra={"speculative_config": {"decoding_type": "MTP", "max_draft_len": 1}})
NGRAM = LlmApiOptions("1.3.0rc24", extra={"speculative_config": {"decoding_type": "NGram", "max_draft_len": 4}})
BY_NAME = {rule.name: rule for rule in RULES}


def test_every_rule_has_a_case_a_name_of_its_own_and_a_public_source() -> None:
    assert len(BY_NAME) == len(RULES)
    assert CASES.keys() == BY_NAME.keys()
    places = ("docs/", "examples/", "tensorrt_llm/", "triton_backend/", "NVIDIA", "triton-inference-server/", "issue")
    places += ("openvinotoolkit/", "pipelines", "data sheets")
    assert [rule.name for rule in RULES if not rule.source.startswith(places)] == []


def test_a_deployment_that_breaks_the_rule_is_named_with_its_value(subtests: pytest.Subtests) -> None:
    for name in CASES:
        with subtests.test(name):
            found = [str(finding.fault) for finding in BY_NAME[name].findings(deployment(**CASES[name].broken))]
            assert found
            assert re.search(CASES[name].match, found[0])
            assert "{" not in found[0]


def test_the_nearest_deployment_does_not_break_the_rule(subtests: pytest.Subtests) -> None:
    for name in CASES:
        with subtests.test(name):
            assert BY_NAME[name].findings(CASES[name].nearest()) == []


def test_the_table_finds_what_the_rule_finds(subtests: pytest.Subtests) -> None:
    """Nothing hides a rule: the whole table has it among its findings, as a fault or as a warning."""
    for name in CASES:
        with subtests.test(name):
            findings = check(deployment(**CASES[name].broken))
            assert name in {finding.rule.name for finding in findings}
            stops = not BY_NAME[name].warns
            said = refused(findings) if stops else warned(findings)
            assert any(re.search(CASES[name].match, str(fault)) for fault in said)


def test_nothing_is_said_about_what_is_not_known() -> None:
    """An empty record with a small batch breaks no rule: what is unknown is not judged."""
    for engine in ("openvino", "tensorrt_llm", "llmapi"):
        assert check(deployment(engine=engine)) == []


@pytest.mark.parametrize("qformat", UNIFORM)
def test_llama_8b_takes_every_format_on_two_by_two(qformat: QFormat) -> None:
    assert check_checkpoint(LLAMA, qformat, tp_size=2, pp_size=2) == []


@pytest.mark.parametrize("qformat", [qformat for qformat in QFormat if qformat is not QFormat.NVFP4])
def test_gemma_2b_takes_every_format_but_nvfp4(qformat: QFormat) -> None:
    assert check_checkpoint(GEMMA, qformat) == []


@pytest.mark.parametrize("qformat", [QFormat.NONE, QFormat.FP8, QFormat.NVFP4])
def test_the_llm_api_takes_a_mixture_as_it_is_in_fp8_and_in_nvfp4(qformat: QFormat) -> None:
    """In 16 bit nothing is exported; NVIDIA's page lists Mixtral in NVFP4, so for an engine ModelOpt alone is named."""
    assert refused(check(deployment(engine="llmapi", shape=MIXTRAL, qformat=qformat))) == []
    broken = [each.rule.name for each in check(deployment(shape=MIXTRAL, qformat=qformat))]
    assert broken == (["families-without-modelopts-export"] if qformat is QFormat.NVFP4 else [])


@pytest.mark.parametrize(
    ("given", "without"),
    [
        ({"speculation": "draft_target"}, "speculative=none"),
        ({"llm_api": NGRAM}, "llm_api's speculative_config"),
    ],
)
def test_drafts_over_an_fp8_cache_are_refused_beside_reuse_and_where_they_were_asked_for(given, without) -> None:
    ampere = deployment(engine="llmapi", kv_format=KvFormat.FP8, sm=8.0, kv_reuse=True, **given)
    found = [str(each.fault) for each in BY_NAME["llm-api-fp8-kv-below-sm89"].findings(ampere)]
    assert ["rules out KV-cache reuse:" in each for each in found] == [True, False]
    assert "rules out draft tokens:" in found[1]
    assert f"or do without: {without}" in found[1]


def test_a_mix_breaks_what_one_of_its_candidates_breaks() -> None:
    """On an A100 the candidate fp8 is refused, and int4_awq is not; the message names the candidate."""
    mix = deployment(qformat=QFormat.AUTO, candidates=(QFormat.FP8, QFormat.INT4_AWQ), sm=8.0, shape=LLAMA)
    assert [finding.rule.name for finding in check(mix)] == ["fp8-needs-sm89"]
    assert "The candidate fp8 of quant=auto: quant=fp8 needs FP8 arithmetic" in check(mix)[0].fault.message
    assert check(replace(mix, sm=8.9)) == []


@pytest.mark.parametrize(
    ("shape", "qformat", "options", "messages"),
    [
        (
            LLAMA,
            QFormat.FP8,
            {"tp_size": 3},
            ["num_attention_heads=32", "intermediate_size=14336", "tp_size=3 and num_key_value_heads=8"],
        ),
        (
            LLAMA,
            QFormat.INT4_AWQ,
            {"group_size": 96},
            ["groups of 96 inputs.*4096 inputs of attention.qkv, attention.dense, mlp.fc, mlp.gate", "14336"],
        ),
    ],
)
def test_every_fault_of_a_shape_is_found_at_once(
    shape: ModelShape, qformat: QFormat, options: dict[str, int], messages: list[str]
) -> None:
    faults = [str(fault) for fault in check_checkpoint(shape, qformat, **options)]
    assert len(faults) == len(messages), faults
    for fault, message in zip(faults, messages, strict=True):
        assert re.search(message, fault)


@pytest.mark.parametrize(
    ("sm", "formats"),
    [
        (8.0, "none int8_sq int4_awq int4_gptq int4_rtn int8_wo int4_wo"),
        (8.6, "none int8_sq int4_awq int4_gptq int4_rtn int8_wo int4_wo"),
        (8.9, "none fp8 int8_sq int4_awq int4_gptq int4_rtn w4a8_awq int8_wo int4_wo"),
        (9.0, "none fp8 int8_sq int4_awq int4_gptq int4_rtn w4a8_awq int8_wo int4_wo"),
        (10.0, "none fp8 nvfp4"),
        (12.0, "none fp8 int8_sq int4_awq int4_gptq int4_rtn w4a8_awq int8_wo int4_wo nvfp4"),
    ],
)
def test_each_gpu_takes_the_formats_of_the_builders_table(sm: float, formats: str) -> None:
    assert [str(qformat) for qformat in formats_for(sm)] == formats.split()


def test_gemma_is_never_offered_nvfp4() -> None:
    """What works is told for the family that was given."""
    [fault] = refused(check(deployment(sm=10.0, qformat=QFormat.INT8_SQ, shape=GEMMA, engine="openvino")))
    assert "quant=none, fp8." in str(fault)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculation": "draft_target", "build": {"pp_size": 2}}, "pp_size=2 cannot be combined with speculative=dr"),
        ({"llm_api": NGRAM, "build": {"pp_size": 2}}, "pp_size=2 cannot be combined with llm_api's speculative_config"),
        (
            {"llm_api": ONE_MODEL, "build": {"pp_size": 2}},
            "pp_size=2 cannot be combined with llm_api's speculative_config of MTP",
        ),
        ({"llm_api": NGRAM, "build": {"max_beam_width": 2}}, "max_beam_width=2 cannot be combined with llm_api's"),
        ({"llm_api": ONE_MODEL, "build": {"max_beam_width": 2}}, "max_beam_width=2 cannot be combined with llm_api's"),
        (
            {"shape": LLAMA, "draft": GEMMA},
            "256000 tokens, the model has 128256. Both need one vocab_size, padding incl",
        ),
        ({"same_vocabulary": False}, "has a different vocabulary"),
        ({"build": {"tokens_per_block": 48}}, "tokens_per_block=48 is not a power of two"),
        ({"triton": {"kv_cache_host_memory_bytes": 9}}, "host_memory_bytes=9 keeps blocks for reuse, but"),
        ({"build": {"tp_size": 16}, "gpus_per_server": 8}, "need 16 GPUs in one server, which has 8"),
        ({"build": {"tp_size": 4}, "triton": {"num_nodes": 3}}, "num_nodes=3 does not divide the 4 ranks"),
        ({"triton": {"kv_cache_free_gpu_mem_fraction": 1.0}}, "mem_fraction=1.0 stops the server"),
        (
            {
                "shape": replace(GEMMA3, num_hidden_layers=62),
                "build": {"pp_size": 2},
                "triton": {"max_attention_window_size": (*(512,) * 5, 8192)},
            },
            "with build.pp_size=2: TensorRT-LLM's KV cache starts the list anew with each stage of 31 layers",
        ),
    ],
)
def test_the_llm_api_drafts_reuses_and_divides_ranks_as_engines_do(given: dict[str, Any], message: str) -> None:
    assert [fault for fault in refused(check(deployment(engine="llmapi", **given))) if message in str(fault)]


def test_the_llm_api_is_refused_no_beams_that_it_does_not_read() -> None:
    facts = deployment(engine="llmapi", speculation="draft_target", triton={"max_beam_width": 4})
    assert not [fault for fault in map(str, refused(check(facts))) if "cannot be combined" in fault]


@pytest.mark.parametrize(
    ("version", "options", "architecture", "stops"),
    [
        ("1.3.0rc24", {"decoding_type": "Eagle3"}, "Qwen2ForCausalLM", True),
        ("1.3.0rc3", {"decoding_type": "Eagle"}, "MistralForCausalLM", True),
        ("1.4.0", {"decoding_type": "Eagle3", "eagle3_one_model": False}, "MistralForCausalLM", True),
        ("1.3.0rc24", {"decoding_type": "Eagle3", "eagle3_one_model": False}, "MistralForCausalLM", False),
        ("1.3.0rc24", {"decoding_type": "Eagle3"}, "Qwen3ForCausalLM", False),
        ("1.3.0rc24", {"decoding_type": "NGram"}, "Qwen2ForCausalLM", False),
        ("1.3.0rc24", {"decoding_type": "Draft_Target"}, "Qwen2ForCausalLM", True),
    ],
)
def test_drafts_inside_the_target_need_its_class(version: str, options: dict, architecture: str, stops: bool) -> None:
    """Only classes of `SpecDecOneEngineForCausalLM` hold a draft model; up to 1.3, EAGLE-3 can run apart."""
    config = {"speculative_config": {"max_draft_len": 3, "speculative_model": "/draft", **options}}
    facts = deployment(
        engine="llmapi", shape=replace(LLAMA, architecture=architecture), llm_api=LlmApiOptions(version, extra=config)
    )
    found = [
        str(fault) for fault in refused(check(facts)) if f"decoding_type={options['decoding_type']} stops" in str(fault)
    ]
    assert bool(found) is stops


@pytest.mark.parametrize(
    ("version", "options", "warns"),
    [
        ("1.3.0rc3", {}, True),
        ("1.3.0rc20", {}, True),
        ("1.3.0rc20", {"allow_advanced_sampling": True}, False),
        ("1.3.0rc3", {"eagle3_one_model": False}, False),
        ("1.3.0rc24", {}, False),
    ],
)
def test_drafts_inside_the_target_answer_greedily_before_requests_may_sample(
    version: str, options: dict, warns: bool
) -> None:
    config = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "/draft", **options}
    options = LlmApiOptions(version, extra={"speculative_config": config})
    said = warned(check(deployment(engine="llmapi", shape=LLAMA, llm_api=options)))
    assert bool([fault for fault in said if "decoding_type=Eagle3: TensorRT-LLM before" in str(fault)]) is warns


def test_the_llm_api_copies_kv_heads_to_ranks_unless_each_has_all() -> None:
    """Phi-4 has 40 heads and 10 KV heads: on 4 ranks its loader raises, with data parallel attention it does not."""
    phi_4 = replace(LLAMA, architecture="Phi3ForCausalLM", num_attention_heads=40, num_key_value_heads=10)
    facts = deployment(engine="llmapi", shape=phi_4, build={"tp_size": 4})
    (fault,) = refused(check(facts))
    assert "tp_size=4 and num_key_value_heads=10 do not divide one another" in str(fault)
    assert not refused(check(replace(facts, llm_api=LlmApiOptions("1.3.0rc24", extra={"enable_attention_dp": True}))))


@pytest.mark.parametrize("engine", ["llmapi", "tensorrt_llm"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"build": {"tp_size": 8}}, r"groups of 128 inputs, which do not divide the 1728 inputs of mlp\.proj per rank"),
        ({"group_size": 32}, r"quant\.group_size=32 has no kernel in TensorRT-LLM.*groups of 128, 64"),
    ],
)
def test_int4_of_a_gpu_has_whole_groups_of_a_size_with_a_kernel(engine: str, given: dict, message: str) -> None:
    """Llama 2 13B and Qwen2.5 14B have 13,824 inputs of the down projection."""
    model = replace(LLAMA, num_attention_heads=40, num_key_value_heads=40, hidden_size=5120, intermediate_size=13824)
    faults = refused(check(deployment(engine=engine, shape=model, qformat=QFormat.INT4_AWQ, **given)))
    assert [fault for fault in faults if re.search(message, str(fault))]


@pytest.mark.parametrize(("architecture", "advised"), [("Gemma2ForCausalLM", False), ("LlamaForCausalLM", True)])
def test_gemma_2_may_fuse_its_all_reduce_and_nobody_advises_it(architecture: str, advised: bool) -> None:
    model = replace(LLAMA, architecture=architecture)
    on, off = (deployment(shape=model, build={"tp_size": 2, "reduce_fusion": word}) for word in ("enable", "disable"))
    assert BY_NAME["reduce-fusion-would-be-ignored"].findings(on) == []
    assert bool(BY_NAME["reduce-fusion-is-left-off"].findings(off)) is advised


@pytest.mark.parametrize("draft_len", [*range(1, 40), 83, 255])
def test_lookahead_sizes_give_their_draft_length(draft_len: int) -> None:
    sizes = lookahead_sizes(draft_len)
    assert min(sizes) >= 1
    assert lookahead_draft_len(*sizes) == draft_len


@pytest.mark.parametrize(("sizes", "tokens"), [((7, 7, 7), 83), ((4, 1, 2), 0), ((3, 2, 3), 5)])
def test_the_draft_length_of_lookahead(sizes: tuple[int, int, int], tokens: int) -> None:
    """(7, 7, 7): 5 + (6 + 7) * 6 = 83; (4, 1, 2): 0 + 5 * 0 = 0; (3, 2, 3): 0 + (2 + 3) * 1 = 5."""
    assert lookahead_draft_len(*sizes) == tokens


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Phi3ForCausalLM"])
def test_a_family_that_modelopt_does_not_export_is_written_by_tensor_or_offered_the_llm_api(architecture: str) -> None:
    rule, model = BY_NAME["families-without-modelopts-export"], replace(LLAMA, architecture=architecture)
    (finding,) = rule.findings(deployment(shape=model, qformat=QFormat.INT4_RTN))
    assert "only where tensorrt_llm is installed" in finding.fault.message
    assert "engine=tensorrt_llm_llmapi" in finding.fault.todo
    assert not rule.findings(deployment(shape=model, qformat=QFormat.INT4_RTN, engine="openvino"))
    assert check_checkpoint(model, QFormat.INT4_RTN, positions=Rotary("linear", 1.0)) == []
    assert check_checkpoint(PHI, QFormat.INT4_RTN, positions=Rotary("longrope", 0.75, original=1024)) == []
    (fault,) = check_checkpoint(model, QFormat.INT4_AWQ)
    assert "quant=int4_awq" in fault.message
    qformat = QFormat.NONE if architecture == "Phi3ForCausalLM" else QFormat.FP8  # its matrix has no FP8 for Phi
    assert not refused(check(deployment(shape=model, engine="llmapi", qformat=qformat)))


@pytest.mark.parametrize(
    ("engine", "works"),
    [
        ("tensorrt_llm", "none, int8_wo, int4_wo, fp8."),
        ("openvino", "none, int8_wo, int4_wo, int4_rtn, fp8."),
    ],
)
def test_a_refused_format_of_a_mixture_names_those_that_work(engine: str, works: str) -> None:
    rule, model = BY_NAME["families-without-modelopts-export"], replace(LLAMA, architecture="MixtralForCausalLM")
    (finding,) = rule.findings(deployment(shape=model, qformat=QFormat.INT4_AWQ, engine=engine))
    assert finding.fault.allowed == f"With kv_cache=auto: quant={works}"
    assert not rule.findings(deployment(shape=model, qformat=QFormat.FP8, engine=engine, build={"tp_size": 2}))


INT4 = {"int4_awq", "int4_gptq", "int4_rtn"}  # one kernel
LISTED = {
    "LlamaForCausalLM": {"fp8", "nvfp4", "w4a8_awq", *INT4},
    "Qwen2ForCausalLM": {"fp8", "nvfp4", "w4a8_awq", *INT4},
    "Qwen3ForCausalLM": {"fp8", "nvfp4", *INT4},
    "MistralForCausalLM": {"fp8", *INT4},
    "Gemma3ForCausalLM": {"fp8", "w4a8_awq", *INT4},
    "Phi3ForCausalLM": {"w4a8_awq"},
    "GptOssForCausalLM": set(),  # as published
    "MixtralForCausalLM": {"fp8", "nvfp4"},  # ModelOpt exports no other
    "Qwen3MoeForCausalLM": {"fp8", "nvfp4"},
}
"""Formats of the LLM API: the matrix of models in docs/source/features/quantization.md of 1.3.0rc3."""


@pytest.mark.parametrize("architecture", LISTED)
def test_the_llm_api_runs_the_formats_of_nvidias_matrix(architecture: str) -> None:
    model = replace(LLAMA, architecture=architecture)
    runs = {q for q in UNIFORM if not refused(check(deployment(shape=model, engine="llmapi", qformat=q, sm=None)))}
    assert {str(q) for q in runs} - {"none"} == LISTED[architecture]


def test_each_format_that_the_llm_api_lacks_has_a_reason_of_its_own() -> None:
    assert set(WHY_NOT) == {qformat for qformat, form in FORMATS.items() if not form.llm_api}
    assert set(edge.WHY_NOT) == {qformat for qformat, form in FORMATS.items() if not form.edge}


@pytest.mark.parametrize("architecture", [f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")])
def test_llama_and_those_built_on_its_class_look_ahead_and_fuse_swiglu(architecture: str) -> None:
    model = replace(LLAMA, architecture=architecture)
    build = {"gemm_swiglu_plugin": "fp8", "speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 83}
    broken = check(deployment(shape=model, qformat=QFormat.FP8, build=build))
    names = {finding.rule.name for finding in broken}
    assert not names & {"swiglu-plugins-need-swiglu", "lookahead-is-not-for-every-family"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sparsity": "magnitude"}, "sparsity=magnitude. .* Set sparsity=none"),
        ({"speculation": "draft_target"}, "speculative=draft_target"),
        ({"build": {"tp_size": 2}}, "more than one GPU"),
        ({"chunked_context": True}, "runtime.enable_chunked_context=True"),
        ({"triton": {"max_attention_window_size": (64,)}}, r"triton.max_attention_window_size=\(64,\)"),
    ],
)
def test_a_device_gets_a_plain_model_and_reads_nothing_of_tritonserver(given: dict, said: str) -> None:
    (found,) = [each for each in check(deployment(engine="tensorrt_edge", **given)) if each.rule.topic == edge.TOPIC]
    assert re.search(said, str(found.fault))


def test_the_llm_api_leaves_out_the_window_of_phi_3():
    """Mistral's is read by newer versions, so it is not refused."""
    phi = replace(MISTRAL, architecture="Phi3ForCausalLM")
    (fault,) = refused(check(deployment(engine="llmapi", shape=phi, build={"max_seq_len": 8192})))
    assert "Phi3ForCausalLM was trained with an attention window of 4096" in fault.message
    assert not refused(check(deployment(engine="llmapi", shape=MISTRAL, build={"max_seq_len": 8192})))


@pytest.mark.parametrize(
    ("scaling", "asked", "todo"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, "yarn up to 131072"),
        ({"type": "linear", "factor": 2.0}, 65536, "linear up to 65536: to use them, set max_position_embeddings="),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131073, ""),
        ({"type": "linear", "factor": 2.0}, 65537, ""),
        ({"type": "yarn", "factor": 4.0}, 65536, ""),  # the original positions would change with the key
    ],
)
def test_scaled_positions_beyond_the_models(scaling: dict[str, Any], asked: int, todo: str) -> None:
    """Qwen's card adds a block of yarn alone: the limit says which key lets sequences grow."""
    config = {"max_position_embeddings": 32768, "rope_scaling": scaling}
    facts = deployment(
        shape=replace(LLAMA, max_position_embeddings=32768), rotary=Rotary.of(config), build={"max_seq_len": asked}
    )
    (broken,) = check(facts)
    assert broken.rule.name == "longer-than-the-model"
    assert todo in broken.fault.todo
    assert bool(todo) == bool(broken.fault.todo)


def test_llm_api_cuts_longer_sequences() -> None:
    """TensorRT-LLM serves no more than the model's positions, with a warning in its log; linear ones it scales."""
    given = {"engine": "llmapi", "shape": LLAMA, "build": {"max_seq_len": 131073}}
    assert [each.rule.name for each in check(deployment(**given))] == ["longer-than-the-model"]
    assert check(deployment(**given, rotary=Rotary("linear", 1.0))) == []


@pytest.mark.parametrize(("experts", "extra", "found"), [(8, {}, 0), (1, {}, 1), (1, {"enable_attention_dp": True}, 1)])
def test_groups_divide_the_inputs_of_experts_as_ranks_share_them(
    experts: int, extra: dict[str, Any], found: int
) -> None:
    """Whole experts on each rank, or slices of all; attention_dp copies attention alone."""
    narrow = replace(MIXTRAL, intermediate_size=768)
    options = LlmApiOptions("1.3.0rc24", extra=extra)
    build = {"tp_size": 8, "moe_ep_size": experts}
    facts = deployment(engine="llmapi", shape=narrow, qformat=QFormat.INT4_AWQ, build=build, llm_api=options)
    named = [str(each.fault) for each in BY_NAME["groups-divide-inputs"].findings(facts)]
    assert len(named) == found
    assert all("96 inputs of mlp.proj per rank" in each for each in named)
