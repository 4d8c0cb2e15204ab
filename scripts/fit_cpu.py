"""Check the performance model: fit it to a few loads on our own tritonserver, then predict and measure other loads.

    python -m scripts.fit_cpu [--seconds 8 --rounds 2 --out FOLDER] [key=value ...]

Builds and serves the bundled model through the normal flow, on one thread of the CPU engine, which leaves the other
core to server and client. Loads to fit and loads to predict are measured alternately, `--rounds` times with different
requests, so that drift of the machine affects both; predicted loads are never used in the fit. Rates are shares of the
throughput that 16 users get in a first run, which also fills the KV cache. The fit, all results and a table in Markdown
go to `--out`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import exp, log
from pathlib import Path
from typing import Any

from pipelines.domain.benchmark import RESULT, BenchmarkResult, Distribution
from pipelines.domain.errors import UserError
from pipelines.host.files import write_json, write_text
from pipelines.host.machine import gather, library_versions
from pipelines.loadgen.run import run_benchmark
from pipelines.plan.plan import make_plan
from pipelines.predict.performance.calibrate_command import (
    METRICS,
    TITLES,
    compared,
    comparison,
    fit_text,
    free_engine,
    measured_value,
)
from pipelines.predict.performance.deployment import fitted_model
from pipelines.predict.performance.fit import FittedLevel, fit
from pipelines.predict.performance.measured import Measured
from pipelines.predict.performance.modelled import ModelledDeployment, run_trial, trial
from pipelines.predict.performance.read_measured import from_result, joined, read_measured
from pipelines.run.session import run_target
from pipelines.serving.process import TritonServer
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.store.store import Store

BASE = ("quant=none", "engine=openvino", "engine.openvino.num_threads=1")
GOAL = 10.0
"""The target for the median error of each metric, in percent."""


def lengths(isl: int, osl: int) -> tuple[str, ...]:
    """Return settings for normal lengths with a standard deviation of a quarter of the mean.

    Identical requests in a closed loop would run in lockstep, which real users never do.
    """
    return (
        f"workload.isl={{distribution: normal, mean: {isl}, stdev: {isl // 4}, min: 16}}",
        f"workload.osl={{distribution: normal, mean: {osl}, stdev: {osl // 4}, min: 8}}",
    )


SHORT, LONG, TALK = lengths(128, 64), lengths(400, 48), lengths(64, 160)
SPREAD = (
    "workload.isl={distribution: uniform, min: 32, max: 512}",
    "workload.osl={distribution: uniform, min: 16, max: 128}",
)


def closed(users: int, words: Sequence[str]) -> tuple[str, ...]:
    """Return the settings of a closed loop."""
    return (f"benchmark.concurrency={users}", *words)


def rate(arrival: str, share: float, words: Sequence[str]) -> tuple[str, ...]:
    """Return the settings of an open loop at a share of the capacity."""
    return (f"workload={arrival}", f"benchmark.request_rate=@{share}", *words)


FITTED = (
    closed(1, SHORT), closed(4, SHORT), closed(16, SHORT), closed(32, SHORT), closed(1, LONG), closed(16, LONG),
    closed(6, TALK), rate("poisson", 0.6, SHORT), ("workload=burst", "benchmark.num_requests=24", *LONG),
)  # fmt: skip
UNSEEN = (
    closed(2, lengths(256, 64)), closed(8, lengths(100, 128)), closed(24, lengths(200, 100)), closed(12, SPREAD),
    rate("poisson", 0.4, lengths(200, 64)), rate("poisson", 0.7, lengths(100, 96)),
    (*rate("gamma", 0.45, SHORT), "workload.cv=2"), ("workload=burst", "benchmark.num_requests=48", *SHORT),
)  # fmt: skip
PILOT = closed(16, SHORT)


@dataclass(frozen=True, slots=True)
class Bench:
    """A running server and how its loads are measured."""

    url: str
    tokenizer: Path
    labels: dict[str, Any]
    words: tuple[str, ...]
    folder: Path

    def measure(self, name: str, words: Sequence[str], capacity: float, seed: int) -> Measured:
        """Run one load against the server."""
        settings = load((*self.words, *resolved(words, capacity), f"workload.seed={seed}"))
        place = self.folder / name
        place.mkdir(parents=True)
        result: BenchmarkResult = run_benchmark(
            self.url,
            settings.workload,
            settings.benchmark,
            tokenizer_dir=self.tokenizer,
            labels=self.labels,
            out_dir=place,
        )
        return from_result(result, place / RESULT)


def resolved(words: Sequence[str], capacity: float) -> list[str]:
    """Replace rates given as shares of the capacity with requests per second."""
    return [
        f"{word.split('@')[0]}{capacity * float(word.split('@')[1]):.2f}" if "@" in word else word for word in words
    ]


def measure_all(bench: Bench, rounds: int) -> tuple[list[Measured], list[list[Measured]]]:
    """Measure alternately the loads to fit (all rounds in one list) and the unseen loads (one list of rounds each)."""
    capacity = bench.measure("pilot", PILOT, 0.0, 1).levels[0].requests_per_s
    fitted: list[Measured] = []
    unseen: list[list[Measured]] = [[] for _ in UNSEEN]
    for number in range(rounds):
        for i in range(max(len(FITTED), len(UNSEEN))):
            if i < len(FITTED):
                fitted.append(bench.measure(f"fit-{i}-{number}", FITTED[i], capacity, 100 + number))
                say(fitted[-1], "fit")
            if i < len(UNSEEN):
                unseen[i].append(bench.measure(f"unseen-{i}-{number}", UNSEEN[i], capacity, 200 + number))
                say(unseen[i][-1], "to predict")
    return fitted, unseen


def say(measured: Measured, what: str) -> None:
    """Print one line about a measured level."""
    level = measured.levels[0]
    sys.stderr.write(f"{what:<10}  {level.load:<58}  {level.requests_per_s:6.1f} requests/s\n")


def predicted(unseen: Sequence[Sequence[Measured]], deployment: ModelledDeployment) -> list[list[FittedLevel]]:
    """Pair each unseen load's measurement with its prediction, which knows its requests and arrivals but no timings."""
    return [
        [FittedLevel(each.levels[0], run_trial(trial(each.levels[0]), deployment, each.percentiles)) for each in rounds]
        for rounds in unseen
    ]


def over_rounds(rounds: Sequence[FittedLevel]) -> FittedLevel:
    """Merge the rounds of a load into one row: geometric means of the measured and of the modelled values."""

    def mean(values: Sequence[float | None]) -> float | None:
        positive = [value for value in values if value]
        return exp(sum(map(log, positive)) / len(positive)) if positive else None

    def times(rounds: Sequence[Distribution]) -> Distribution:
        return replace(rounds[0], **{name: mean([getattr(d, name) for d in rounds]) for name in ("mean", "p50", "p95")})

    def merged(rounds: Sequence[Any]) -> Any:
        parts = {name: times([getattr(each, name) for each in rounds]) for name in ("ttft_s", "itl_s")}
        return replace(rounds[0], requests_per_s=mean([each.requests_per_s for each in rounds]), **parts)

    return FittedLevel(merged([row.level for row in rounds]), merged([row.modelled for row in rounds]))


def medians(rows: Sequence[FittedLevel]) -> dict[str, float]:
    """Return the median absolute error of each metric, in percent."""
    result = {}
    for name in METRICS:
        values = sorted(abs(row.errors()[name]) for row in rows if name in row.errors())
        result[name] = 100 * (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
    return result


def repeatability(rows: Sequence[Sequence[FittedLevel]]) -> dict[str, float]:
    """Return the median difference between two rounds over all loads, in percent; a model cannot do better."""
    result = {}
    for name in METRICS:
        values = []
        for rounds in rows:
            numbers = [measured_value(row, name) for row in rounds]
            if len(numbers) > 1:
                values.append(100 * (max(numbers) / min(numbers) - 1))
        result[name] = sorted(values)[len(values) // 2] if values else float("nan")
    return result


def markdown(rows: Sequence[Sequence[FittedLevel]], settings: Settings, command: str, machine: str, when: str) -> str:
    """Format the table for docs/benchmarks.md."""
    flat = [over_rounds(rounds) for rounds in rows]
    errors, apart = medians(flat), repeatability(rows)
    table = comparison(flat)
    lines = [
        f"`{command}`: {settings.model.label} {settings.variant.label}, engine openvino on one thread, TP 1, {machine},"
        f" {when}. Fitted to"
        f" {len(FITTED)} loads, {len(UNSEEN)} others predicted; a row is the mean of {len(rows[0])} rounds.",
        "",
        "| " + " | ".join(table[0]) + " |",
        "|" + "---|" * len(table[0]),
        *("| " + " | ".join(row) + " |" for row in table[1:-1]),
        "",
        "| | " + " | ".join(TITLES[name] for name in METRICS) + " |",
        "|" + "---|" * (len(METRICS) + 1),
        "| median error of the prediction, % | " + " | ".join(f"{errors[name]:.1f}" for name in METRICS) + " |",
        "| difference between two rounds of the measurement, %, median | "
        + " | ".join(f"{apart[name]:.1f}" for name in METRICS)
        + " |",
        "",
    ]
    return "\n".join(lines)


def serve_and_measure(arguments: argparse.Namespace) -> tuple[Settings, list[Measured], list[list[Measured]]]:
    """Build and serve the model, and measure all loads."""
    words = (*BASE, f"paths.store={arguments.store}", f"paths.runs={arguments.out / 'runs'}", *arguments.words)
    settings, machine = load(words), gather()
    store = Store(settings.paths.store)
    outcomes = run_target(make_plan(settings, "repository", store, machine), store, words).outcomes
    tokenizer = settings.model.folder
    if tokenizer is None:
        raise UserError(
            f"The model {settings.model.label} has no local folder; this script needs one.",
            todo="Use a bundled model, or set model.path.",
        )
    labels = {
        "model": settings.model.label,
        "precision": settings.variant.label,
        "engine": "openvino",
        "machine": machine.to_json(),
        "versions": library_versions(("openvino", "openvino-genai")),
    }
    protocol = (f"benchmark.duration_s={arguments.seconds}", "benchmark.warmup_s=1.5", "benchmark.min_requests=40")
    with TritonServer(outcomes[-1].artifact.path, settings.serving) as server:
        bench = Bench(server.grpc_url, tokenizer, labels, (*words, *protocol), arguments.out / "results")
        fitted, unseen = measure_all(bench, arguments.rounds)
    return settings, fitted, unseen


def model_name() -> str:
    """Return the processor's model name as Linux reports it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def measured_before(folder: Path) -> tuple[list[Measured], list[list[Measured]]]:
    """Read the results of an earlier run in order to fit them again."""
    fitted = [read_measured([path / RESULT]) for path in sorted(folder.glob("results/fit-*"))]
    rounds = [sorted(folder.glob(f"results/unseen-{i}-*")) for i in range(len(UNSEEN))]
    if not fitted or not all(rounds):
        raise UserError(f"--again {folder}: the folder does not contain a finished run of this script.")
    return fitted, [[read_measured([path / RESULT]) for path in paths] for paths in rounds]


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--seconds", type=float, default=8.0, help="measurement window of each load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--store", type=Path, default=Path("artifacts"))
    parser.add_argument(
        "--again", type=Path, metavar="FOLDER", help="fit the results of an earlier run; measures nothing"
    )
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    arguments.out = arguments.out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-fit-cpu"
    return arguments


def main() -> None:
    """Measure, fit, predict, compare and write the results."""
    arguments, began, load_average = parse(), time.monotonic(), os.getloadavg()[0]
    try:
        if arguments.again is not None:
            settings = load((*BASE, *arguments.words))
            fitted, unseen = measured_before(arguments.again)
        else:
            settings, fitted, unseen = serve_and_measure(arguments)
        measured = joined(fitted)
        result = fit(measured, free_engine(settings, measured))
        rows = predicted(unseen, result.deployment)
    except UserError as error:
        sys.exit(f"error: {error}")
    fitted_model(measured, result, library_versions(("numpy", "scipy", "numba"))).save(arguments.out / "fit.json")
    cores = measured.about["machine"]["cpu_count"]
    command = " ".join(["python -m scripts.fit_cpu", *(f"'{word}'" for word in arguments.words)])
    when = f"{str(measured.about['measured_at'])[:10]}, "
    when += "fitted again" if arguments.again else f"load average before the start {load_average:.1f}"
    table = markdown(rows, settings, command, f"{cores} cores of {model_name()}", when)
    write_text(arguments.out / "table.md", table)
    flat_rows = [over_rounds(each) for each in rows]
    errors = medians(flat_rows)
    write_json(arguments.out / "medians.json", errors, sort_keys=False)
    missed = [f"{TITLES[name]} {error:.1f} %" for name, error in errors.items() if error > GOAL]
    verdict = f"missed by {', '.join(missed)}" if missed else "met by every metric"
    sys.stdout.write(fit_text(measured, result, "each coefficient is fitted separately") + "\n\npredicted:\n")
    sys.stdout.write("\n".join(compared(flat_rows)) + f"\n\nmedian error of at most {GOAL:g} %: {verdict}\n")
    sys.stdout.write(f"{time.monotonic() - began:.0f} s; table: {arguments.out / 'table.md'}\n")


if __name__ == "__main__":
    main()
