"""Whatever `make size` and `make simulate` call possible is accepted by `make plan` with the row's settings typed."""

from contextlib import suppress
from dataclasses import replace

import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.engines.tensorrt_llm.config import LIMITS_FOR_LOAD
from pipelines.host.machine import Machine
from pipelines.plan.candidates import judge_of
from pipelines.plan.plan import make_plan
from pipelines.predict.performance.deployment import costs
from pipelines.predict.sizing.question import ask
from pipelines.predict.sizing.size_command import solve
from pipelines.settings.compose import load
from pipelines.store.store import Store

HERE = Machine(8, 2**40, (), "nvidia-smi is not installed", has_tensorrt_llm=False, platform="test")
LOAD = ["sizing.requests=200", "sizing.peak_rate=20", "workload.isl=2000", "workload.osl=100"]
QUESTIONS = {
    "every format": ["model=llama_3_8b", "hardware=h100_sxm", "sizing.formats=auto", "sizing.tp=[1,2]"],
    "a small limit": ["model=llama_3_8b", "hardware=h100_sxm", "quant=fp8", "build.max_num_tokens=2048"],
    "splits": ["model=qwen3_8b", "hardware=l40s", "sizing.tp=[1,2,4,8,16]", "sizing.pp=[1,2,3]"],
    "KV formats": ["model=gemma_2b", "hardware=a10", "quant=int4_awq", "sizing.kv_formats=[auto,int8,fp8]"],
    "reuse": ["model=mistral_7b_v0_3", "hardware=h100_sxm", "quant=int4_awq", "kv_cache=fp8", "reuse=system_prompt"],
    "LLM API": ["model=llama_3_8b", "hardware=b200_sxm", "engine=tensorrt_llm_llmapi", "sizing.formats=auto"],
}
OFTEN = ("every format", "reuse", "LLM API")


def accepted(words):
    """Answer a question, and return each engine that the rules let pass while it was answered."""
    settings, passed = load(words), []
    judge = judge_of(settings, HERE)

    def recording(setup, limits):
        judge(setup, limits)
        passed.append((setup, limits))

    question = replace(ask(settings, HERE), judge=recording)
    with suppress(UserError):  # where the rules let none pass
        solve(settings, question, costs(settings))
    return passed


@pytest.mark.parametrize(
    "words",
    [pytest.param(q, id=name, marks=[] if name in OFTEN else [pytest.mark.thorough]) for name, q in QUESTIONS.items()],
)
def test_a_plan_accepts_what_size_calls_possible(tmp_path, words):
    passed = accepted([*words, *LOAD])
    assert bool(passed) == ("reuse=system_prompt" not in words)  # ruled out in this format with an FP8 cache
    for setup, limits in passed:
        row = [f"quant={setup.qformat}", f"kv_cache.dtype={setup.kv_format}", f"build.tp_size={setup.tp}"]
        row += [f"build.pp_size={setup.pp}", "plan.target=serve"]
        row += [f"build.{name}={getattr(limits, name)}" for name in LIMITS_FOR_LOAD]
        engine = [] if any("engine=" in word for word in words) else ["engine=tensorrt_llm"]
        make_plan(load([*words, *LOAD, *engine, *row]), "serve", Store(tmp_path), HERE)


def test_limits_below_the_prompt_are_not_possible(tmp_path, capsys):
    words = ["model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "sizing.tp=1", *LOAD, f"report.folder={tmp_path}"]
    assert main(["size", *words, "build.max_num_tokens=2048"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "max_num_tokens 1,024: not possible: build.max_num_tokens=1024 is less than max_input_len=2048" in said
    assert main(["size", *words, "build.max_num_tokens=512"]) == 2
    assert "build.max_num_tokens=512 is less than max_input_len=2048" in " ".join(capsys.readouterr().err.split())
    words = ["model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "workload.isl=2000", "benchmark.concurrency=5"]
    assert main(["simulate", *words, "build.max_num_tokens=512", f"paths.runs={tmp_path}"]) == 2
    assert "build.max_num_tokens=512 is less than max_input_len=2048" in " ".join(capsys.readouterr().err.split())
