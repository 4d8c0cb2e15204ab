"""Group the benchmarks that are comparable: the same load on the same kind of deployment and machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipelines.domain.benchmark import BenchmarkResult
from pipelines.report.data import BenchmarkRun, FormatReport, Workload
from pipelines.store.store import canonical

_MACHINE = ("platform", "cpu_count", "cpu", "memory_bytes", "gpus")
"""Facts that distinguish two machines; the rest (load, names) changes from run to run."""


def run_key(result: BenchmarkResult) -> str:
    """Return a key that is equal for runs that may be compared or, in the same format, replace each other."""
    return canonical(
        {
            "model": result.model,
            "engine": result.engine,
            "tp": result.tp_size,
            "world": result.world_size,
            "gpus": result.gpus,
            "workload": dict(result.workload),
            "arrivals": sorted({level.arrival for level in result.levels}),
            "machine": machine_facts(result.machine),
        }
    )


def machine_facts(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a machine that matter for a comparison."""
    return {name: machine[name] for name in _MACHINE if name in machine}


def group_runs(formats: Iterable[FormatReport]) -> tuple[Workload, ...]:
    """Group runs by workload, one per format, with the most recently measured workload first."""
    groups: dict[str, list[BenchmarkRun]] = {}
    for item in formats:
        for run in item.runs:
            groups.setdefault(run_key(run.result), []).append(run)
    ordered = sorted(groups.values(), key=lambda runs: max(run.piece.created for run in runs), reverse=True)
    titles = _titles(ordered)
    return tuple(
        Workload(title, runs[0].result.model, tuple(runs)) for title, runs in zip(titles, ordered, strict=True)
    )


def _titles(groups: list[list[BenchmarkRun]]) -> list[str]:
    """Return the names of the workloads, with details that distinguish equal names."""
    names = [str(runs[0].result.workload.get("name", "workload")) for runs in groups]
    titles = []
    for name, runs in zip(names, groups, strict=True):
        result, same = runs[0].result, names.count(name) > 1
        tail = f" ({result.model}, {result.engine}, TP {result.tp_size}, {result.measured_at})" if same else ""
        titles.append(name + tail)
    return titles


def spread(run: BenchmarkRun, load: str) -> tuple[float, float] | None:
    """Return lowest and highest output tokens/s of a load over repeated runs; None if it was measured once."""
    results = (run.result, *run.repeats)
    levels = [level for result in results for level in result.levels if level.load == load and level.counts]
    rates = [level.summary.output_tokens_per_s for level in levels]
    return (min(rates), max(rates)) if len(rates) > 1 else None
