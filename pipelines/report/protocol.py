"""Describe how a benchmark was measured: sentences, with every recorded setting in a folded table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.document.blocks import LEFT, Block, Column, Fold, Table, Terms
from pipelines.document.show import count, flat, machine_text, settings_text, when
from pipelines.domain.benchmark import BenchmarkResult, Slo
from pipelines.domain.summary import has_limits
from pipelines.report.data import Workload

_ARRIVALS = {
    "closed": "each user sends the next request when the answer is complete (closed loop)",
    "constant": "requests arrive at equal intervals (open loop)",
    "poisson": "requests arrive at random, as in a Poisson process (open loop)",
    "gamma": "requests arrive at random, in gamma-distributed intervals (open loop)",
    "burst": "all requests arrive at once",
    "trace": "requests arrive as in a recorded trace",
}


def protocol(workload: Workload) -> list[Block]:
    """Return the protocol, which is part of every number."""
    result = workload.runs[0].result
    items = [
        ("workload", workload_text(result.workload)),
        ("protocol", protocol_text(result.protocol)),
        ("SLO", slo_text(result.slo) if has_limits(result.slo) else "none given"),
        ("server", _server_text(result.server)),
        ("measured", ", ".join(f"{run.result.precision} {when(run.result.measured_at)}" for run in workload.runs)),
        ("machine", machine_text(result.machine)),
    ]
    for what in ("protocol", "slo"):
        other = [run.result.precision for run in workload.runs if getattr(run.result, what) != getattr(result, what)]
        if other:
            items.append(("differs", f"the {what} of {', '.join(other)} differs from that of {result.precision}"))
    again = [f"{run.result.precision} {1 + len(run.repeats)} runs" for run in workload.runs if run.repeats]
    if again:
        items.append(("repeated", f"{', '.join(again)}; the newest is shown"))
    return [Terms(tuple(items)), *_settings(result)]


def workload_text(workload: Mapping[str, Any]) -> str:
    """Describe the requests and their arrival."""
    parts = [
        f"{_length(workload[name])} {words}"
        for name, words in (("isl", "input tokens"), ("osl", "output tokens"))
        if workload.get(name) is not None
    ]
    text = f"{workload.get('name', 'unnamed')}: {' and '.join(parts) or 'lengths not recorded'} per request"
    arrival = str(workload.get("arrival", ""))
    if arrival in _ARRIVALS:
        text += f"; {_ARRIVALS[arrival]}"
    if pause := workload.get("think_time_s"):
        text += f", after a pause of {pause:g} s"
    if share := workload.get("shared_prefix_share"):
        text += f"; {100 * share:g} % of each prompt is the same in all prompts"
    if (turns := workload.get("turns") or 1) > 1:
        text += f"; conversations of {turns} turns"
    return f"{text}."


def _length(given: Any) -> str:
    """Describe a distribution of lengths: "128", or "lognormal (mean 300, stdev 100)"."""
    if not isinstance(given, Mapping):
        return f"{given:g}" if isinstance(given, int | float) else str(given)
    kind = str(given.get("distribution", ""))
    if kind == "fixed":
        return f"{given['mean']:g}"
    return f"{kind} ({settings_text({name: value for name, value in given.items() if name != 'distribution'})})"


def protocol_text(recorded: Mapping[str, Any]) -> str:
    """Describe what of each load was measured."""
    parts = []
    warm = [f"{recorded['warmup_s']:g} s"] if recorded.get("warmup_s") else []
    warm += [count(recorded["warmup_requests"], "request")] if recorded.get("warmup_requests") else []
    if warm:
        parts.append(f"{' and '.join(warm)} of warm-up")
    if recorded.get("num_requests"):
        parts.append(f"{count(recorded['num_requests'], 'request')} measured")
    elif recorded.get("duration_s"):
        if most := recorded.get("most_duration_s"):
            enough = count(recorded["enough_requests"], "request")
            each = f"{recorded['enough_per_user']} of each user"
            parts.append(f"{recorded['duration_s']:g} to {most:g} s measured, until {enough} and {each} have finished")
        else:
            parts.append(f"{recorded['duration_s']:g} s measured")
        if recorded.get("min_requests"):
            parts.append(f"at least {count(recorded['min_requests'], 'request')}")
    if "window" in recorded:
        parts.append("from the first request to the last" if recorded["window"] == "whole" else "in steady state")
    if "streaming" in recorded:
        parts.append("answers streamed" if recorded["streaming"] else "answers not streamed")
    return f"Each load: {', '.join(parts)}." if parts else "not recorded"


def slo_text(slo: Slo) -> str:
    """Describe the limits with their preset's name."""
    given = (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms), ("E2E", slo.e2e_ms))
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in given if limit is not None)
    return f"{slo.name} ({limits})" if slo.name not in ("none", "given") else limits


def _server_text(server: Mapping[str, Any]) -> str:
    name = " ".join(str(server[key]) for key in ("name", "version") if server.get(key))
    model = f", model {server['model_name']}" if server.get("model_name") else ""
    where = f" at {server['url']}" if server.get("url") else ""
    return f"{name or 'a server'}{where}{model}"


def _settings(result: BenchmarkResult) -> list[Block]:
    """Return every recorded setting, folded; the conventions have a section of their own."""
    recorded = {name: value for name, value in result.protocol.items() if name != "conventions"}
    groups = (("workload", result.workload), ("protocol", recorded), ("server", result.server))
    rows = tuple((group, name, value) for group, values in groups for name, value in flat(values))
    if not rows:
        return []
    columns = tuple(Column(title, right=LEFT) for title in ("group", "setting", "value"))
    table = Table("As recorded with the result", "recorded", columns, rows)
    return [Fold("All settings of workload, protocol and server", (table,))]
