"""Statistics of a running engine, under the metric families and labels of TensorRT-LLM's backend in Prometheus."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.engines.openvino.memory import KV_BLOCK_TOKENS, blocks_of
from pipelines.engines.openvino.sequences import Sequence

LENGTH_BUCKETS = (10, 50, 100, 500, 1000)

GAUGES: dict[str, tuple[str, str]] = {
    "nv_trt_llm_request_metrics": ("request_type", "Requests by state"),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", "Memory of the engine's process, bytes"),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", "Blocks of the paged KV cache"),
    "nv_trt_llm_inflight_batcher_metrics": ("inflight_batcher_specific_metric", "In-flight batching"),
    "nv_trt_llm_general_metrics": ("general_type", "Iterations of the engine"),
}
"""Family -> (its label, help)."""

HISTOGRAMS = {"nv_llm_input_token_len": "total_input_tokens", "nv_llm_output_token_len": "total_output_tokens"}
"""Family -> value of its label `response_metric_type`."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Statistics at one moment.

    Attributes:
        gauges: family -> label value -> number.
        lengths: (input tokens, output tokens) of the requests that ended since the last snapshot.
    """

    gauges: dict[str, dict[str, float]]
    lengths: list[tuple[int, int]]


class EngineCounters:
    """Counts the work of the engine; `snapshot` may be called from another thread."""

    def __init__(self, max_blocks: int, max_requests: int) -> None:
        self.max_blocks, self._max_requests = max_blocks, max_requests
        self._iterations = 0
        self._reused = 0
        self._lengths: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def iteration(self) -> None:
        """Count an iteration."""
        self._iterations += 1

    def finished(self, sequence: Sequence) -> None:
        """Count a sequence that has ended."""
        with self._lock:
            self._reused += sequence.kv.reused
            self._lengths.append((len(sequence.request.prompt), len(sequence.tokens)))

    def snapshot(self, waiting: int, running: int, context: int, cache_percent: float) -> EngineSnapshot:
        """Return all values.

        Args:
            waiting: sequences without a slot.
            running: sequences with a slot.
            context: running sequences that have no first token yet.
            cache_percent: percentage of the KV cache in use.
        """
        with self._lock:
            lengths, self._lengths = self._lengths, []
        used = round(self.max_blocks * cache_percent / 100)
        gauges: dict[str, dict[str, float]] = {
            "nv_trt_llm_request_metrics": {
                "active": waiting + running,
                "max": self._max_requests,
                "scheduled": running,
                "context": context,
                "waiting": waiting,
            },
            "nv_trt_llm_runtime_memory_metrics": {"cpu": resident_bytes(), "gpu": 0, "pinned": 0},
            "nv_trt_llm_kv_cache_block_metrics": {
                "max": self.max_blocks,
                "free": self.max_blocks - used,
                "used": used,
                "tokens_per": KV_BLOCK_TOKENS,
                "reused": self._reused,
                "fraction": cache_percent / 100,
            },
            "nv_trt_llm_inflight_batcher_metrics": {
                "total_context_tokens": sum(isl for isl, _ in lengths),
                "generation_requests": running - context,
                "micro_batch_id": 0,
                "paused_requests": 0,
            },
            "nv_trt_llm_general_metrics": {"timestamp": time.time_ns() // 1000, "iteration_counter": self._iterations},
        }
        return EngineSnapshot(gauges, lengths)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class KvLedger:
    """Estimates which prompt blocks the paged cache still holds; openvino_genai does not report it.

    It keeps the last `max_blocks` full blocks of ended sequences, like the cache, which frees the oldest first. A
    count from here is therefore an estimate, exact as long as the cache is not under pressure.
    """

    def __init__(self, max_blocks: int, *, reuse: bool) -> None:
        """Start empty; without `reuse` nothing is ever found."""
        self._max_blocks, self._reuse = max_blocks, reuse
        self._known: OrderedDict[int, None] = OrderedDict()

    def start(self, sequence: Sequence) -> None:
        """Record the blocks that a sequence needs, and how many of them are in the cache already."""
        prompt = sequence.engine_prompt.tolist()
        reused = 0
        for block in self._blocks(prompt[:-1]):  # the last token is always computed
            if block not in self._known:
                break
            reused += 1
        sequence.kv.reused = reused
        sequence.kv.new = blocks_of(len(prompt)) - reused

    def end(self, sequence: Sequence) -> None:
        """Record the blocks that an ended sequence leaves in the cache."""
        everything = [*sequence.engine_prompt.tolist(), *sequence.tokens]
        sequence.kv.new = blocks_of(len(everything)) - sequence.kv.reused
        for block in self._blocks(everything[:-1]):
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)

    def _blocks(self, tokens: list[int]) -> Iterator[int]:
        """Return the names of full blocks; a block's name depends on everything before it."""
        if not self._reuse:
            return
        name = 0
        for start in range(0, len(tokens) - KV_BLOCK_TOKENS + 1, KV_BLOCK_TOKENS):
            name = hash((name, tuple(tokens[start : start + KV_BLOCK_TOKENS])))
            yield name
