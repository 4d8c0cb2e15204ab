"""A program's own --help against the option table."""

import pytest

from pipelines.engines.tensorrt_llm.folder import extra_choices, help_differences
from tests.support.build_options import of_options


@pytest.fixture(scope="module")
def text(trtllm_build):
    return trtllm_build("--help").stdout


def test_the_described_program_has_no_difference(text):
    assert help_differences(text) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--max_batch_size", "--max_batch", r"lacks --max_batch_size\..*has --max_batch, which 1\.2 lacks"),
        ("{fp8,disable}", "{fp4,disable}", r"accepts --gemm_swiglu_plugin \{fp4, disable\}"),
        ("(default: 2048)", "(default: 64)", r"--max_batch_size in this trtllm-build is 64\. In 1\.2 it is 2048"),
    ],
)  # fmt: skip
def test_a_difference_is_named(text, old, new, message):
    import re

    found = " ".join(map(str, help_differences(text.replace(old, new))))
    assert re.search(message, found)
    assert "Report it to this project" in found


def test_a_choice_that_was_added_is_no_difference_but_is_noted(text):
    added = text.replace("{fp8,disable}", "{fp8,fp4,disable}")
    assert help_differences(added) == []
    assert "--gemm_swiglu_plugin also accepts fp4" in extra_choices(added)
    assert extra_choices(text) == []


def test_trace_is_a_log_level_of_later_versions_only(text):
    """1.2 has no --log_level trace, 1.3.0rc3 has it: neither is a difference."""
    without = text.replace("debug,trace}", "debug}")
    assert help_differences(without) == help_differences(text) == []
    assert of_options(log_level="trace")["log_level"] == "trace"


def test_another_text_is_said_to_be_no_help():
    assert "it contains no options" in str(help_differences("trtllm-build: command not found")[0])
