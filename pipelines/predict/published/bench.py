"""Predict many published cases at once by formula alone: one function for fitting and for predicting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from pipelines.domain.summary import ordered, percentile
from pipelines.predict.performance.full_load import full_load_rate
from pipelines.predict.performance.memory import device_memory
from pipelines.predict.performance.physics import Facts, facts, iteration_cost
from pipelines.predict.published.cases import PublishedCase
from pipelines.predict.published.closed_loop import LoopResult, closed_loop, protocol_of, trace
from pipelines.predict.published.protocols import decode_seconds, prefill_seconds
from pipelines.predict.simulator.cost import IterationCost

SIMULATED = ("closed_loop_concurrency", "open_loop_trace")
"""Modes that need the simulator; the others have closed forms."""
OFFLINE = ("inflight_maxload", "mlperf_offline")
"""Modes without a server."""
LIMITS = {  # model: (server TTFT, TPOT, interactive TTFT, TPOT), p99, ms
    "llama-2-70b": (2000, 200, 450, 40),
    "llama-3.1-405b": (6000, 175, 4500, 80),
    "llama-3.1-8b": (2000, 100, 500, 30),
    "mixtral-8x7b": (2000, 200, 2000, 200),
}
"""Latency limits of MLPerf Inference (mlcommons/inference, v5.1)."""
TTFT_OF_LIMIT = {"mean": 0.15, "p99": 0.35}
"""TTFT of a submission relative to its limit; submitters choose the rate, mostly by TPOT."""
MEAN_OF_P99 = 0.85
"""Mean TPOT relative to its 99th percentile, in the public results."""
STATIC_TOTALS = ("TensorRT-LLM 0.5.0",)
"""Versions whose column "per GPU" holds the tokens of all GPUs: read so, the rates of 4 and 8 GPUs are consistent."""
ANSWER_TOKENS = 650
"""Tokens at which Splitwise's end-to-end times of longer outputs level off, because the model's answer ended."""
REMEMBERED = 4000
"""Number of simulations cached: two steps of a fit's differences share those that a parameter does not affect."""
LOGIT_ROWS = 128
"""Requests whose logits the runtime holds when it sizes the KV pool (tuned engines, PyTorch runtimes)."""


class StackedCases:
    """Cases stacked into arrays.

    Args:
        cases: at least one.
        tell: called after each case of a simulated mode.
    """

    def __init__(self, cases: Sequence[PublishedCase], tell: Callable[[], None] = lambda: None) -> None:
        self.cases, self.tell = list(cases), tell
        self.served: dict[Any, LoopResult] = {}
        self.within: dict[Any, tuple[float, float]] = {}
        setups = [case.setup for case in cases]
        self.facts = _stacked(
            [facts(s.model, s.gpu, s.qformat, s.kv_format, tp=s.tp, pp=s.pp, sparse=s.sparse) for s in setups]
        )
        self.labels = [_labels(case) for case in cases]
        sizes = [setup.sizes(max_batch_size=LOGIT_ROWS) for setup in setups]
        memory = [device_memory(size, s.gpu.reported_bytes) for size, s in zip(sizes, setups, strict=True)]
        self.kv_tokens = np.array([max(each.kv_tokens, 1) for each in memory], float)
        self.isl, self.osl, self.batch, self.instances, self.gpus = (
            np.array([getattr(case, name) for case in cases], float)
            for name in ("isl", "osl", "batch", "instances", "gpus")
        )
        self.mode = np.array([case.mode for case in cases])
        self.metric = np.array([case.metric for case in cases])

    def log_predicted(self, values: Mapping[str, Any]) -> Any:
        """Return the log of each case's metric in its unit, float64[cases], for parameters with one value per case."""
        cost = iteration_cost(self.facts, values)
        found = np.where(self.mode == "static_batch", self._static(cost), self._full_load(cost, values))
        slots = self.slots(values)
        for index, case in enumerate(self.cases):
            if case.mode in ("mlperf_server", "mlperf_interactive"):
                found[index] = self._mlperf(index, cost, slots)
        self._simulated(cost, values, found)
        return np.log(found)

    def _static(self, cost: IterationCost) -> Any:
        batch = np.maximum(self.batch, 1)
        prefill = prefill_seconds(cost, self.isl, batch)
        decode = decode_seconds(cost, self.isl, self.osl, batch)
        answered = np.array([min(case.osl, _answer(case)) for case in self.cases])
        rate = batch * self.osl / (prefill + (self.osl - 1) * decode)
        whole = np.array([case.setup.framework in STATIC_TOTALS for case in self.cases])
        by_metric = {
            "ttft_ms": 1e3 * prefill,
            "prefill_batch_ms": 1e3 * prefill,
            "tpot_ms": 1e3 * decode,
            "e2e_ms": 1e3 * (prefill + (answered - 1) * decode),
            "output_tok_s": rate,
            "output_tok_s_per_gpu": rate / np.where(whole, 1, self.gpus),
        }
        return self._of_metric(by_metric)

    def slots(self, values: Mapping[str, Any]) -> Any:
        """Return the number of requests in an engine at full load."""
        by_memory = self.kv_tokens * values["kv_share"] / (self.isl + self.osl)
        return np.clip(by_memory, 1.0, values["slots"])

    def _full_load(self, cost: IterationCost, values: Mapping[str, Any]) -> Any:
        rate = full_load_rate(cost, self.isl, self.osl, self.slots(values), MAX_NUM_TOKENS) * self.instances
        by_metric = {
            "output_tok_s": rate,
            "output_tok_s_per_gpu": rate / self.gpus,
            "requests_s": rate / self.osl,
        }
        return self._of_metric(by_metric)

    def _of_metric(self, by_metric: Mapping[str, Any]) -> Any:
        found = np.ones(len(self.cases))
        for metric, column in by_metric.items():
            found = np.where(self.metric == metric, column, found)
        return found

    def _mlperf(self, index: int, cost: IterationCost, slots: Any) -> float:
        """Return the throughput at the largest batch whose mean TPOT stays under the limit."""
        case, one = self.cases[index], one_of(cost, index)
        server_ttft, server_tpot, ttft, tpot = LIMITS.get(case.setup.model.name, LIMITS["llama-2-70b"])
        if case.mode == "mlperf_server":
            ttft, tpot = server_ttft, server_tpot
        if case.metric == "ttft_ms":
            return ttft * TTFT_OF_LIMIT["p99" if case.stat == "p99" else "mean"]
        tpot_s, rate = self._within(case, one, float(slots[index]), 1e-3 * tpot * MEAN_OF_P99)
        if case.metric == "tpot_ms":
            return 1e3 * tpot_s / (MEAN_OF_P99 if case.stat == "p99" else 1)
        total = rate * case.instances
        return total / case.osl if case.metric == "requests_s" else total

    def _within(self, case: PublishedCase, cost: IterationCost, most: float, limit: float) -> tuple[float, float]:
        """Return mean seconds per token and tokens per second at the largest batch that stays under the limit."""
        key = (case.isl, case.osl, cost, most, limit)
        if key not in self.within:
            batch = np.geomspace(1, max(most, 1.001), 64)
            rate = full_load_rate(cost, case.isl, case.osl, batch, MAX_NUM_TOKENS)
            good = np.flatnonzero(batch / rate <= limit)
            best = int(good[-1]) if len(good) else 0
            self.within[key] = float(batch[best] / rate[best]), float(rate[best])
        return self.within[key]

    def _simulated(self, cost: IterationCost, values: Mapping[str, Any], found: Any) -> None:
        for index, case in enumerate(self.cases):
            if case.mode not in SIMULATED:
                continue
            one, delay = one_of(cost, index), float(values["client_delay"][index])
            kv = int(self.kv_tokens[index] * values["kv_share"][index])
            key = (case.mode, case.isl, case.osl, case.users, case.note, kv, one, delay)
            if len(self.served) > REMEMBERED:
                self.served.clear()
            if key not in self.served:
                closed = case.mode == "closed_loop_concurrency"
                self.served[key] = closed_loop(case, one, delay, kv) if closed else trace(case, one, kv)
            self.tell()
            overhead = float(values["overhead_s"][index]) + protocol_of(case).token_overhead_s * case.isl
            found[index] = _metric(case, self.served[key], overhead)


COST_FIELDS = tuple(each.name for each in fields(IterationCost))
MAX_NUM_TOKENS = 8192.0
"""Tokens of an iteration: the builder's default."""


def one_of(cost: IterationCost, index: int) -> IterationCost:
    """Return the cost of one of the stacked cases."""
    columns = ((name, getattr(cost, name)) for name in COST_FIELDS)
    one = {name: float(column if np.ndim(column) == 0 else column[index]) for name, column in columns}
    return IterationCost(**{**one, "window": int(one["window"])})  # type: ignore[arg-type]


def _labels(case: PublishedCase) -> tuple[str, ...]:
    """Return the parameter labels of a case: those of the setup, and whether a server was involved."""
    labels = case.setup.labels
    return (*labels, f"offline={case.setup.runs_on.family}") if case.mode in OFFLINE else labels


def _metric(case: PublishedCase, served: LoopResult, overhead: float) -> float:
    tokens, requests = served.output_tok_s, served.requests_s
    if served.cycle_s is not None:
        requests = case.users / (served.cycle_s + overhead)
        tokens = requests * case.osl
    if case.metric == "output_tok_s":
        return tokens * case.instances
    if case.metric == "output_tok_s_per_gpu":
        return tokens * case.instances / case.gpus
    if case.metric == "requests_s":
        return requests * case.instances
    times = {"ttft_ms": served.ttft, "tpot_ms": served.itl, "itl_ms": served.itl, "e2e_ms": served.e2e}[case.metric]
    added = 0.0 if case.metric in ("tpot_ms", "itl_ms") else overhead
    return 1e3 * (_statistic(times, case.stat) + added)


def _statistic(times: Any, stat: str) -> float:
    if stat == "median":
        return percentile(ordered(times), 0.5)
    if stat.startswith("p") and stat[1:].isdigit():
        return percentile(ordered(times), int(stat[1:]) / 100)
    return float(np.nanmean(times))


def _answer(case: PublishedCase) -> int:
    return ANSWER_TOKENS if case.source == "splitwise-sim" else case.osl


def _stacked(items: Sequence[Facts]) -> Facts:
    return Facts(**{each.name: np.array([getattr(item, each.name) for item in items], float) for each in fields(Facts)})
