"""Settings, choices and commands that messages and pages name exist, under that name."""

import re
import shlex

import pytest

from pipelines.settings.by_hydra import parse_override
from tests.conftest import ROOT
from tests.support.named_settings import strings, texts, unknown


def test_everything_that_is_named_exists():
    wrong = [
        f"{each.file.relative_to(ROOT)}:{each.line}: {name} does not exist; nearest: {nearest}"
        for each in texts()
        for name, nearest in unknown(each.text)
    ]
    assert wrong == []


def test_overrides_in_pages_can_be_typed():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    spans = re.findall(r"`('?[a-z_]+(?:\.[a-z_]+)+=[^\s`{]+)`", pages)
    words = [word for span in spans if "..." not in span for word in shlex.split(span)]
    assert len(words) > 150
    for word in words:
        parse_override(word)


@pytest.mark.parametrize(
    ("text", "name", "nearest"),
    [
        ("Set engine.enable_chunked_context=true.", "engine.enable_chunked_context", "runtime.enable_chunked_context"),
        ("Give build.max_batchsize=8.", "build.max_batchsize", "build.max_batch_size"),
        ("make sweep quant=fp8,int8", "quant=int8", "quant=int8_"),
        ("paths.stores='/x' cannot be written", "paths.stores", "paths.store"),
        ("`triton.lora_cachee_*` sets its size", "triton.lora_cachee_*", "triton.lora_"),
        ("Choose quant=int4_awk.", "quant=int4_awk", "quant=int4_awq"),
        ("eval.limits=2", "eval.limits", "eval.limit"),
        ("benchmark.arrival=constants", "benchmark.arrival", "benchmark."),
        ("runtime.enable_chunked_context=on", "runtime.enable_chunked_context=on", ""),
        ("Run: make repositories", "make repositories", "make repository"),
        ("Run trtllm-pipelines simulat", "trtllm-pipelines simulat", "trtllm-pipelines simulate"),
        ("python -m scripts.zoos", "-m scripts.zoos", ""),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(text, name, nearest):
    assert [found for found, _ in unknown(text)] == [name]
    assert nearest in next(near for _, near in unknown(text))


@pytest.mark.parametrize(
    "text",
    [
        "build.{name}=fp8 needs quant={d.qformat}",
        "make compare quant=none,fp8,int8_sq",
        "Give another folder: paths.runs=/some/folder",
        "lora.adapters.7=/an/adapter",
        "model.layers.0.mlp is in model.safetensors",
        "hardware=NAME model=... workload.isl=normal(512,64)",
        "report.html, and sizing.average_rate.",
        "make sure that it runs; $(PYTHON) -m scripts.bundled_tasks",
        "quant.dtype=null, quant=glob(int8*)",
    ],
)
def test_what_exists_or_stays_open_is_not(text):
    assert list(unknown(text)) == []


def test_strings_are_read_with_gaps_and_without_docstrings(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('"""Docstring."""\nname = "a" "b"\n\nlong = f"x={name}."\n')
    assert [(each.line, each.text) for each in strings(module)] == [(2, "ab"), (4, "x=….")]
