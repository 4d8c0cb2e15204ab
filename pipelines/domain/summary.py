"""Summarize requests: one definition of every figure, for measured and simulated requests alike.

Load generator, simulator, sizing, the fit of the performance model and the report take their figures from here.
`RequestColumns` defines the latencies of a request, `summarise` which requests and tokens count:

* TTFT: from when the request was due to its first non-empty response; queue, prefill and network included.
* ITL = TPOT = (E2E - TTFT) / (OSL - 1) per request, first token excluded; no value below two output tokens.
* Token gaps: between neighbouring responses, pooled over all requests (vLLM's "ITL"); not the same metric as ITL.
* E2E: from when the request was due to its last response with text.
* Queue time: from when the request was due to its first slot in the engine; only a simulator knows it per request.
* Latencies and lengths cover the requests *due* inside the window, each followed to its end, so that a slow server
  cannot hide its slow requests. Rates count what *arrived* inside the window: finished requests, output tokens by
  their own stamps, input tokens with the first response. When the window spans all requests, both are the same, and
  output tokens/s = output tokens / (last response - first request).
* A window includes its start but not its end.
* Failed, rejected and cancelled requests count as errors only. The output tokens they delivered are not counted.
* Requests still running when a simulation is cut off count with what they received: TTFT if there was a first token,
  and output tokens; not ITL, not E2E, and not as finished.
* Goodput: finished requests per second that met every limit; a request without a value for a limited metric (no ITL
  below two tokens) meets that limit.
* Percentiles interpolate linearly between neighbours (numpy's default, also AIPerf's and genai-perf's). "index" is
  trtllm-bench's sorted[int(n p)], to compare with numbers of that tool.

These are the conventions of NVIDIA NIM, AIPerf, genai-perf and trtllm-bench where they agree.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from pipelines.domain.benchmark import DISTRIBUTIONS, PERCENTILES, Distribution, Slo, Summary

RECORD_FIELDS = (
    "index", "intended_ns", "sent_ns", "first_token_ns", "end_ns", "isl", "osl", "chunk_ns", "error"
)  # fmt: skip
"""Keys of a stored level, which has one list per field, as `RequestColumns` defines them: `intended_ns` is `due`,
`chunk_ns` are the stamps of all non-empty responses of a request, none if it was not streamed. All stamps are ns since
the start of the run on one monotonic clock."""
SECOND = 1_000_000_000
CONVENTIONS = {
    "ttft": "due -> first non-empty response",
    "itl": "(E2E - TTFT) / (OSL - 1) per request, first token excluded; none below two output tokens",
    "e2e": "due -> last response with text",
    "latencies": "of the requests due inside the window, each followed to its end",
    "rates": "what arrived inside the window, output tokens by their own stamps",
    "percentiles": "linear interpolation between neighbours",
}
"""The definitions above in short, stored with results."""
Column = Any
"""A numpy array with one entry per request. Only its operators and methods are used, so this module needs no numpy."""
Window = tuple[float, float]
"""[start, end) on the clock of the requests."""
Percentiles = Literal["linear", "index"]
"""How percentiles are taken: between neighbours (numpy's default), or sorted[int(n p)] (trtllm-bench)."""


class Responses(Protocol):
    """Arrival times of the individual responses of requests."""

    @property
    def count(self) -> Column:
        """int[n]: number of responses of each complete request; 0 if it was not streamed."""

    def before(self, time: float) -> Column:
        """Return int[n]: responses of each request before a time."""

    def gaps(self, which: Column) -> Column:
        """Return the times between neighbouring responses, pooled over the requests of a mask."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestColumns:
    """Requests, on the clock of the client that sent them. NaN means that something did not happen.

    Attributes:
        due: when the request should have been sent. Latencies count from here, so that waiting in a slow client or
            behind a slow server is not hidden (coordinated omission). In a closed loop it is when it was sent.
        first_token: when the first non-empty response arrived; NaN if none did or it was not streamed.
        end: when the last response with text, or the error, arrived; NaN while the request is running.
        isl: int[n], input tokens.
        osl: int[n], output tokens; for a running request, those it will have.
        errors: kind of error of each request, None where it has none; empty if no request failed.
        responses: arrival times of the individual responses; None if only the first and the last were kept. The tokens
            between these two then count as evenly spaced.
        admitted: when the request first got a slot; None if that is not known.
        sent: when the request was actually sent; None if that is not known.
        index: int[n], position in the load; None if it is the place.
        per_second: units of the clock per second, 1e9 for ns.
    """

    due: Column
    first_token: Column
    end: Column
    isl: Column
    osl: Column
    errors: Sequence[str | None] = ()
    responses: Responses | None = None
    admitted: Column | None = None
    sent: Column | None = None
    index: Column | None = None
    per_second: float = 1.0

    def ttft(self) -> Column:
        """Time to first token."""
        return self.first_token - self.due

    def itl(self) -> Column:
        """Inter-token latency: the mean of each request without its first token; NaN below two output tokens."""
        steps = self.osl - 1
        short = steps < 1
        steps[short] = 1
        latency = (self.end - self.first_token) / steps
        latency[short] = math.nan
        return latency

    def e2e(self) -> Column:
        """Time to the last token."""
        return self.end - self.due

    def queue(self) -> Column:
        """Time to the first slot.

        Raises:
            ValueError: the admission times are not known.
        """
        if self.admitted is None:
            raise ValueError("the queue time of requests needs their admission times")
        return self.admitted - self.due

    def whole(self) -> Window:
        """The window from the first request to just past the last response, so that it includes the last response."""
        return float(self.due.min()), math.nextafter(float(self.end[_known(self.end)].max()), math.inf)

    def fine(self) -> Column:
        """bool[n]: requests that did not fail."""
        fine = _known(self.due)
        failed = [index for index, error in enumerate(self.errors) if error is not None]
        fine[failed] = False
        return fine

    def tokens_before(self, time: float) -> Column:
        """Return int[n]: output tokens that arrived before a time.

        The responses of a request carry `osl` tokens in total, usually one each. If there are more tokens than
        responses, they are spread evenly by cumulative rounding, so that adjacent windows add up.
        """
        tokens = self.osl * (self.end < time)
        if self.responses is None:
            part = (self.first_token < time) & (self.end >= time)
            step = (self.end[part] - self.first_token[part]) / (self.osl[part] - 1)
            tokens[part] = -((self.first_token[part] - time) // step)  # rounded up: the first token is before `time`
            return tokens
        part = self.responses.count > 0
        tokens[part] = self.responses.before(time)[part] * self.osl[part] // self.responses.count[part]
        return tokens


def whole_window(requests: RequestColumns) -> tuple[int, int]:
    """Return `RequestColumns.whole` of requests in ns. The end is one past, so that the last response is inside.

    Raises:
        ValueError: there are no requests.
    """
    if not len(requests.due):
        raise ValueError("no requests, no window")
    return int(requests.due.min()), int(requests.end.max()) + 1


def summarise(
    requests: RequestColumns,
    window: Window,
    slo: Slo | None = None,
    *,
    due: Column | None = None,
    percentiles: Percentiles = "linear",
) -> Summary:
    """Summarize the requests of a window.

    Args:
        requests: all requests of the run, including those outside the window, whose tokens may arrive inside.
        window: [start, end) on the clock of the requests.
        slo: limits for goodput.
        due: bool[n], the requests that latencies and errors cover, if chosen by number and not by time: in a simulated
            closed loop, several may be due at the very moment at which the window begins.
        percentiles: how they are computed.

    Raises:
        ValueError: the window is empty.
    """
    due = _inside(requests.due, window) if due is None else due
    fine = due & requests.fine()
    done, unit = fine & _known(requests.end), requests.per_second
    gaps = () if requests.responses is None else requests.responses.gaps(fine) / unit
    failed = (error for error, counts in zip(requests.errors, due, strict=False) if error is not None and counts)
    return replace(
        rates(requests, window, slo),
        errors=dict(Counter(failed)),
        isl=distribution(requests.isl[done], percentiles),
        osl=distribution(requests.osl[done], percentiles),
        ttft_s=distribution(requests.ttft()[fine] / unit, percentiles),
        itl_s=distribution(requests.itl()[done] / unit, percentiles),
        token_gap_s=distribution(gaps, percentiles),
        e2e_s=distribution(requests.e2e()[done] / unit, percentiles),
    )


def rates(requests: RequestColumns, window: Window, slo: Slo | None = None) -> Summary:
    """Compute the rates of what arrived inside a window; errors and distributions are empty.

    Raises:
        ValueError: the window is empty.
    """
    start, end = window
    if end <= start:
        raise ValueError(f"window of {end - start:g} {'ns' if requests.per_second == SECOND else 's'}")
    fine = requests.fine()
    seconds = (end - start) / requests.per_second
    ended = fine & _inside(requests.end, window)
    output = int((requests.tokens_before(end) - requests.tokens_before(start))[fine].sum())
    prefilled = requests.first_token.copy()  # when input tokens count: with the first response, or the only one
    whole = ~_known(prefilled)
    prefilled[whole] = requests.end[whole]
    prompt = int(requests.isl[fine & _inside(prefilled, window)].sum())
    count = int(ended.sum())
    nothing: dict[str, Any] = dict.fromkeys(DISTRIBUTIONS, Distribution(0))
    return Summary(
        window_s=seconds,
        requests=count,
        errors={},
        requests_per_s=count / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        goodput_per_s=int((ended & met(requests, slo)).sum()) / seconds if slo and slo.limits else None,
        **nothing,
    )


def met(requests: RequestColumns, slo: Slo) -> Column:
    """Return bool[n]: requests that met every limit; a metric without a value meets its limit."""
    fine = _known(requests.due)
    for name, limit in slo.limits.items():
        fine &= ~(getattr(requests, name)() > limit * (requests.per_second / 1000))
    return fine


def ordered(values: Column | Sequence[float]) -> Sequence[float]:
    """Sort values in ascending order, without NaN."""
    if isinstance(values, Sequence):
        return sorted(value for value in values if value == value)
    numbers = values[_known(values)]
    numbers.sort()
    return memoryview(numbers)  # a list of millions takes four times the memory


def percentile(ordered: Sequence[float], share: float, percentiles: Percentiles = "linear") -> float:
    """Return the value below which `share` of sorted values lie; bit-identical to numpy.percentile's linear method."""
    if percentiles == "index":
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
    place = share * (len(ordered) - 1)
    low = int(place)
    part = place - low
    if part == 0:
        return ordered[low]
    lower, upper = ordered[low], ordered[low + 1]
    step = upper - lower
    value = lower + step * part if part < 0.5 else upper - step * (1 - part)
    return min(upper, max(lower, value))  # rounding must not leave the interval


def distribution(values: Column | Sequence[float], percentiles: Percentiles = "linear") -> Distribution:
    """Return mean, extremes and percentiles of the values that are not NaN; all None if there are none."""
    numbers = ordered(values)
    if not numbers:
        return Distribution(0)
    # Rounding in the sum must not move the mean of equal values past them.
    mean = min(max(sum(numbers) / len(numbers), numbers[0]), numbers[-1])
    shares = {name: int(name[1:]) / 10 ** len(name[1:]) for name in PERCENTILES}
    cuts = {name: percentile(numbers, share, percentiles) for name, share in shares.items()}
    return Distribution(len(numbers), mean, min=numbers[0], max=numbers[-1], **cuts)


def _known(values: Column) -> Column:
    """Return bool[n]: values that are not NaN."""
    return values == values


def _inside(times: Column, window: Window) -> Column:
    return (times >= window[0]) & (times < window[1])
