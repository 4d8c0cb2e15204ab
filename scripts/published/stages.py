"""A public open-loop benchmark of vLLM: what was offered, and what the performance model predicts for it.

inference-sim measured 51 deployments of vLLM 0.15.1 (H100, A100, L40S) with inference-perf: 89 stages of one rate each.
`data/stages.csv` has their figures (use=judge, never fitted to) and those of seven further stages (use=fit), from which
the front end's time was taken. What was offered: `workloads.yaml` of inference-sim/tektonc-data-collection@2a7cbcd4.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.domain.formats import QFormat
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.memory import device_memory
from pipelines.predict.performance.models import model_named
from pipelines.predict.performance.performance import PerformanceModel, Setup
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import simulate

STAGES = Path(__file__).parent / "data" / "stages.csv"
METRICS = ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99", "itl_mean")
"""Columns with figures, ms. ITL is (mean E2E - mean TTFT) / (mean output tokens - 1), as its authors compute it."""
FRAMEWORK = "vLLM 0.15.1"
FRONT_END_S = 0.006
"""Seconds from client to scheduler and back: HTTP, tokenizer, detokenizer; fitted to the stages with use=fit."""
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
    isl = workload.system + workload.question
    cached = np.full(len(stage), (isl - 1) // BLOCK * BLOCK)
    cached[: workload.prompts] = workload.system // BLOCK * BLOCK
    lengths = (np.full(len(stage), length) for length in (isl, workload.osl))
    return OfferedLoad(*lengths, arrival=np.concatenate(arrivals), cached=cached), stage


@cache
def rows(use: str) -> tuple[Mapping[str, str], ...]:
    """Return the stages with this use."""
    with STAGES.open(encoding="utf-8", newline="") as lines:
        return tuple(row for row in csv.DictReader(lines) if row["use"] == use)


def predict(row: Mapping[str, str], model: PerformanceModel, *, reuse: bool = True) -> dict[str, Any]:
    """Predict the metrics of a stage, ms, and under "spread" the usual deviation of log(predicted / measured) of each.

    Args:
        row: of `rows`; the measured figures are not read.
        model: parameters.
        reuse: whether the prefix cache is used, as in the benchmark.
    """
    qformat = QFormat.FP8 if row["precision"] == "fp8" else QFormat.NONE
    gpu = gpu_named(row["gpu"])
    setup = Setup(model_named(row["model"]), gpu, qformat, tp=int(row["tp"]), framework=FRAMEWORK)
    costed, workload = model.cost(setup), WORKLOADS[row["workload"]]
    load, stage = offered(workload)
    if not reuse:
        load = OfferedLoad(load.isl, load.osl, arrival=load.arrival)
    tokens = int(row["max_num_batched_tokens"])
    memory = device_memory(setup.sizes(max_batch_size=SLOTS, max_num_tokens=tokens), gpu.reported_bytes)
    prompts = workload.prompts * (workload.system + workload.question)
    engine = SchedulerLimits(
        "inflight_chunked",
        slots=SLOTS,
        max_num_tokens=tokens,
        admission=setup.runs_on.admission,
        kv_blocks=int(memory.kv_tokens - prompts * reuse) // BLOCK,
        tokens_per_block=BLOCK,
        ahead=setup.runs_on.ahead,
    )
    requests = simulate(engine, load, costed.cost).requests
    at = stage == int(row["stage"])
    ttft, e2e = ((each - requests.arrival + FRONT_END_S)[at] * 1e3 for each in (requests.first_token, requests.end))
    spread = costed.spread
    return {
        "ttft_mean": ttft.mean(),
        "ttft_p99": np.quantile(ttft, 0.99),
        "e2e_mean": e2e.mean(),
        "e2e_p99": np.quantile(e2e, 0.99),
        "itl_mean": (e2e.mean() - ttft.mean()) / (workload.osl - 1),
        "spread": {name: spread["ttft" if name.startswith("ttft") else "itl"] for name in METRICS},
    }
