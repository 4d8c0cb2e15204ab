"""From the records of single requests to the numbers of a window. One function for measured and simulated requests.

Conventions (those of NVIDIA NIM, genai-perf and trtllm-bench where they agree):

* TTFT: from when the request was due to its first non-empty response; queue, prefill and network included.
* ITL = TPOT = (E2E - TTFT) / (OSL - 1) per request, first token excluded; no value below two output tokens.
* Token gaps: between neighbouring responses, pooled over all requests (vLLM's "ITL").
* E2E: from when the request was due to its last response with text.
* Latencies and lengths are of the requests *due* inside the window, each followed to its end, so that a slow server
  cannot lose its slow requests. Rates count what *arrived* inside the window: finished requests, output tokens by
  their own stamps, input tokens with the first response. When the window spans all requests, both are the same and
  output tokens/s = output tokens / (last response - first request).
* Failed requests count as errors only. The output tokens they delivered before they failed are not counted.
* Goodput: finished requests per second that met every limit; one without a value for a limited metric (no ITL below
  two tokens) meets it.
* Percentiles interpolate linearly between neighbours (numpy's default; trtllm-bench takes sorted[int(n p)]).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

from pipelines.domain.benchmark import Distribution, Slo, Summary
from pipelines.domain.timing import RequestTiming

SECOND = 1_000_000_000
CONVENTIONS = {
    "ttft": "due -> first non-empty response",
    "itl": "(E2E - TTFT) / (OSL - 1) per request, first token excluded; none below two output tokens",
    "e2e": "due -> last response with text",
    "latencies": "of the requests due inside the window, each followed to its end",
    "rates": "what arrived inside the window, output tokens by their own stamps",
    "percentiles": "linear interpolation between neighbours",
}
"""The above in short, for results."""
Window = tuple[int, int]


def whole_window(timings: Sequence[RequestTiming]) -> Window:
    """From the first request to the last response, ns. The end is one past, so that the last response is inside.

    Raises:
        ValueError: there are no requests.
    """
    if not timings:
        raise ValueError("no requests, no window")
    return min(t.intended_ns for t in timings), max(t.end_ns for t in timings) + 1


def summarise(timings: Iterable[RequestTiming], window_ns: Window, slo: Slo | None = None) -> Summary:
    """What a window of requests says.

    Args:
        timings: all requests of the run, those outside the window too: their tokens may arrive inside.
        window_ns: [start, end) on the clock of the records.
        slo: limits for goodput.

    Raises:
        ValueError: the window is empty.
    """
    start, end = window_ns
    if end <= start:
        raise ValueError(f"window of {end - start} ns")
    rows = list(timings)
    due = [t for t in rows if start <= t.intended_ns < end]
    fine = [t for t in due if t.ok]
    ended = [t for t in rows if t.ok and start <= t.end_ns < end]
    seconds = (end - start) / SECOND
    output = sum(_output_inside(t, start, end) for t in rows if t.ok)
    prompt = sum(t.isl for t in rows if t.ok and start <= _prefilled(t) < end)
    return Summary(
        window_s=seconds,
        requests=len(ended),
        errors=dict(Counter(t.error for t in due if t.error is not None)),
        requests_per_s=len(ended) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        goodput_per_s=None if not has_limits(slo) else sum(meets(t, slo) for t in ended) / seconds,
        isl=distribution([t.isl for t in fine]),
        osl=distribution([t.osl for t in fine]),
        ttft_s=distribution([t.ttft_ns / SECOND for t in fine if t.ttft_ns is not None]),
        itl_s=distribution([t.itl_ns / SECOND for t in fine if t.itl_ns is not None]),
        token_gap_s=_scaled(list(chain.from_iterable(map(_gaps, fine)))),
        e2e_s=distribution([t.e2e_ns / SECOND for t in fine]),
    )


def has_limits(slo: Slo | None) -> bool:
    """Whether there is any limit to meet."""
    return slo is not None and any(limit is not None for limit in (slo.ttft_ms, slo.itl_ms, slo.e2e_ms))


def meets(timing: RequestTiming, slo: Slo | None) -> bool:
    """Whether a finished request met every limit."""
    if slo is None:
        return True
    pairs = ((slo.ttft_ms, timing.ttft_ns), (slo.itl_ms, timing.itl_ns), (slo.e2e_ms, timing.e2e_ns))
    return all(limit is None or value is None or value <= limit * 1e6 for limit, value in pairs)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of sorted values lie; linear between neighbours, as numpy.percentile."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    part = place - low
    # This form never leaves [ordered[low], ordered[high]], also in floating point.
    return ordered[low] if part == 0 else min(ordered[high], ordered[low] + (ordered[high] - ordered[low]) * part)


def distribution(values: Sequence[float]) -> Distribution:
    """Mean, extremes and percentiles; no values when there are none."""
    if not values:
        return Distribution(0)
    ordered = sorted(values)
    # Rounding of the sum must not carry the mean of equal values past them.
    mean = min(max(sum(ordered) / len(ordered), ordered[0]), ordered[-1])
    p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.50, 0.90, 0.95, 0.99))
    return Distribution(len(ordered), mean, ordered[0], p50, p90, p95, p99, ordered[-1])


def _scaled(gaps_ns: list[int]) -> Distribution:
    """The distribution of many ns values in seconds; they are sorted as the integers they are, which is faster."""
    found = distribution(gaps_ns)
    if not found.count:
        return found
    names = ("mean", "min", "p50", "p90", "p95", "p99", "max")
    return Distribution(found.count, *(getattr(found, name) / SECOND for name in names))


def _gaps(timing: RequestTiming) -> list[int]:
    stamps = timing.chunk_ns
    return [after - before for before, after in pairwise(stamps)]


def _prefilled(timing: RequestTiming) -> int:
    """When the input tokens count: with the first response, or with the only one."""
    return timing.end_ns if timing.first_token_ns is None else timing.first_token_ns


def _output_inside(timing: RequestTiming, start: int, end: int) -> int:
    """Output tokens that arrived in [start, end); tokens of a response arrive together.

    Responses carry `osl` tokens between them: one each, as a rule. When there are more tokens than responses, the
    tokens are spread evenly over them, by cumulative rounding, so that neighbouring windows add up.
    """
    stamps = timing.chunk_ns
    if not stamps:
        return timing.osl if start <= timing.end_ns < end else 0
    if start <= stamps[0] and stamps[-1] < end:
        return timing.osl
    first, last = bisect_left(stamps, start), bisect_left(stamps, end)
    return last * timing.osl // len(stamps) - first * timing.osl // len(stamps)
