"""A program's own --help against the option table."""

import pytest

from pipelines.engines.tensorrt_llm.options import help_differences


@pytest.fixture(scope="module")
def text(trtllm_build):
    return trtllm_build("--help").stdout


def test_the_described_program_has_no_difference(text):
    assert help_differences(text) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--max_batch_size", "--max_batch", r"lacks --max_batch_size\..*has --max_batch, which 1\.2 lacks"),
        ("{fp8,disable}", "{fp8,fp4,disable}", r"accepts --gemm_swiglu_plugin \{fp8, fp4, disable\}"),
        ("(default: 2048)", "(default: 64)", r"--max_batch_size in this trtllm-build is 64\. In 1\.2 it is 2048"),
    ],
)  # fmt: skip
def test_a_difference_is_named(text, old, new, message):
    import re

    found = " ".join(map(str, help_differences(text.replace(old, new))))
    assert re.search(message, found)
    assert "docs/gpu.md" in found


def test_another_text_is_said_to_be_no_help():
    assert "it contains no options" in str(help_differences("trtllm-build: command not found")[0])
