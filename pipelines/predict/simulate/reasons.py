"""Say why requests waited, and whether the load is above what the engine can serve."""

from __future__ import annotations

from pipelines.document.show import NONE, number
from pipelines.predict.simulate.outcome import PolicyOutcome

SHORT = {
    "": NONE,
    "batch": "batch",
    "slots": "slots",
    "kv_blocks": "KV blocks",
    "one_prefill": "prefill",
    "max_num_tokens": "tokens",
}
"""Short names of what keeps requests waiting (`REFUSALS`)."""
WHY = {
    "batch": "the running batch had not ended",
    "slots": "all slots were in use",
    "kv_blocks": "the KV cache was full (too few free blocks for the next request)",
    "one_prefill": "another prompt was being processed",
    "max_num_tokens": "the token budget (max_num_tokens) had no room for the next prompt",
}
"""The same in words, without figures of the engine."""
LEAST_SHARE = 0.01
"""Share of the run below which a reason to wait is not mentioned."""
MANY_USERS = 4
"""Users per request that runs, from which a closed loop is said to have too many."""


def words(unit: str) -> tuple[str, str, float]:
    """Return how times and rates are shown: name of the time unit, unit of the rates, and their factor."""
    return ("ticks", "1,000 ticks", 1000.0) if unit == "ticks" else ("ms", "s", 1.0)


def waited_for(outcome: PolicyOutcome) -> str:
    """Return what kept requests waiting for most of the time they waited, a name of `REFUSALS`; "" if none waited."""
    if not _told(outcome):
        return ""
    return "batch" if outcome.policy == "static" else _told(outcome)[0][0]


def limits_in_words(outcome: PolicyOutcome) -> str:
    """Describe what kept requests waiting, and for how long; of a static engine, what limited its batches."""
    told = _told(outcome)
    if not told:
        return "no request waited for a slot."
    if outcome.policy == "static":
        text = f"requests waited {_percent(sum(outcome.waiting.values()))} of the time for the running batch to end"
        return f"{text}; {_closed(outcome)}."
    reasons = _reasons(outcome)
    (first, share), *others = told
    text = f"requests waited {_percent(share)} of the time because {reasons[first]}"
    return "; ".join([text, *(f"{_percent(share)} because {reasons[name]}" for name, share in others)]) + "."


def _told(outcome: PolicyOutcome) -> list[tuple[str, float]]:
    """Return the reasons to wait that are worth a mention, and their shares of the run, largest first."""
    found = [(name, share) for name, share in outcome.waiting.items() if share >= LEAST_SHARE]
    return sorted(found, key=lambda item: -item[1])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _reasons(outcome: PolicyOutcome) -> dict[str, str]:
    budget = f"the token budget of {outcome.max_num_tokens or 0:,} (max_num_tokens)"
    chunked = outcome.policy == "inflight_chunked"
    return {
        "slots": f"all {outcome.slots:,} slots were in use" if outcome.slots > 1 else "the only slot was in use",
        "kv_blocks": WHY["kv_blocks"],
        "one_prefill": WHY["one_prefill"],
        "max_num_tokens": f"{budget} was used up" if chunked else f"the next prompt did not fit into {budget}",
    }


def _closed(outcome: PolicyOutcome) -> str:
    """Say what limited the batches of a static engine, the most frequent first."""
    words = {
        "": "took all requests that waited",
        "slots": f"filled all {outcome.slots:,} slots" if outcome.slots > 1 else "filled the only slot",
        "kv_blocks": "filled the KV cache",
        "max_num_tokens": f"used up the token budget of {outcome.max_num_tokens or 0:,} (max_num_tokens)",
    }
    counts = sorted(outcome.batches.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{amount:,} {words[name]}" for name, amount in counts)
    total = sum(outcome.batches.values())
    return f"of {total:,} {'batch' if total == 1 else 'batches'} {parts}"


def overload(outcome: PolicyOutcome) -> float:
    """Return how many times an open loop exceeds the capacity, or the users of a closed loop what runs; else 0."""
    if outcome.capacity is not None and outcome.offered is not None:
        return outcome.offered / outcome.capacity
    users = (outcome.concurrency or 0) / max(outcome.busy_max, 1)
    return users if users > MANY_USERS else 0.0


def overload_in_words(outcome: PolicyOutcome, unit: str) -> str:
    """Describe an overload, and what it means for the figures."""
    if outcome.capacity is None or outcome.offered is None:
        most = outcome.busy_max
        running = "1 request that runs" if most == 1 else f"{most:,} requests that run together"
        return (
            f"{outcome.concurrency or 0:,} users are {_times(overload(outcome))} the {running}: more of them add "
            "waiting, not throughput."
        )
    _, per, scale = words(unit)
    return (
        f"the load is {_times(overload(outcome))} the capacity: of {number(outcome.offered * scale)} requests per "
        f"{per} it can serve {number(outcome.capacity * scale)}. The queue grows for as long as the load lasts, so "
        "TTFT and E2E depend on the length of the run."
    )


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
