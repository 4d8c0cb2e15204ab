"""Questions for the sizing calculator, with invented engine costs so that results can be worked out by hand."""

from dataclasses import replace
from typing import Any

import numpy as np

from pipelines.domain.benchmark import Slo
from pipelines.domain.formats import QFormat
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.limits import NOTHING_GIVEN, WantedLimits
from pipelines.predict.performance.memory import EngineSizes
from pipelines.predict.performance.models import model_named
from pipelines.predict.performance.performance import Costed, Setup
from pipelines.predict.performance.placement import EngineTerms
from pipelines.predict.simulator.run import IterationCost
from pipelines.predict.sizing.question import Demand, Question

COUNT = 1000


def question(
    *,
    wanted: WantedLimits = NOTHING_GIVEN,
    prefix_tokens: int = 0,
    max_kv_tokens: int | None = None,
    **changes: Any,
) -> Question:
    """Return a question: Llama-3-8B in FP8 on H100, 30 requests/s of 1,000/100 tokens, TTFT 500 ms at P95, TP 1."""
    model = changes.get("model", model_named("llama-3-8b"))
    sizes = EngineSizes(model, QFormat.FP8, windows=model.windows, max_kv_tokens=max_kv_tokens)
    gaps = np.random.default_rng(7).exponential(size=COUNT)
    plain = Question(
        model=model,
        gpu=gpu_named("h100_sxm"),
        demand=Demand(25.0, 30.0, 24.0, "as given"),
        isl=np.full(COUNT, 1000),
        osl=np.full(COUNT, 100),
        gaps=gaps / gaps.mean(),
        slo=Slo("given", ttft_ms=500.0),
        terms=EngineTerms(sizes, wanted, prefix_tokens=prefix_tokens),
        formats=(QFormat.FP8,),
    )
    return replace(plain, **changes)


def demand(peak: float, average: float | None = None) -> Demand:
    """Return a demand in requests per second."""
    return Demand(average, peak, 24.0, "as given")


def made_up(setup: Setup, *, speed: float = 1.0, spread: float = 0.1) -> Costed:
    """Return invented costs: 20 us per token, 5 ms per iteration; 1.6 times as fast on twice the ranks."""
    faster = speed * 1.6 ** np.log2(setup.tp)
    cost = IterationCost(
        token_compute=2e-5 / faster, row_compute=0.0, weights=4e-3 / faster, head_weights=0.0, fixed=1e-3
    )
    sd = {"ttft": spread, "itl": spread, "throughput": spread}
    return Costed(cost, 0.005, 0.005, "datasheet", "made up for a test", sd)
