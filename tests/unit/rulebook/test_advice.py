"""No message recommends what another message refuses: on every GPU, in every format, for every engine."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from pipelines.domain.errors import Fault
from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.predict.performance.gpus import rows
from pipelines.rules.record import BrokenRule, DeploymentFacts
from pipelines.rules.rulebook import check, refused
from tests.support.rule_cases import GEMMA, LLAMA, deployment
from tests.support.rule_cases.words import GPT_OSS

ENGINES = ("tensorrt_llm", "openvino", "llmapi")
CAPABILITIES = sorted({row.sm for row in rows() if row.sm is not None})
OFTEN = (8.6, 9.0, 10.0, CAPABILITIES[-1])
"""Without FP8, with it, with NVFP4, and the newest one; the CPU engine and the LLM API see few others apart."""
BUILDS = {"plain": {}, "fp8 plugin": {"gemm_plugin": "fp8"}, "nvfp4 plugin": {"gemm_plugin": "nvfp4"}}


def advised(fault: Fault, key: str) -> Iterator[str]:
    """Yield the formats that a message tells the reader to use: "quant=fp8, none or int4_awq"."""
    for found in re.findall(rf"{key}=([\w]+(?:(?:, | or |/)[\w]+)*)", f"{fault.allowed} {fault.todo}"):
        yield from (word for word in re.split(r", | or |/", found) if word in {*QFormat, *KvFormat})


@cache
def base(engine: str, build: str) -> DeploymentFacts:
    return deployment(engine=engine, build=BUILDS[build], chunked_context=True)


def facts(engine: str, shape: ModelShape, sm: float, build: str, quant: str, kv: str) -> DeploymentFacts:
    group = FORMATS[QFormat(quant)].weights.group or 128  # as conf/quant has it
    formats = {"qformat": QFormat(quant), "kv_format": KvFormat(kv), "group_size": group}
    return replace(base(engine, build), shape=shape, sm=sm, **formats)


def by_format(
    engine: str, shape: ModelShape, sm: float, build: str
) -> dict[tuple[QFormat, KvFormat], list[BrokenRule]]:
    """Return what is refused with every pair of formats."""
    pairs = [(quant, kv) for quant in QFormat for kv in KvFormat]
    found = {pair: check(facts(engine, shape, sm, build, *pair)) for pair in pairs}
    return {pair: [f for f in findings if not f.rule.warns] for pair, findings in found.items()}


@pytest.mark.parametrize(
    ("sm", "engine"),
    [
        pytest.param(sm, engine, marks=[] if engine == "tensorrt_llm" or sm in OFTEN else [pytest.mark.thorough])
        for sm in CAPABILITIES
        for engine in ENGINES
    ],
)
def test_no_message_advises_a_format_that_is_refused(engine: str, sm: float) -> None:
    """With the advised format nothing is refused that any other format would avoid.

    Plugins are those of trtllm-build; the other engines are tried with them on the newest GPU.
    """
    builds = BUILDS if engine == "tensorrt_llm" or sm == CAPABILITIES[-1] else ("plain",)
    for shape, build in product((LLAMA, GEMMA), builds):
        found = by_format(engine, shape, sm, build)
        names = {pair: {finding.rule.name for finding in findings} for pair, findings in found.items()}
        for (quant, kv), findings in found.items():
            always_quant = set.intersection(*(names[other, kv] for other in QFormat))
            always_kv = set.intersection(*(names[quant, other] for other in KvFormat))
            for finding in findings:
                own = {finding.rule.name}
                for word in advised(finding.fault, "quant"):
                    assert names[QFormat(word), kv] <= always_quant - own, (finding.fault, word)
                for word in advised(finding.fault, "kv_cache"):
                    assert names[quant, KvFormat(word)] <= always_kv - own, (finding.fault, word)


def test_an_a10_is_not_told_to_use_fp8() -> None:
    """Gemma has no NVFP4, and this GPU no FP8: one message used to say "Choose fp8 or int4_awq"."""
    faults = refused(check(deployment(sm=8.6, shape=GEMMA, qformat=QFormat.NVFP4, group_size=16)))
    said = " ".join(map(str, faults))
    assert "Supported here: quant=none, int8_sq, int4_awq, int4_gptq, int4_rtn, int8_wo, int4_wo." in said
    assert not re.search(r"fp8", said.replace("quant=nvfp4", "").replace("NVFP4", ""))


@pytest.mark.parametrize(
    ("engine", "quant", "todo"),
    [
        ("openvino", QFormat.INT4_AWQ, "Use one of them."),
        ("tensorrt_llm", QFormat.INT4_AWQ, "Use engine=openvino, or engine=tensorrt_llm_llmapi with quant=none."),
        ("llmapi", QFormat.INT8_WO, "Set quant=none."),
    ],
)
def test_no_message_sends_gpt_oss_where_it_is_refused(engine: str, quant: QFormat, todo: str) -> None:
    """The LLM API takes it in no other format than its own, and trtllm-build in none at all."""
    (fault,) = refused(check(deployment(engine=engine, shape=GPT_OSS, qformat=quant, sm=9.0)))
    assert fault.todo == todo


def test_options_of_a_format_are_to_be_removed_where_the_format_does_not_exist() -> None:
    """On Hopper quant=fp8 is the other way out; on Ampere there is none."""
    plugin = {"gemm_plugin": "fp8"}
    (hopper,) = refused(check(deployment(sm=9.0, qformat=QFormat.INT4_AWQ, build=plugin)))
    (ampere,) = refused(check(deployment(sm=8.0, qformat=QFormat.INT4_AWQ, build=plugin)))
    assert hopper.todo == "Remove build.gemm_plugin, or choose quant=fp8."
    assert ampere.todo == "Remove build.gemm_plugin."


def test_where_no_format_helps_the_message_says_so() -> None:
    """FP8 plugins need quant=fp8, which the A100 does not run; 16 bit is refused because of the plugin."""
    plugin = {"gemm_plugin": "fp8"}
    faults = refused(check(deployment(sm=8.0, qformat=QFormat.FP8, build=plugin)))
    assert [fault.allowed for fault in faults] == ["On compute capability 8.0: no format with the other settings."]
