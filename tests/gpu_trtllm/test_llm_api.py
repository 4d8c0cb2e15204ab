"""TensorRT-LLM's PyTorch backend runs what `make build engine=tensorrt_llm_llmapi` makes."""

import re

import pytest
import yaml

from triton_repo.llmapi import CHECKPOINT, OPTIONS, LlmArgs

PROMPT = "The river of Githbrel is"


@pytest.mark.parametrize("words", [["quant=none"], ["quant=fp8"], ["quant=fp8", "kv_cache=fp8"], ["quant=int4_awq"]])
def test_it_generates(cli, words):
    from tensorrt_llm import LLM, SamplingParams

    said = cli.run("build", "engine=tensorrt_llm_llmapi", "model=tiny_llama", "build.max_batch_size=8", *words)
    found = re.search(r"^engine: +(\S+)$", said, re.MULTILINE)
    assert found
    folder = cli.folder / found[1]
    arguments = yaml.safe_load((folder / OPTIONS).read_text())
    with LLM(model=str(folder / CHECKPOINT), backend="pytorch", **arguments) as llm:
        (answer,) = llm.generate([PROMPT], SamplingParams(max_tokens=8))
    assert answer.outputs[0].text.strip()


def test_the_library_has_every_argument_with_our_default():
    """The table in tests/contract was read from single files of the 1.3 line."""
    from tensorrt_llm.llmapi import KvCacheConfig
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    theirs = TorchLlmArgs.model_fields
    assert set(LlmArgs.model_fields) <= set(theirs)
    pool = LlmArgs.model_fields["kv_cache_config"].annotation
    for name, field in pool.model_fields.items():
        assert KvCacheConfig.model_fields[name].default == field.default, name
