"""From requests to the figures of a window: one definition of each, for measured and for simulated requests.

Load generator, simulator, sizing, the fit of the performance model and the report take their figures from here.
`RequestColumns` says how each latency of a request is computed, `summarise` which requests and tokens count:

* TTFT: from when the request was due to its first non-empty response; queue, prefill and network included.
* ITL = TPOT = (E2E - TTFT) / (OSL - 1) per request, first token excluded; no value below two output tokens.
* Token gaps: between neighbouring responses, pooled over all requests (vLLM's "ITL"); another metric than ITL.
* E2E: from when the request was due to its last response with text.
* Queue time: from when the request was due to its first slot in the engine; only a simulator knows it per request.
* Latencies and lengths are of the requests *due* inside the window, each followed to its end, so that a slow server
  cannot lose its slow requests. Rates count what *arrived* inside the window: finished requests, output tokens by
  their own stamps, input tokens with the first response. When the window spans all requests, both are the same and
  output tokens/s = output tokens / (last response - first request).
* A window holds its start and not its end.
* Failed, rejected and cancelled requests count as errors only. The output tokens they delivered are not counted.
* Requests under way when a simulation was cut count with what came: TTFT when they got a first token, output tokens;
  not ITL, not E2E, not as finished.
* Goodput: finished requests per second that met every limit; one without a value for a limited metric (no ITL below
  two tokens) meets it.
* Percentiles interpolate linearly between neighbours (numpy's default, also AIPerf's and genai-perf's). "index" is
  trtllm-bench's sorted[int(n p)], to compare with numbers of that tool.

These are the conventions of NVIDIA NIM, AIPerf, genai-perf and trtllm-bench where they agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from pipelines.domain.benchmark import PERCENTILES, Distribution, Slo, Summary
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
Column = Any
"""A numpy array with one entry per request. Only its operators and methods are used, so this module needs no numpy."""
Window = tuple[float, float]
"""[start, end) on the clock of the requests."""
Percentiles = Literal["linear", "index"]
"""How percentiles are taken: between neighbours (numpy's default), or sorted[int(n p)] (trtllm-bench)."""


class Responses(Protocol):
    """When the single responses of requests came."""

    @property
    def count(self) -> Column:
        """int[n]: responses of each request when it is complete; 0 when it was not streamed."""

    def before(self, time: float) -> Column:
        """int[n]: responses of each request that came before a time."""

    def gaps(self, which: Column) -> Column:
        """Times between neighbouring responses of the requests of a mask, pooled."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestColumns:
    """Requests, on the clock of the client that sent them. NaN stands for what did not happen.

    Attributes:
        due: when it should have left; latencies count from here.
        first_token: when the first non-empty response came; NaN when none came or it was not streamed.
        end: when the last response with text came, or the error; NaN while it is under way.
        isl: int[n], input tokens.
        osl: int[n], output tokens; of a request under way those it is to have.
        errors: kind of error of each request, None where it has none; empty when no request failed.
        responses: when the single responses came; None when only the first and the last were kept. The tokens between
            these two count as evenly spaced then.
        admitted: when it first got a slot; None when that is not known.
        per_second: units of the clock in a second, 1e9 when it counts ns.
    """

    due: Column
    first_token: Column
    end: Column
    isl: Column
    osl: Column
    errors: Sequence[str | None] = ()
    responses: Responses | None = None
    admitted: Column | None = None
    per_second: float = 1.0

    def ttft(self) -> Column:
        """Time to first token."""
        return self.first_token - self.due

    def itl(self) -> Column:
        """Inter-token latency: the mean of each request, its first token excluded; NaN below two output tokens."""
        steps = self.osl - 1
        short = steps < 1
        steps[short] = 1
        found = (self.end - self.first_token) / steps
        found[short] = math.nan
        return found

    def e2e(self) -> Column:
        """Time to the last token."""
        return self.end - self.due

    def queue(self) -> Column:
        """Time to the first slot.

        Raises:
            ValueError: the times of admission are not known.
        """
        if self.admitted is None:
            raise ValueError("the queue time of requests needs the times they were admitted at")
        return self.admitted - self.due

    def whole(self) -> Window:
        """From the first request to just past the last response, so that the last response is inside."""
        return float(self.due.min()), math.nextafter(float(self.end[_known(self.end)].max()), math.inf)

    def fine(self) -> Column:
        """bool[n]: did not fail."""
        fine = _known(self.due)
        failed = [index for index, error in enumerate(self.errors) if error is not None]
        fine[failed] = False
        return fine

    def tokens_before(self, time: float) -> Column:
        """int[n]: output tokens that came before a time.

        Responses carry `osl` tokens between them: one each, as a rule. When there are more tokens than responses, the
        tokens are spread evenly over them, by cumulative rounding, so that neighbouring windows add up.
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


@dataclass(frozen=True, slots=True)
class Rates:
    """What arrived inside a window; the fields are those of `Summary`."""

    window_s: float
    requests: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None


def whole_window(timings: Sequence[RequestTiming]) -> tuple[int, int]:
    """`RequestColumns.whole` of records, ns. The end is one past, so that the last response is inside.

    Raises:
        ValueError: there are no requests.
    """
    if not timings:
        raise ValueError("no requests, no window")
    return min(t.intended_ns for t in timings), max(t.end_ns for t in timings) + 1


def summarise(
    requests: RequestColumns,
    window: Window,
    slo: Slo | None = None,
    *,
    due: Column | None = None,
    percentiles: Percentiles = "linear",
) -> Summary:
    """The figures of a window of requests.

    Args:
        requests: all of the run, those outside the window too: their tokens may arrive inside.
        window: [start, end) on the clock of the requests.
        slo: limits for goodput.
        due: bool[n], the requests that latencies and errors are of, where they are chosen by number and not by time:
            in a simulated closed loop several may be due at the very moment at which the window begins.
        percentiles: how they are taken.

    Raises:
        ValueError: the window is empty.
    """
    found = rates(requests, window, slo)
    due = _inside(requests.due, window) if due is None else due
    fine = due & requests.fine()
    done, unit = fine & _known(requests.end), requests.per_second
    gaps = () if requests.responses is None else requests.responses.gaps(fine) / unit
    return Summary(
        **asdict(found),
        errors=_errors(requests.errors, due),
        isl=distribution(requests.isl[done], percentiles),
        osl=distribution(requests.osl[done], percentiles),
        ttft_s=distribution(requests.ttft()[fine] / unit, percentiles),
        itl_s=distribution(requests.itl()[done] / unit, percentiles),
        token_gap_s=distribution(gaps, percentiles),
        e2e_s=distribution(requests.e2e()[done] / unit, percentiles),
    )


def rates(requests: RequestColumns, window: Window, slo: Slo | None = None) -> Rates:
    """What arrived inside a window, per second.

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
    prompt = int(requests.isl[fine & _inside(_prefilled(requests), window)].sum())
    count = int(ended.sum())
    return Rates(
        window_s=seconds,
        requests=count,
        requests_per_s=count / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        goodput_per_s=int((ended & met(requests, slo)).sum()) / seconds if slo and has_limits(slo) else None,
    )


def has_limits(slo: Slo | None) -> bool:
    """Whether there is any limit to meet."""
    return slo is not None and any(limit is not None for limit in (slo.ttft_ms, slo.itl_ms, slo.e2e_ms))


def met(requests: RequestColumns, slo: Slo) -> Column:
    """bool[n]: met every limit; a metric without a value does."""
    found = _known(requests.due)
    pairs = ((slo.ttft_ms, requests.ttft), (slo.itl_ms, requests.itl), (slo.e2e_ms, requests.e2e))
    for limit, values in pairs:
        if limit is not None:
            found &= ~(values() > limit * (requests.per_second / 1000))
    return found


def ordered(values: Column | Sequence[float]) -> list[float]:
    """Values in ascending order, without NaN."""
    if isinstance(values, Sequence):
        return sorted(value for value in values if value == value)
    known = values[_known(values)]
    known.sort()
    found: list[float] = known.tolist()
    return found


def percentile(ordered: Sequence[float], share: float, percentiles: Percentiles = "linear") -> float:
    """The value below which `share` of sorted values lie; linear between neighbours, to the bit as numpy.percentile."""
    if percentiles == "index":
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
    place = share * (len(ordered) - 1)
    low = int(place)
    part = place - low
    if part == 0:
        return ordered[low]
    lower, upper = ordered[low], ordered[low + 1]
    step = upper - lower
    found = lower + step * part if part < 0.5 else upper - step * (1 - part)
    return min(upper, max(lower, found))  # rounding never leaves the two


def distribution(values: Column | Sequence[float], percentiles: Percentiles = "linear") -> Distribution:
    """Mean, extremes and percentiles of the values that are not NaN; no values when there are none."""
    known = ordered(values)
    if not known:
        return Distribution(0)
    # Rounding of the sum must not carry the mean of equal values past them.
    mean = min(max(sum(known) / len(known), known[0]), known[-1])
    shares = {name: int(name[1:]) / 10 ** len(name[1:]) for name in PERCENTILES}
    found = {name: percentile(known, share, percentiles) for name, share in shares.items()}
    return Distribution(len(known), mean, min=known[0], max=known[-1], **found)


def _known(values: Column) -> Column:
    """bool[n]: is not NaN."""
    return values == values


def _inside(times: Column, window: Window) -> Column:
    return (times >= window[0]) & (times < window[1])


def _prefilled(requests: RequestColumns) -> Column:
    """When input tokens count: with the first response, or with the only one."""
    times = requests.first_token.copy()
    whole = ~_known(times)
    times[whole] = requests.end[whole]
    return times


def _errors(errors: Sequence[str | None], due: Column) -> dict[str, int]:
    return dict(Counter(error for error, counts in zip(errors, due, strict=False) if error is not None and counts))
