"""A public open-loop benchmark of vLLM: what was offered, and what the performance model predicts for it.

inference-sim measured 51 deployments of vLLM 0.15.1 (H100, A100, L40S) with inference-perf: 89 stages of one rate each.
`data/stages.csv` has their figures (use=judge, never fitted to) and those of seven further stages (use=fit), from which
the front end's time was taken. What was offered: `workloads.yaml` of inference-sim/tektonc-data-collection@2a7cbcd4.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.domain.formats import QFormat
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.memory import device_memory
from pipelines.predict.performance.models import model_named
from pipelines.predict.performance.performance import Framework, PerformanceModel, Setup
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import IterationCost, simulate
from scripts.published.frameworks import framework_named
from scripts.published.predict import NORMAL_80

STAGES = Path(__file__).parent / "data" / "stages.csv"
METRICS = ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99", "itl_mean")
"""Columns with figures, ms. ITL is (mean E2E - mean TTFT) / (mean output tokens - 1), as its authors compute it."""
FRAMEWORK = framework_named("vLLM 0.15.1")
FRONT_END_S = 0.006
"""Seconds from client to scheduler and back: HTTP, tokenizer, detokenizer; fitted to the stages with use=fit."""
PIECEWISE_S = 24e-6
"""Seconds that a layer takes longer in an iteration whose CUDA graph leaves out attention: Qwen2.5 1.5B (28 layers) had
0.4 to 1.0 ms more ITL with such graphs at six rates, median 0.69 (table of 29 June 2025 in vllm-project/vllm#20059)."""
IN_16_BIT = {"meta-llama/Llama-4-Scout-17B-16E-Instruct": {"fp8": "attention"}}
"""What RedHatAI's FP8-dynamic folder, which was served, leaves in 16 bit: llm-compressor's recipes for Llama 4 ignore
`self_attn` (examples/quantization_w8a8_fp8/llama4_fp8_block_example.py of vllm-project/llm-compressor)."""
BLOCK, SLOTS = 16, 128
"""Tokens of a KV block, and max_num_seqs, of every deployment."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What inference-perf offered.

    Attributes:
        stages: (requests per second, seconds) of each stage, one after the other.
        prompts: different prompts, sent in turn; a repeated one is in the prefix cache.
        system: tokens that all of them share.
        question: tokens of each beside those.
        osl: output tokens.
    """

    stages: tuple[tuple[float, int], ...]
    prompts: int
    system: int
    question: int
    osl: int

    @property
    def isl(self) -> int:
        """Tokens of a prompt."""
        return self.system + self.question


GENERAL, REASONING = (45, 100, 447, 248), (23, 100, 934, 1448)
WORKLOADS = {
    "general": Workload(((8, 600), (20, 600)), *GENERAL),
    "general-lite": Workload(((2.5, 600), (6, 600)), *GENERAL),
    "codegen": Workload(((5, 600), (10, 600)), 44, 100, 466, 247),
    "roleplay": Workload(((6, 1200),), 50, 150, 600, 251),
    "reasoning": Workload(((4, 1200),), *REASONING),
    "reasoning-lite": Workload(((1, 1200),), *REASONING),
}


def offered(workload: Workload, seed: int = 0) -> tuple[OfferedLoad, Any]:
    """Return the requests of all stages, and the stage of each, int64[requests].

    inference-perf's constant rate has exponential gaps, scaled to the length of the stage. After each prompt's first
    request, vLLM's prefix cache holds all its whole blocks; before that, only those of the system prompt.
    """
    random, begin, arrivals = np.random.default_rng(seed), 0.0, []
    for rate, seconds in workload.stages:
        gaps = random.exponential(1.0, int(rate * seconds))
        arrivals.append(begin + np.cumsum(gaps) * seconds / gaps.sum())
        begin += seconds
    stage = np.repeat(np.arange(len(arrivals)), [len(each) for each in arrivals])
    isl = workload.isl
    cached = np.full(len(stage), (isl - 1) // BLOCK * BLOCK)
    cached[: workload.prompts] = workload.system // BLOCK * BLOCK
    lengths = (np.full(len(stage), length) for length in (isl, workload.osl))
    return OfferedLoad(*lengths, arrival=np.concatenate(arrivals), cached=cached), stage


@cache
def rows(use: str) -> tuple[Mapping[str, str], ...]:
    """Return the stages with this use."""
    with STAGES.open(encoding="utf-8", newline="") as lines:
        return tuple(row for row in csv.DictReader(lines) if row["use"] == use)


def predict(row: Mapping[str, str], model: PerformanceModel, *, reuse: bool = True) -> dict[str, tuple[float, ...]]:
    """Predict the metrics of a stage: the value, and the lower and the upper end of its 80 % interval, ms.

    The interval is what a faster and a slower engine would give, off by the model's usual error in ITL: near saturation
    queues make more of it. TTFT is also off by what its own usual error exceeds that.

    Args:
        row: of `rows`; the measured figures are not read.
        model: parameters.
        reuse: whether the prefix cache is used, as in the benchmark.
    """
    qformat = QFormat.FP8 if row["precision"] == "fp8" else QFormat.NONE
    shape = replace(model_named(row["model"]), in_16_bit=IN_16_BIT.get(row["model"], {}))
    setup = Setup(shape, gpu_named(row["gpu"]), qformat, tp=int(row["tp"]), runs_on=FRAMEWORK)
    load = (row["workload"], int(row["max_num_batched_tokens"]), reuse)
    costed = model.cost(setup)
    # vLLM's attention in chunks has no CUDA graphs (`ChunkedLocalAttentionBuilder`, vllm-project/vllm#26034 and #28739)
    apart = PIECEWISE_S * shape.num_hidden_layers * shape.chunked
    cost = replace(costed.cost, fixed=costed.cost.fixed + apart)
    off = NORMAL_80 * costed.spread["itl"]
    value, low, high = (
        _simulated(setup, cost.slower(float(np.exp(log))), *load)[int(row["stage"])] for log in (0.0, -off, off)
    )
    own = NORMAL_80 * np.sqrt(max(costed.spread["ttft"] ** 2 - costed.spread["itl"] ** 2, 0.0))
    wide = {name: float(np.exp(own)) if name.startswith("ttft") else 1.0 for name in METRICS}
    return {name: (value[name], low[name] / wide[name], high[name] * wide[name]) for name in METRICS}


def _simulated(
    setup: Setup, cost: IterationCost, workload: str, tokens: int, reuse: bool
) -> tuple[Mapping[str, float], ...]:
    """Return the metrics of every stage of a workload."""
    memory = device_memory(setup.sizes(max_batch_size=SLOTS, max_num_tokens=tokens), setup.gpu.reported_bytes)
    kv_tokens = memory.kv_tokens - (WORKLOADS[workload].prompts * WORKLOADS[workload].isl) * reuse
    return _served(workload, tokens, int(kv_tokens) // BLOCK, setup.runs_on, cost, reuse)


@lru_cache(maxsize=8)
def _served(
    name: str, tokens: int, blocks: int, framework: Framework, cost: IterationCost, reuse: bool
) -> tuple[Mapping[str, float], ...]:
    workload = WORKLOADS[name]
    load, stage = offered(workload)
    if not reuse:
        load = OfferedLoad(load.isl, load.osl, arrival=load.arrival)
    engine = SchedulerLimits(
        "inflight_chunked",
        slots=SLOTS,
        max_num_tokens=tokens,
        admission=framework.admission,
        kv_blocks=blocks,
        tokens_per_block=BLOCK,
        ahead=framework.ahead,
    )
    requests = simulate(engine, load, cost).requests
    times = [(each - requests.arrival + FRONT_END_S) * 1e3 for each in (requests.first_token, requests.end)]
    return tuple(_metrics(*(each[stage == one] for each in times), workload.osl) for one in range(stage[-1] + 1))


def _metrics(ttft: Any, e2e: Any, osl: int) -> Mapping[str, float]:
    return {
        "ttft_mean": float(ttft.mean()),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        "e2e_mean": float(e2e.mean()),
        "e2e_p99": float(np.quantile(e2e, 0.99)),
        "itl_mean": float(e2e.mean() - ttft.mean()) / (osl - 1),
    }
