"""TensorRT-LLM's PyTorch backend runs what `make build engine=tensorrt_llm_llmapi` makes."""

import re

import pytest
import yaml

from pipelines.engines.tensorrt_llm.llm_api import tables_of
from triton_repo.llmapi import CHECKPOINT, OPTIONS

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


def test_trtllm_serve_is_started_and_measured_over_http(cli):
    words = ["engine=tensorrt_llm_llmapi", "model=tiny_llama", "quant=fp8", "build.max_batch_size=8"]
    load = ["benchmark.concurrency=2", "benchmark.num_requests=16"]
    assert "requests/s" in cli.run("benchmark", "serving.server=trtllm_serve", *words, *load)


def test_the_table_of_its_version_has_every_option_of_the_library_and_no_other():
    """The tables were read from NVIDIA's sources, not from an installed library."""
    import tensorrt_llm
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    names = {name for name in TorchLlmArgs.model_fields if not name.startswith("_")}
    own = [table for table in tables_of(tensorrt_llm.__version__)]
    for table in own:
        rooted = set(table.names("", None))
        if len(own) == 1:
            assert rooted - {"build_config"} == names - {"build_config"}
    assert names <= set().union(*(table.names("", None) for table in own))
