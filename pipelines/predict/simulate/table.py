"""Format outcomes as text for a terminal: policies side by side for one load, a row per load and policy for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipelines.document.show import NONE, count, number
from pipelines.domain.benchmark import Distribution
from pipelines.domain.metrics import BY_NAME
from pipelines.host.text import table, wrapped
from pipelines.predict.simulate.case import SimulationCase
from pipelines.predict.simulate.outcome import PolicyOutcome
from pipelines.predict.simulate.reasons import SHORT, limits_in_words, overload, overload_in_words, waited_for, words
from pipelines.settings.load import LengthSettings
from pipelines.settings.root import Settings

NAMES = {
    "static": "static",
    "inflight": "in-flight",
    "inflight_chunked": "chunked",
    "one_prefill": "one prefill",
}
"""Display names of the policies."""
Cell = Callable[[PolicyOutcome], str]
TTFT, ITL, E2E = (BY_NAME[name].title for name in ("ttft_s", "itl_s", "e2e_s"))


def outcome_table(outcomes: Sequence[PolicyOutcome], unit: str) -> str:
    """Format the outcomes of one load or of several.

    Args:
        outcomes: policies of the first load, then of the next.
        unit: unit of their times, "ticks" or "s"; seconds are shown as ms.
    """
    loads = list(dict.fromkeys(outcome.load for outcome in outcomes))
    lines = _side_by_side(outcomes, unit) if len(loads) == 1 else _rows(outcomes, unit)
    return "\n".join([*lines, *_notes(outcomes, unit, several=len(loads) > 1)])


def _side_by_side(outcomes: Sequence[PolicyOutcome], unit: str) -> list[str]:
    shown, per, scale = words(unit)
    filled = _filled(outcomes)
    rows: list[tuple[str, Cell]] = [
        ("requests done", lambda o: f"{o.requests:,}"),
        (f"in {'ticks' if unit == 'ticks' else 's'}", lambda o: number(o.window)),
        (f"{TTFT} mean, {shown}", lambda o: _time(o.ttft.mean, unit)),
        ("     p95", lambda o: _time(o.ttft.p95, unit)),
        (f"{E2E} mean, {shown}", lambda o: _time(o.e2e.mean, unit)),
        ("    p95", lambda o: _time(o.e2e.p95, unit)),
        (f"{ITL} mean, {shown}", lambda o: _time(o.itl.mean, unit)),
        (f"requests per {per}", lambda o: number(o.requests_rate * scale)),
        (f"output tokens per {per}", lambda o: number(o.tokens_rate * scale)),
        ("slots in use", lambda o: f"{100 * o.busy / o.slots:.0f} %" if filled else number(o.busy)),
        ("queue, most", lambda o: f"{o.queue_max:,}"),
        ("queue at the end", lambda o: f"{o.queue_end:,}"),
        ("pauses", lambda o: f"{o.preemptions:,}"),
    ]
    rows.append(("requests waited for", lambda o: SHORT[waited_for(o)]))
    if any(outcome.kv_share is not None for outcome in outcomes):
        rows.append(("KV cache in use, most", lambda o: NONE if o.kv_share is None else f"{100 * o.kv_share:.0f} %"))
    head = ["", *(NAMES[outcome.policy] for outcome in outcomes)]
    return table([head, *([label, *map(cell, outcomes)] for label, cell in rows)], left=1)


def _rows(outcomes: Sequence[PolicyOutcome], unit: str) -> list[str]:
    shown, per, scale = words(unit)
    filled = _filled(outcomes)
    head = ["load", "policy", "req", "tok", TTFT, "p95", ITL, E2E, "p95", "slots", "queue", "limit"]
    body = [
        [
            _short(o), NAMES[o.policy], number(o.requests_rate * scale), number(o.tokens_rate * scale),
            _time(o.ttft.mean, unit), _time(o.ttft.p95, unit), _time(o.itl.mean, unit), _time(o.e2e.mean, unit),
            _time(o.e2e.p95, unit), f"{100 * o.busy / o.slots:.0f}%" if filled else number(o.busy), str(o.queue_end),
            SHORT[waited_for(o)],
        ]
        for o in outcomes
    ]  # fmt: skip
    said = f"req, tok: requests and output tokens per {per}; times in {shown}, mean and p95; slots in use, mean; "
    said += "limit: what requests waited for, most of the time."
    return [*table([head, *body], left=2), *_wrap(said)]


def _filled(outcomes: Sequence[PolicyOutcome]) -> bool:
    """Return whether all slots were ever in use; otherwise the share of the slots says nothing useful."""
    return any(outcome.busy_max == outcome.slots for outcome in outcomes)


def asked(settings: Settings, case: SimulationCase, load: str | None = None) -> str:
    """Describe the simulation in one line; `load` replaces all loads of the settings, "" omits the load."""
    work = settings.workload
    lengths = f"workload {work.name}: ISL {_length(work.isl)}, OSL {_length(work.osl)}"
    parts = [case.what] if case.what else []
    parts += [count(case.slots, "slot"), lengths + (f", {work.turns} turns" if work.turns > 1 else "")]
    if load is None:
        burst = f"{count(settings.benchmark.num_requests or 0, 'request')} at once"
        load = {"burst": burst, "trace": f"trace {work.trace}"}.get(work.arrival, work.arrival)
        load += " loop" if work.arrival == "closed" else ""
    parts += [load] if load else []
    if settings.simulator.until is not None and load:
        parts.append(f"until {settings.simulator.until:g} {'ticks' if case.unit == 'ticks' else 's'}")
    return "; ".join(parts)


def _length(length: LengthSettings) -> str:
    """Abbreviate a length: "128", "lognormal 48±24", "uniform 32-224"."""
    kind = length.distribution
    if kind == "fixed":
        return f"{length.mean:g}"
    if kind == "uniform":
        return f"uniform {length.min}-{length.max}"
    return kind if length.mean is None else f"{kind} {length.mean:g}±{length.stdev:g}"


def _time(value: float | None, unit: str) -> str:
    return number(value if value is None or unit == "ticks" else 1000 * value)


def _short(outcome: PolicyOutcome) -> str:
    if outcome.concurrency is not None:
        return str(outcome.concurrency)
    return outcome.load if outcome.request_rate is None else f"{outcome.request_rate:g}"


def _notes(outcomes: Sequence[PolicyOutcome], unit: str, *, several: bool) -> list[str]:
    """Return remarks that qualify the numbers."""
    lines: list[str] = []
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.policy == policy]
        above = sorted(filter(overload, own), key=overload)
        if not several:
            lines += _wrap(f"{NAMES[policy]}: {limits_in_words(own[0])}")
        if above:
            where = f"{NAMES[policy]}{f' at {above[-1].load}' if several else ''}"
            smaller = len(above) - 1
            others = f" The same holds for {smaller} smaller load{'s' * (smaller > 1)}." if smaller else ""
            lines += _wrap(f"{where}: {overload_in_words(above[-1], unit)}{others}")
    if any(outcome.queue_end for outcome in outcomes):
        lines += _wrap(
            "The run ended before all requests did: latencies cover only requests that got that far. A faster policy "
            "includes more of the late ones, which waited longest."
        )
    if any(missing(outcome.ttft, outcome.e2e) for outcome in outcomes):
        lines += _wrap(f"{NONE}: no request got that far.")
    return lines


def missing(*distributions: Distribution) -> bool:
    """Return whether any outcome lacks values."""
    return any(not distribution.count for distribution in distributions)


def _wrap(text: str) -> list[str]:
    return wrapped(text).splitlines()
