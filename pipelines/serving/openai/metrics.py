"""The service's metrics, with the names, labels and buckets of NVIDIA's trtllm-serve, which are vLLM's with one prefix.

Below its least edges there are more: a quantile within the first bucket is a point of the line from 0 to its edge.

Sources: `tensorrt_llm/metrics/collector.py`; `vllm/v1/metrics/loggers.py` for the gaps between tokens, which NVIDIA
leaves out; prometheus-fastapi-instrumentator, as vLLM uses it, for HTTP. One process serves, so one registry counts.
"""

import re
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from pipelines.domain.benchmark import NO_SLO, Slo
from pipelines.serving.openai.errors import ApiError

disable_created_metrics()  # type: ignore[no-untyped-call]  # omits a creation time per series
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
          2560)  # fmt: skip
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
         40, 80)  # fmt: skip
REQUEST_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
             120, 240, 480, 960, 1920, 7680)  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "OPTIONS")
ENGINE_STATES = {"scheduled": "num_requests_running", "waiting": "num_requests_waiting"}
"""State of the engine's requests in tritonserver's metrics -> name of the gauge."""
ENGINE_STATE = re.compile(r'^nv_trt_llm_request_metrics\{([^}]*model="tensorrt_llm"[^}]*)\} (\S+)', re.MULTILINE)


class ServiceMetrics:
    """Counters and histograms of one service."""

    def __init__(self, model: str, slo: Slo = NO_SLO) -> None:
        """Create them.

        Args:
            model: name that clients use, the label `model_name`.
            slo: limits that become edges of buckets, so that the answers within them can be counted.
        """
        self.registry = CollectorRegistry()
        label = {"model_name": model}

        def histogram(name: str, what: str, buckets: tuple[float, ...], metric: str = "") -> Histogram:
            edges = sorted({*buckets, *(limit for name, limit in slo.limits_s.items() if name == metric)})
            made = Histogram(f"trtllm_{name}_seconds", what, [*label], buckets=edges, registry=self.registry)
            return made.labels(**label)

        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(f"trtllm_{name}", what, [*label, *more], registry=self.registry)

        self.ttft = histogram("time_to_first_token", "From a request's arrival to its first token.", TTFT_S, "ttft")
        self.gap = histogram("inter_token_latency", "Between one token and the next.", ITL_S)
        self.itl = histogram("time_per_output_token", "Mean time per token of an answer after its first.", ITL_S, "itl")
        self.e2e = histogram("e2e_request_latency", "From a request's arrival to its last token.", REQUEST_S, "e2e")
        self.queue = histogram("request_queue_time", "In the engine's queue, as it says.", REQUEST_S)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.").labels(**label)
        self.generation_tokens = counter("generation_tokens", "Tokens of answers.").labels(**label)
        success = counter("request_success", "Finished answers.", "finished_reason")
        reasons = ("stop", "length", "tool_calls")
        self.success = {reason: success.labels(**label, finished_reason=reason) for reason in reasons}
        self._errors = counter("request_error", "Requests refused or failed.", "status", "reason")
        self._engine = {
            state: Gauge(f"trtllm_{name}", f"Requests of the engine, {state}.", [*label], registry=self.registry)
            for state, name in ENGINE_STATES.items()
        }
        self._up = Gauge("trtllm_backend_up", "Whether tritonserver gave its metrics.", registry=self.registry)
        labels = ["handler", "method", "status"]
        self._http = Counter("http_requests", "Requests by their status.", labels, registry=self.registry)
        self._label = label

    def answered(self, scope: Mapping[str, Any], status: int) -> None:
        """Count a request of an ASGI application; paths and methods that clients think up are one series."""
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._http.labels(handler=handler, method=method, status=status).inc()

    def failed(self, error: ApiError) -> None:
        """Count a request that was refused or failed, also in the middle of a stream."""
        self._errors.labels(**self._label, status=error.status, reason=error.code or error.kind).inc()

    def page(self, triton: str | None) -> str:
        """Return tritonserver's metrics, None if it does not respond, and the service's own, in Prometheus' format."""
        self._up.set(triton is not None)
        states = ENGINE_STATE.findall(triton or "")
        for state, gauge in self._engine.items():
            gauge.clear()
            if values := [float(value) for labels, value in states if f'request_type="{state}"' in labels]:
                gauge.labels(**self._label).set(sum(values))
        return (triton or "") + str(generate_latest(self.registry).decode())


class AnswerClock:
    """Measures one answer."""

    __slots__ = ("_first", "_last", "_metrics", "_started")

    def __init__(self, metrics: ServiceMetrics, started: float) -> None:
        """Take the time at which the request arrived, of `perf_counter`."""
        self._metrics, self._started = metrics, started
        self._first = self._last = 0.0

    def token(self) -> None:
        """Note that tokens of an answer that comes in parts have arrived."""
        now = perf_counter()
        if self._last:
            self._metrics.gap.observe(now - self._last)
        else:
            self._first = now
            self._metrics.ttft.observe(now - self._started)
        self._last = now

    def ended(self, prompt_tokens: int, output_tokens: int, finish_reason: str | None, queued_s: float | None) -> None:
        """Count the answer, or, without a finish reason, the tokens of one that failed or was given up.

        A further answer to the same prompt has none of its tokens. The time in the queue is None if it is not known.
        """
        metrics = self._metrics
        metrics.generation_tokens.inc(output_tokens)
        if output_tokens or finish_reason is not None:
            metrics.prompt_tokens.inc(prompt_tokens)
        if finish_reason is None:
            return
        metrics.success[finish_reason].inc()
        metrics.e2e.observe(perf_counter() - self._started)
        if self._last > self._first and output_tokens > 1:
            metrics.itl.observe((self._last - self._first) / (output_tokens - 1))
        if queued_s is not None:
            metrics.queue.observe(queued_s)
