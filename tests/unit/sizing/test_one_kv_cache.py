"""`plan`, `simulate` and `size` speak of the same KV cache."""

import pytest

from pipelines.commands import load
from pipelines.costs import costs
from pipelines.known_model import known_model
from pipelines.machine import gather
from pipelines.modelling import gpu_model
from pipelines.simulating.case import make_case
from pipelines.size_command.ask import ask
from pipelines.sizing.instance import instance
from pipelines.sizing.specs import gpu_named

WORDS = ("model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "workload.isl=2000", "workload.osl=200")


@pytest.mark.parametrize(
    "words",
    [(), ("triton.kv_cache_free_gpu_mem_fraction=0.5",), ("triton.max_tokens_in_paged_kv_cache=64000",)],
)
def test_the_kv_cache_is_the_same_everywhere(words):
    settings = load((*WORDS, "sizing.average_rate=5", *words))
    question = ask(settings, gather())
    (setup,) = [each for each in question.setups() if (each.tp, each.pp) == (1, 1)]
    sized = instance(question, setup, costs(settings)(setup)).engine
    simulated = make_case(settings, gather()).engines[0]
    modelled = gpu_model(settings, known_model(settings), gpu_named("h100_sxm"), costs(settings)).deployment.engine
    assert sized.kv_blocks == simulated.kv_blocks == modelled.kv_blocks
