"""The answer for a terminal."""

import math
from collections.abc import Sequence

from pipelines.document.show import NONE, count, number
from pipelines.host.screen import table, wrapped
from pipelines.predict.performance.performance import checkpoint_text, origin
from pipelines.predict.sizing.answer import WORDS, Check, FleetOption, PeakTrial, refusals
from pipelines.predict.sizing.fleet import Cost, PeakFleet
from pipelines.predict.sizing.question import Demand, Question
from pipelines.predict.sizing.result import Result
from pipelines.predict.sizing.sensitivity import Change

SHOWN_OPTIONS = 12
NO_PRICES = "no prices given (sizing.prices.*)"


def words(result: Result) -> list[str]:
    """Return all lines of the printed answer."""
    question, best = result.answer.question, result.answer.chosen
    lines = [*_pairs(question_terms(question)), "", *_table(result.answer.options, question)]
    lines += [wrapped(f"not possible: {label}: {why}", 5) for label, why in refusals(result.answer.refused)]
    lines += ["", f"* {best.label}", *_pairs(answer_terms(result)), ""]
    lines += [pair("checked", _checked(question, result.check)), ""]
    lines += _changes(result.changes, best.fleet)
    return [*lines, "", pair("day", "\n".join(day_lines(result)))] if result.day is not None else lines


def pair(word: str, text: str) -> str:
    """Format a label and its text, whose lines begin below each other."""
    return "\n".join(wrapped(f"{'' if at else word:<10}{line}", 10) for at, line in enumerate(text.split("\n")))


def _pairs(terms: Sequence[tuple[str, str]]) -> list[str]:
    return [pair(word, text) for word, text in terms]


def question_terms(question: Question) -> tuple[tuple[str, str], ...]:
    """Return what was asked."""
    return (
        ("model", f"{question.model.name} on {question.gpu.gpu}, {question.engine} (modelled)"),
        ("load", load_text(question.demand)),
        *([("trace", question.trace)] if question.trace else ()),
        ("requests", f"{length_text(question.isl)} tokens in, {length_text(question.osl)} out; {question.mode}"),
        ("limits", limits_text(question)),
    )


def load_text(demand: Demand) -> str:
    """Describe the requests per second to serve."""
    average = "" if demand.average is None else f"{demand.average:,.4g}/s on average, "
    return f"{average}{demand.peak:,.4g}/s at peak ({demand.how})"


def length_text(values: Sequence[int]) -> str:
    """Format token counts: "2,000", or mean and range."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{sum(values) / len(values):,.0f} ({low:,} to {high:,})"


def limits_text(question: Question) -> str:
    """Describe the limits."""
    slo = question.slo
    if limits := ", ".join(f"{WORDS[name]} {limit:g} ms" for name, limit in slo.limits.items()):
        preset = "" if slo.name in ("none", "given") else f" ({slo.name})"
        return f"{limits} at P{question.percentile:g}{preset}"
    if question.mode == "offline":
        return "none: only throughput counts"
    return "none given, so only throughput counts: set sizing.slo.ttft_ms, itl_ms, e2e_ms or preset"


def _table(options: Sequence[FleetOption], question: Question) -> list[str]:
    latency = f"ms at P{question.percentile:g}"
    groups = ("", "requests/s", "requests/s", latency, latency, "fleet", "fleet", "fleet", "")
    listed = shown_options(options)
    rows = [("", "each", "/GPU", "TTFT", "ITL", "inst.", "GPUs", "servers", "limit")]
    for place, option in enumerate(listed):
        seen, fleet = option.capacity.seen.at(question.percentile), option.fleet
        speed = (number(option.capacity.rate), number(option.per_gpu), _ms(seen["ttft"]), _ms(seen["itl"]))
        size = (str(fleet.instances), str(fleet.gpus), str(fleet.servers))
        rows.append((f"{'*' if place == 0 else ' '} {option.label}", *speed, *size, binds(option)))
    lines = table(rows, text_columns=(8,), groups=groups)
    if len(options) > len(listed):
        lines.append(f"  and {len(options) - len(listed)} more in the table file")
    return lines


def shown_options(options: Sequence[FleetOption]) -> list[FleetOption]:
    """Return the best options, and of every format at least the best, in their order."""
    best: dict[str, FleetOption] = {}
    for option in options:
        best.setdefault(option.instance.setup.qformat, option)
    others = [option for option in options if option not in best.values()]
    ids = {id(each) for each in (*best.values(), *others[: max(0, SHOWN_OPTIONS - len(best))])}
    return [option for option in options if id(option) in ids]


def binds(option: FleetOption) -> str:
    """Name the binding limit and its cause: "TTFT (KV cache)"."""
    return f"{WORDS[option.capacity.binding]} ({option.capacity.because})"


def _ms(seconds: float) -> str:
    return NONE if math.isnan(seconds) else number(1000 * seconds)


def fleet_text(fleet: PeakFleet, *, gpus: bool = True) -> str:
    """Describe instances, servers and, if it has any, GPUs, also before rounding."""
    spare = f" ({fleet.spare} spare)" if fleet.spare else ""
    total = fleet.servers * fleet.gpus_per_server
    used = f", {fleet.gpus:,} of {count(total, 'GPU')}" if gpus else ""
    return (
        f"{count(fleet.instances, 'instance')}{spare} on {count(fleet.servers, 'server')}{used}; "
        f"before rounding {fleet.raw:.2f} instances, {fleet.servers_raw:.2f} servers"
    )


def whole(fleet: PeakFleet) -> str:
    """Say what is paid for: whole servers, including GPUs without an instance."""
    total = fleet.servers * fleet.gpus_per_server
    idle = total - fleet.gpus
    unused = f", {idle:,} of them idle" if idle else ", all in use"
    return f"whole servers are billed: {count(total, 'GPU')}{unused}"


def answer_terms(result: Result) -> tuple[tuple[str, str], ...]:
    """Return the recommended fleet, why it is recommended, and what that rests on."""
    question, best = result.answer.question, result.answer.chosen
    limits, costed = best.instance.limits, best.instance.costed
    engine = [f"{limits.text()} for this load", *limits.lines()] if limits.reasons else [limits.text()]
    # a ranking of formats leaves their accuracy out
    unranked = "not considered, and formats differ in it: `make compare` measures it"
    costs = (*cost_texts(best.cost), whole(best.fleet)) if best.cost is not None else (NO_PRICES,)
    return (
        ("fleet", fleet_text(best.fleet)),
        ("because", result.answer.reason),
        *([("folder", text)] if (text := checkpoint_text(best.instance.setup)) else ()),
        *([("accuracy", unranked)] if len(question.formats) > 1 else ()),
        ("interval", _interval(best)),
        ("rests on", origin(costed.provenance, costed.why)),
        ("engine", "\n".join(engine)),
        ("KV cache", _memory(best)),
        ("tokens", _tokens(question)),
        *(("cost", text) for text in costs),
    )


def _interval(option: FleetOption) -> str:
    """Describe the range of fleets if the model is off by its usual error."""
    few, large = option.fewest, option.largest
    if large is None:
        return (
            f"in eight of ten cases {count(few.instances, 'instance')} or more, up to none that meets the limits "
            f"(at most {number(option.high)} requests/s each)"
        )
    return (
        f"in eight of ten cases {_range(few.instances, large.instances, 'instance')} on "
        f"{_range(few.servers, large.servers, 'server')} ({number(option.low)} to {number(option.high)} requests/s "
        "each)"
    )


def _range(low: int, high: int, word: str) -> str:
    return count(low, word) if low == high else f"{low:,} to {high:,} {word}s"


def _memory(option: FleetOption) -> str:
    one, seen = option.instance, option.capacity.seen
    together = one.placed.concurrency
    running = f"{seen.batch:.0f}" if seen.batch >= 1 else f"{seen.batch:.2g}"
    return (
        f"{one.kv_tokens:,} tokens, {count(together.requests, 'request')} at a time ({together.binds} binds); "
        f"with {running} running on average at that rate, {100 * seen.kv_use:.0f} % is in use"
    )


def _tokens(question: Question) -> str:
    daily = question.demand.requests_per_day
    if daily is None:
        return "per day: unknown without an average rate"
    hours = question.demand.busy_hours
    like = f" (the average for {hours:.4g} h)" if hours != 24 else ""
    return (
        f"{daily:,.0f} requests a day{like}: {daily * question.mean_isl:,.4g} tokens in, "
        f"{daily * question.mean_osl:,.4g} out"
    )


def cost_texts(cost: Cost) -> list[str]:
    """Describe the cost and the utilisation it assumes."""
    parts = ", ".join(f"{what} {usd:,.0f}" for what, usd in cost.parts)
    without = f"; not given and not included: {', '.join(cost.missing)}" if cost.missing else ""
    lines = [f"{cost.per_year:,.0f} USD a year ({parts}){without}"]
    if cost.utilisation is None:
        return [*lines, "per token: unknown without an average rate (or sizing.prices.utilisation)"]
    if cost.per_million_input is None:
        return [*lines, f"{cost.per_1k_requests:,.3g} USD per thousand requests, at {100 * cost.utilisation:.0f} %"]
    lines.append(
        f"{cost.per_million_input:,.3g} USD per million input tokens, {cost.per_million_output:,.3g} per million "
        f"output, {cost.per_1k_requests:,.3g} per thousand requests, at {100 * cost.utilisation:.0f} % utilisation"
    )
    return lines


def _checked(question: Question, check: Check) -> str:
    fewer = [trial_text(question, check.fewer)] if check.fewer is not None else []
    fleet = f"{trial_text(question, check.fleet)}; simulated at the peak, requests distributed round-robin"
    return "\n".join([fleet, *fewer, check.why])


def trial_text(question: Question, trial: PeakTrial) -> str:
    """Describe a simulated fleet."""
    values = ", ".join(
        f"{WORDS[name]} {number(1000 * value)} ms" for name, value in trial.values.items() if not math.isnan(value)
    )
    verdict = "meets the limits" if trial.meets else "misses"
    what = f" {WORDS[trial.missed]}" if trial.missed else ""
    return f"{count(trial.instances, 'instance')}: {verdict}{what} (P{question.percentile:g}: {values})"


def _changes(changes: Sequence[Change], fleet: PeakFleet) -> list[str]:
    rows: list[tuple[str, ...] | str] = [("effect of one change", "inst.", "GPUs", "servers", "")]
    for change in changes:
        if change.servers is None:
            rows.append(f"  {change.what}: not possible: {change.why.rstrip('.')}")
            continue
        more = change.servers - fleet.servers
        size = (str(change.instances), str(change.gpus), str(change.servers))
        rows.append((f"  {change.what}", *size, f"{more:+d}" if more else ""))
    if not any(change.together for change in changes):
        rows.append("  no two changes of limits, format, KV cache and TP together need fewer GPUs than one alone")
    return table(rows, text_columns=(4,))


def day_lines(result: Result) -> list[str]:
    """Describe the replay of a day."""
    day = result.day
    assert day is not None
    gpus = result.answer.chosen.gpus
    moving, fixed = day.moving.instance_hours * gpus, day.fixed.instance_hours * gpus
    return [
        f"{day.how}; {count(day.moving.requests, 'request')}, busiest {day.moving.rate.max():,.3g}/s",
        f"fixed {fixed:,.0f} GPU-hours, {100 * day.fixed.over:.2f} % of requests over a limit",
        f"autoscaled {moving:,.0f} GPU-hours ({100 * (moving / fixed - 1):+.0f} %), "
        f"{100 * day.moving.over:.2f} % over a limit, {day.moving.ready.min()} to {day.moving.ready.max()} instances, "
        f"{day.moving.starts} starts",
    ]
