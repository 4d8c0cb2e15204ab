"""Sample the server's Prometheus page every second of a window: the state of KV cache and scheduler."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any

_PERIOD_S = 1.0
_FAMILIES = {
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block", "kv_cache_block_type"),
    "nv_trt_llm_runtime_memory_metrics": ("memory", "memory_type"),
    "nv_trt_llm_request_metrics": ("requests", "request_type"),
    "nv_trt_llm_inflight_batcher_metrics": ("batcher", "inflight_batcher_specific_metric"),
}
"""Family -> prefix of our names, label that distinguishes its series (TensorRT-LLM's custom metrics reporter)."""


def read_metrics(text: str) -> dict[str, float]:
    """Read the gauges of TensorRT-LLM's families from a Prometheus page, e.g. {"kv_cache_block_used": 12.0}.

    Series of several models or versions are summed.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name in _FAMILIES:
            prefix, label = _FAMILIES[family.name]
            for sample in family.samples:
                name = f"{prefix}_{sample.labels.get(label, 'unnamed')}"
                found[name] = found.get(name, 0.0) + sample.value
    return found


class MetricsWatch:
    """Samples the page in a thread of its own inside a `with` block."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._samples: list[dict[str, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.fault = ""
        """Why there are no values, for messages."""

    def __enter__(self) -> MetricsWatch:
        if self._url is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def summary(self) -> dict[str, Any]:
        """Return mean and maximum of every gauge over the samples, and the number of samples."""
        if not self._samples:
            return {"samples": 0} | ({"fault": self.fault} if self.fault else {})
        names = sorted(set().union(*self._samples))
        columns = {name: [sample[name] for sample in self._samples if name in sample] for name in names}
        gauges = {name: {"mean": sum(row) / len(row), "max": max(row)} for name, row in columns.items()}
        return {"samples": len(self._samples), **gauges}

    def _watch(self) -> None:
        while True:
            try:
                with urllib.request.urlopen(str(self._url), timeout=5) as page:
                    self._samples.append(read_metrics(page.read().decode()))
            except (OSError, ValueError) as error:  # URLError is an OSError; a page without metrics raises ValueError
                self.fault = f"{self._url}: {error}"
            if self._stop.wait(_PERIOD_S):
                return
