"""Whatever is typed after a command is taken or refused in our own words: no traceback, none of the parser's."""

import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipelines.cli.words import overrides_of
from pipelines.domain.errors import UserError
from pipelines.settings.compose import load

pytestmark = pytest.mark.thorough

KEYS = [
    "quant", "quant.qformat", "build.max_batch_size", "build.no_such", "model", "model.path", "kv_cache", "engine.name",
    "sizing.slo.ttft_ms", "benchmark.concurrency", "experiment", "a", "", "hydra.run.dir", "hydra/launcher", "eval@x",
    "quant@quant", "triton.medusa_choices", "paths.store", "model.shape",
]  # fmt: skip
PIECES = [
    "fp8", "none", "null", "true", "1", "0", "-1", "1e999", "nan", "inf", "0x10", "1_000", "[", "]", "{", "}", "(", ")",
    ",", ":", "'", '"', "\\", "$", "${", "}", "${quant.qformat}", "${oc.env:HOME}", "${nothing:1}", "=", "+", "~", "@",
    "/", "..", " ", "\t", "\n", "glob(*)", "range(1,3)", "choice(fp8,none)", "sort(a)", "int(a)", "str(", "*", "%", "#",
    "é", "日本", "\x00", "\x1b[31m", "???", "!x", "&a", "<<", "a" * 300,
]  # fmt: skip
VALUES = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=5).map("".join)
WORDS = st.builds("{}{}={}".format, st.sampled_from(["", "+", "++", "~", " "]), st.sampled_from(KEYS), VALUES)
THEIRS = re.compile(
    r"antlr|ANTLR|mismatched input|extraneous|no viable|LexerNoViable|token recognition|ConfigKeyError|in struct|Hydra"
    r"|OmegaConf|omegaconf|Traceback|Error\b|pydantic|validation error|input_value|<class|NoneType"
)


@settings(max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WORDS, min_size=1, max_size=3))
@example(["quant=fp8,int4_awq"])
@example(["build.max_batch_size=[1"])
@example(["quant="])
@example(["~quant"])
@example(["quant@a.b=fp8"])
@example(["model.path=${nothing:1}"])
def test_any_word_is_taken_or_refused_in_our_own_words(words):
    try:
        load(overrides_of("build", words))
    except UserError as error:
        for fault in error.faults:
            text = str(fault)
            for word in words:  # what was typed is quoted
                for part in (word, word.partition("=")[2], word.partition("=")[0].lstrip("+~ ")):
                    text = text.replace(part, "") if part else text
            assert not THEIRS.search(text), (words, str(fault))
