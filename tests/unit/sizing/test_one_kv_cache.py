"""`plan`, `simulate` and `size` speak of the same KV cache."""

import pytest

from pipelines.host.machine import gather
from pipelines.predict.performance.deployment import costs, gpu_model, tuned_for
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.models import known_model
from pipelines.predict.simulate.case import make_case
from pipelines.predict.sizing.instance import instance
from pipelines.predict.sizing.question import ask
from pipelines.settings.compose import load

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
    model = known_model(settings)
    tuned = tuned_for(settings, model, settings.hardware)  # as `plan` has them
    modelled = gpu_model(tuned, model, gpu_named("h100_sxm"), costs(tuned)).deployment.engine
    assert sized.kv_blocks == simulated.kv_blocks == modelled.kv_blocks
