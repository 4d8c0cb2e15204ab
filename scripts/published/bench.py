"""Predict many published cases at once by formula alone: one function for fitting and for predicting."""

import csv
import gzip
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.domain.summary import ordered, percentile, rates
from pipelines.predict.performance.memory import device_memory
from pipelines.predict.performance.physics import Facts, iteration_cost
from pipelines.predict.performance.placement import full_load_rate
from pipelines.predict.simulator.interface import Admission, OfferedLoad, Policy, SchedulerLimits, request_columns
from pipelines.predict.simulator.run import IterationCost, simulate
from scripts.published.cases import PublishedCase

# Simulate loads as published benchmarks generated them, because the protocol affects the numbers.

MOST_REQUESTS = 6000
"""Requests of one batch that are simulated: from then on the rate hardly changes."""
BLOCK = 32
"""Tokens of a KV block."""
NIM_TOKEN_S = 8e-6
"""Seconds that NIM's front end takes per token of a prompt: 5,000 tokens wait 407 ms with one user, of which the fitted
prefill explains about 350, while 500 tokens of an 8B model leave no room for that much (see `EXPECTED` in
scripts/published_fit/priors.py)."""
TRACES = Path(__file__).parent / "data" / "traces.csv.gz"
"""Arrivals and lengths of the replayed ShareGPT requests, by tokenizer (casys-kaist/LLMServingSim, requests.jsonl)."""
TRACED = {"rtx_4090": (256, 41_408), "rtx_pro_6000": (128, None)}
"""max_num_seqs of the engines that replayed them, and tokens of the KV cache where stated (meta.json there)."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """Protocol by which a closed loop was measured.

    Attributes:
        per_user: requests measured per user, including the burst at the start.
        shortest: lengths are uniform between this share of the nominal ones and the nominal ones.
        policy: batching policy of the engine.
        admission: admission policy of the engine.
        max_num_tokens: tokens of an iteration.
        in_turn: whether one front end takes the requests in turn, so that the client delay counts once per user.
        always_busy: rates are for a window without start and end; a user then waits half the client delay on average.
        token_overhead_s: network and tokenizer, per prompt token, added to TTFT.
        ahead: whether a batch is chosen while the previous iteration runs.
        slots: requests scheduled together.
        patience: iterations that the first prompt waits for others, as long as they would not fill an iteration
            (`batch_wait_timeout_iters` of TensorRT-LLM).
    """

    per_user: int
    shortest: float
    policy: Policy
    admission: Admission
    max_num_tokens: int
    in_turn: bool = False
    always_busy: bool = False
    token_overhead_s: float = 0.0
    ahead: bool = False
    slots: int = 1024
    patience: int = 0


ONE_LESS = {("TensorRT-LLM 1.0.0rc3", "llama-3.1-8b"): 1}
"""Slots that an engine has less than there are users, as the errors say: in these 88 loops TTFT grows with the output
tokens and falls with the users, by the time of an answer over the users. So one request always waits for a slot (up to
32 users: mean error of 12 instead of 33 %, less the bias)."""
PER_USER = {"SGLang 0.5.1.post1": 2}
"""Requests measured per user, where it is not 10, as the errors say: with 10, TTFT of all 44 configurations is
predicted at less than half, because only the first requests wait for one another."""


def protocol_of(case: PublishedCase) -> Protocol:
    """Return the protocol of a source: from its scripts where they are public, otherwise from what its errors say.

    InferenceMAX: ten requests per user of 80 to 100 % of the lengths, all users from the start; vLLM with
    `max_num_seqs` = users, `max_num_batched_tokens` = 8,192 and asynchronous scheduling; TensorRT-LLM with
    `max_num_tokens` = 16,384, whole prompts, and for 1,024 in and out on fewer than 8 GPUs prompts that wait up to 20
    iterations for others (benchmarks/70b_*.sh of SemiAnalysisAI/InferenceMAX, October 2025).

    NVIDIA's runs for aiconfigurator: its generator lets an iteration take one prompt beside a token of each user;
    it adds 1,500 tokens in some versions, but with them TTFT is predicted a tenth longer than measured.

    NIM's published rates equal its users over the time of a request within 0.6 %, and the difference grows with the
    users, up to 3 ms for each: they include no start and no end, and a front end passes requests on one at a time.
    """
    framework = case.setup.runs_on
    if framework.family == "nim":
        return Protocol(
            5, 1.0, "inflight", framework.admission, 8192, in_turn=True, always_busy=True, token_overhead_s=NIM_TOKEN_S
        )
    if not case.randomised:
        per_user, tokens = PER_USER.get(framework.name, 10), case.isl + case.users
        slots = max(case.users - ONE_LESS.get((framework.name, case.setup.model.name), 0), 1)
        return Protocol(
            per_user, 1.0, "inflight_chunked", "MAX_UTILIZATION", tokens, ahead=framework.ahead, slots=slots
        )
    if framework.family == "vllm":
        return Protocol(10, 0.8, "inflight_chunked", "MAX_UTILIZATION", 8192, ahead=True, slots=case.users)
    waits = case.isl == case.osl == 1024 and case.setup.tp < 8
    return Protocol(10, 0.8, "inflight", "MAX_UTILIZATION", 16384, ahead=framework.ahead, patience=20 if waits else 0)


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Result of a load: seconds per request without the network, and overall rates.

    Attributes:
        ttft: float64[requests].
        itl: float64[requests]; NaN below two tokens.
        e2e: float64[requests].
        output_tok_s: over the whole run.
        requests_s: over the whole run.
        cycle_s: mean time from a user's request to the next one, without the network, between start and end of the
            run; rates are then users over it (Little's law). None: rates are those of the run.
    """

    ttft: Any
    itl: Any
    e2e: Any
    output_tok_s: float
    requests_s: float
    cycle_s: float | None = None


def closed_loop(case: PublishedCase, cost: IterationCost, delay: float, kv_tokens: int) -> LoopResult:
    """Run the closed loop of a case; `delay` is the client's, or each user's if a front end takes them in turn."""
    protocol = protocol_of(case)
    count = max(protocol.per_user * case.users, 2)
    draw = np.random.default_rng(case.users).uniform(protocol.shortest, 1.0, (2, count))
    isl = np.maximum(np.rint(case.isl * draw[0]), 1).astype(np.int64)
    osl = np.maximum(np.rint(case.osl * draw[1]), 1).astype(np.int64)
    delay *= case.users if protocol.in_turn else 1
    load = OfferedLoad(isl, osl, users=case.users, client_delay=delay)
    return _serve(protocol, load, cost, kv_tokens)


def burst(case: PublishedCase, cost: IterationCost, slots: int, kv_tokens: int) -> float:
    """Return the output tokens per second of a run at full load whose requests are all sent at once.

    Pipeline stages and attention data parallel ranks take them in turn, and are alike. A run of few requests never
    reaches the rate of an engine that always has work: its last wave does not fill the batch.
    """
    setup = case.setup
    count = min(-(-case.requests // setup.lanes), MOST_REQUESTS)
    blocks = max(kv_tokens, case.isl + case.osl + BLOCK) // BLOCK
    engine = SchedulerLimits(
        "inflight_chunked", slots=slots, max_num_tokens=int(MAX_NUM_TOKENS), admission=setup.runs_on.admission,
        kv_blocks=blocks, tokens_per_block=BLOCK, ahead=setup.runs_on.ahead,
    )  # fmt: skip
    load = OfferedLoad(np.full(count, case.isl), np.full(count, case.osl), arrival=np.zeros(count))
    return count * case.osl / simulate(engine, load, cost).end * setup.lanes * case.instances


def trace(case: PublishedCase, cost: IterationCost, kv_tokens: int) -> LoopResult:
    """Replay the requests of a trace; instances and attention data parallel ranks take them in turn, and are alike."""
    servers = case.instances * case.setup.lanes
    arrival, isl, osl = (column[::servers] for column in traced(case.setup.model.name))
    slots, stated = TRACED[case.setup.gpu.name]
    ahead = case.setup.runs_on.ahead
    protocol = Protocol(1, 1.0, "inflight_chunked", "MAX_UTILIZATION", 2048, ahead=ahead, slots=slots)
    return _serve(protocol, OfferedLoad(isl, osl, arrival=arrival), cost, stated or kv_tokens)


@cache
def traced(model: str) -> tuple[Any, Any, Any]:
    """Return arrivals (s), input and output tokens of the requests that were replayed to a model."""
    dataset = "qwen3" if model.startswith("qwen3") else model
    with gzip.open(TRACES, "rt", encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["dataset"] == dataset]
    isl, osl = (np.array([int(row[name]) for row in rows]) for name in ("isl", "osl"))
    return np.array([float(row["arrival_s"]) for row in rows]), isl, osl


def _serve(protocol: Protocol, load: OfferedLoad, cost: IterationCost, kv_tokens: int) -> LoopResult:
    longest = int((load.isl + load.osl).max())
    engine = SchedulerLimits(
        policy=protocol.policy,
        slots=protocol.slots,
        max_num_tokens=protocol.max_num_tokens,
        admission=protocol.admission,
        kv_blocks=max(kv_tokens // BLOCK, longest // BLOCK + 2),
        tokens_per_block=BLOCK,
        ahead=protocol.ahead,
    )
    requests = request_columns(simulate(engine, load, cost).requests)
    totals, e2e = rates(requests, requests.whole()), requests.e2e()
    middle = e2e[load.users : -load.users]
    # others come while the first one waits, on average for half of its time
    others = protocol.patience * load.users / load.osl.mean()
    held = protocol.patience * (1 + others / 2) / (1 + others) * np.nanmean(requests.itl())
    return LoopResult(
        ttft=requests.ttft() + held,
        itl=requests.itl(),
        e2e=e2e,
        output_tok_s=totals.output_tokens_per_s,
        requests_s=totals.requests_per_s,
        cycle_s=float(middle.mean()) + load.client_delay / 2 if protocol.always_busy else None,
    )


SIMULATED = ("closed_loop_concurrency", "open_loop_trace")
"""Modes that need the simulator; the others have closed forms."""
OFFLINE = ("inflight_maxload", "mlperf_offline")
"""Modes without a server."""
LIMITS = {  # model: TPOT of server and interactive, p99, ms
    "llama-2-70b": (200, 40),
    "llama-3.1-405b": (175, 80),
    "llama-3.1-8b": (100, 30),
    "mixtral-8x7b": (200, 200),
}
"""Latency limits of MLPerf Inference (mlcommons/inference, v5.1); submitters choose the rate, mostly by TPOT."""
MEAN_OF_P99 = 0.85
"""Mean TPOT relative to its 99th percentile, in the public results."""
P99_OF_MEAN = 2.1
"""99th percentile of TTFT relative to its mean, in the public results."""
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
        slower: factors on the time of an iteration in simulated modes, float64[cases]; None is 1.
    """

    def __init__(
        self, cases: Sequence[PublishedCase], tell: Callable[[], None] = lambda: None, slower: Any | None = None
    ) -> None:
        self.cases, self.tell = list(cases), tell
        self.slower = np.ones(len(cases)) if slower is None else slower
        self.served: dict[Any, LoopResult] = {}
        self.within: dict[Any, tuple[float, float]] = {}
        setups = [case.setup for case in cases]
        items = [setup.facts() for setup in setups]
        columns = {each.name: np.array([getattr(item, each.name) for item in items], float) for each in fields(Facts)}
        self.facts = Facts(**columns)
        # the labels of the setup, and whether a server was involved
        self.labels = [
            (*case.setup.labels, *([f"offline={case.setup.runs_on.family}"] if case.mode in OFFLINE else []))
            for case in cases
        ]
        sizes = [setup.sizes(max_batch_size=LOGIT_ROWS) for setup in setups]
        memory = [device_memory(size, s.gpu.reported_bytes) for size, s in zip(sizes, setups, strict=True)]
        self.kv_tokens = np.array([max(each.kv_tokens, 1) for each in memory], float)
        self.isl, self.osl, self.batch, self.instances, self.gpus = (
            np.array([getattr(case, name) for case in cases], float)
            for name in ("isl", "osl", "batch", "instances", "gpus")
        )
        self.lanes = np.array([setup.lanes for setup in setups], float)
        self.mode = np.array([case.mode for case in cases])
        self.metric = np.array([case.metric for case in cases])

    def log_predicted(self, values: Mapping[str, Any]) -> Any:
        """Return the log of each case's metric in its unit, float64[cases], for parameters with one value per case."""
        cost = iteration_cost(self.facts, values)
        slots = self.slots(values)
        rate = full_load_rate(cost, self.isl, self.osl, slots, MAX_NUM_TOKENS) * self.lanes * self.instances
        full = self._of_metric(output_tok_s=rate, output_tok_s_per_gpu=rate / self.gpus, requests_s=rate / self.osl)
        predicted = np.where(self.mode == "static_batch", self._static(cost), full)
        for index, case in enumerate(self.cases):
            if case.mode in ("mlperf_server", "mlperf_interactive"):
                predicted[index] = self._mlperf(index, cost, slots)
        for index, case in enumerate(self.cases):
            if case.requests and case.mode == "inflight_maxload":
                kv_tokens = int(self.kv_tokens[index] * values["kv_share"][index])
                one = burst(case, one_of(cost, index), int(values["slots"][index]), kv_tokens)
                of_metric = {"output_tok_s": 1, "output_tok_s_per_gpu": case.gpus, "requests_s": case.osl}
                predicted[index] = one / of_metric[case.metric]
        self._simulated(cost, values, predicted)
        return np.log(predicted)

    def _static(self, cost: IterationCost) -> Any:
        batch, isl = np.maximum(self.batch, 1), self.isl
        # a token of a prompt attends to half of it on average; a decode step goes from isl to isl + osl
        prefill = cost.seconds(batch * isl, batch, q_ctx=batch * isl * isl / 2.0, prefills=batch)
        context = isl + self.osl / 2.0
        windowed = np.minimum(context, np.where(np.asarray(cost.window) > 0, cost.window, context))
        decode = cost.seconds(batch, batch, kv=batch * context, kv_window=batch * windowed)
        splitwise = [case.source == "splitwise-sim" for case in self.cases]
        answered = np.where(splitwise, np.minimum(self.osl, ANSWER_TOKENS), self.osl)
        rate = batch * self.osl / (prefill + (self.osl - 1) * decode)
        whole = np.array([case.setup.runs_on.name in STATIC_TOTALS for case in self.cases])
        return self._of_metric(
            ttft_ms=1e3 * prefill,
            prefill_batch_ms=1e3 * prefill,
            tpot_ms=1e3 * decode,
            e2e_ms=1e3 * (prefill + (answered - 1) * decode),
            output_tok_s=rate,
            output_tok_s_per_gpu=rate / np.where(whole, 1, self.gpus),
        )

    def slots(self, values: Mapping[str, Any]) -> Any:
        """Return the number of requests in an engine at full load."""
        by_memory = self.kv_tokens * values["kv_share"] / (self.isl + self.osl)
        return np.clip(by_memory, 1.0, values["slots"])

    def _of_metric(self, **columns: Any) -> Any:
        values = np.ones(len(self.cases))
        for metric, column in columns.items():
            values = np.where(self.metric == metric, column, values)
        return values

    def _mlperf(self, index: int, cost: IterationCost, slots: Any) -> float:
        """Return the throughput at the largest batch whose mean TPOT stays under the limit."""
        case, one = self.cases[index], one_of(cost, index)
        server, interactive = LIMITS.get(case.setup.model.name, LIMITS["llama-2-70b"])
        tpot = server if case.mode == "mlperf_server" else interactive
        tpot_s, rate = self._within(case, one, float(slots[index]), 1e-3 * tpot * MEAN_OF_P99)
        if case.metric == "ttft_ms":
            return 1e3 * first_token(case, one, rate * tpot_s, rate / case.osl, tpot_s)
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

    def _simulated(self, cost: IterationCost, values: Mapping[str, Any], predicted: Any) -> None:
        for index, case in enumerate(self.cases):
            if case.mode not in SIMULATED:
                continue
            one = one_of(cost, index).slower(float(self.slower[index]))
            delay = float(values["client_delay"][index])
            kv = int(self.kv_tokens[index] * values["kv_share"][index])
            setup = case.setup
            key = (
                case.mode,
                case.isl,
                case.osl,
                case.users,
                case.note,
                kv,
                one,
                delay,
                setup.runs_on.name,
                setup.gpu.name,
            )
            if len(self.served) > REMEMBERED:
                self.served.clear()
            if key not in self.served:
                closed = case.mode == "closed_loop_concurrency"
                self.served[key] = closed_loop(case, one, delay, kv) if closed else trace(case, one, kv)
            self.tell()
            overhead = float(values["overhead_s"][index]) + protocol_of(case).token_overhead_s * case.isl
            if case.mode == "open_loop_trace":
                overhead = 0.0  # timed inside the engine
            predicted[index] = _metric(case, self.served[key], overhead)


def first_token(case: PublishedCase, cost: IterationCost, batch: float, rate: float, iteration: float) -> float:
    """Return the seconds to the first token of requests that come at random to an engine below its capacity.

    A request waits for the rest of the running iteration and then for its own, which its prompt makes longer; other
    prompts make either longer at random.

    Args:
        case: a row with the mean or the 99th percentile.
        cost: of an iteration.
        batch: decoding requests.
        rate: requests per second.
        iteration: mean seconds of one.
    """
    prompt = float(
        cost.seconds(batch + case.isl, batch + 1, q_ctx=case.isl**2 / 2, prefills=1) - cost.seconds(batch, batch)
    )
    prompts = rate * iteration * prompt**2  # variance of an iteration's time
    mean = (iteration + prompts / iteration) / 2 + iteration + prompt
    return mean * (P99_OF_MEAN if case.stat == "p99" else 1.0)


COST_FIELDS = tuple(each.name for each in fields(IterationCost))
MAX_NUM_TOKENS = 8192.0
"""Tokens of an iteration: the builder's default."""


def one_of(cost: IterationCost, index: int) -> IterationCost:
    """Return the cost of one of the stacked cases."""
    columns = {name: getattr(cost, name) for name in COST_FIELDS}
    one = {name: float(column if np.ndim(column) == 0 else column[index]) for name, column in columns.items()}
    return IterationCost(**{**one, "window": int(one["window"]), "chunk": int(one["chunk"])})  # type: ignore[arg-type]


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
