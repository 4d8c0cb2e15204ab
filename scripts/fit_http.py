"""Check `make calibrate` on OpenAI servers: fit one short run over HTTP, then predict twelve other loads.

    python -m scripts.fit_http FOLDER NAME=URL [NAME=URL ...] [--slots 32] [--seconds 6] [--rounds 2] [--out FOLDER]

FOLDER has the model and its tokenizer; the servers are measured in turn. The fit sees one run of `make benchmark` with
mixed lengths and `--users`; the prediction knows the requests of the other loads, but none of their times. Each of them
is measured `--rounds` times with the same requests: no prediction can be closer than one round is to the next.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipelines.domain.benchmark import RESULT, Summary
from pipelines.domain.errors import UserError
from pipelines.loadgen.run import run_benchmark
from pipelines.predict.performance.calibrate_command import fit_text, free_engine
from pipelines.predict.performance.fit import fit
from pipelines.predict.performance.measured import Measured, MeasuredLevel
from pipelines.predict.performance.modelled import run_trial, trial
from pipelines.predict.performance.read_measured import ELSEWHERE, from_result
from pipelines.settings.compose import load


def lengths(isl: int, osl: int) -> tuple[str, ...]:
    """Return settings for normal lengths with a standard deviation of a quarter of the mean.

    Identical requests in a closed loop would run in lockstep, which real users never do.
    """
    return (
        f"workload.isl={{distribution: normal, mean: {isl}, stdev: {isl // 4}, min: 16}}",
        f"workload.osl={{distribution: normal, mean: {osl}, stdev: {osl // 4}, min: 8}}",
    )


def closed(users: int, words: Sequence[str]) -> tuple[str, ...]:
    """Return the settings of a closed loop."""
    return (f"benchmark.concurrency={users}", *words)


def rate(arrival: str, share: float, words: Sequence[str]) -> tuple[str, ...]:
    """Return the settings of an open loop at a share of the capacity."""
    return (f"workload={arrival}", f"benchmark.request_rate=@{share}", *words)


MIXED = (
    "workload.isl={distribution: uniform, min: 16, max: 320}",
    "workload.osl={distribution: uniform, min: 8, max: 96}",
)
APART = (
    closed(1, lengths(128, 48)), closed(2, lengths(64, 64)), closed(3, lengths(256, 32)), closed(6, lengths(128, 64)),
    closed(8, lengths(64, 32)), closed(10, lengths(200, 48)), closed(16, lengths(100, 48)), closed(24, lengths(64, 64)),
    rate("poisson", 0.3, lengths(128, 48)), rate("poisson", 0.5, lengths(64, 64)),
    rate("poisson", 0.6, lengths(200, 32)), rate("constant", 0.5, lengths(128, 48)),
)  # fmt: skip
SHOWN = {"TTFT mean": ("ttft_s", "mean", 5.0), "TTFT P99": ("ttft_s", "p99", 10.0), "TPOT mean": ("itl_s", "mean", 2.0)}
"""Metrics by name: distribution, value, and the goal for the median error, %."""


def resolved(words: Sequence[str], capacity: float) -> list[str]:
    """Replace rates given as shares of the capacity with requests per second."""
    return [
        f"{word.split('@')[0]}{capacity * float(word.split('@')[1]):.2f}" if "@" in word else word for word in words
    ]


def measure(url: str, folder: Path, words: Sequence[str], place: Path) -> Measured:
    """Run one benchmark against a server."""
    settings = load((f"model.path={folder}", f"benchmark.url={url}", "benchmark.on_busy=mark", *words))
    place.mkdir(parents=True)
    labels = {"model": folder.name, "precision": "", "engine": ELSEWHERE}
    result = run_benchmark(
        url, settings.workload, settings.benchmark, tokenizer_dir=folder, labels=labels, out_dir=place
    )
    return from_result(result, place / RESULT)


def figure(of: MeasuredLevel | Summary, name: str) -> float:
    """Return a metric of a load in ms."""
    distribution, value, _ = SHOWN[name]
    return 1e3 * float(getattr(getattr(of, distribution), value))


def check(name: str, url: str, options: argparse.Namespace) -> None:
    """Measure a server, fit, predict and print."""
    window = (f"benchmark.duration_s={options.seconds}", "benchmark.warmup_s=1", "benchmark.min_requests=8")
    place = options.out / name
    run = measure(url, options.folder, (*MIXED, f"benchmark.concurrency=[{options.users}]", *window), place / "fit")
    capacity = max(level.requests_per_s for level in run.levels)
    apart: list[list[MeasuredLevel]] = [[] for _ in APART]
    for turn in range(options.rounds):
        for i, words in enumerate(APART):
            words = (*resolved(words, capacity), *window, f"workload.seed={7 + i}")
            try:
                apart[i] += measure(url, options.folder, words, place / f"{i}-{turn}").levels
            except UserError as error:  # the load generator was the limit
                sys.stdout.write(f"not used: {error}\n")
    settings = load((f"model.path={options.folder}", f"build.max_batch_size={options.slots}"))
    fitted = fit(run, free_engine(settings, run))
    sys.stdout.write(f"== {name}\n{fit_text(run, fitted, 'fitted to one run over HTTP')}\n\nkept apart:\n")
    rows = [("| load", *(cell for each in SHOWN for cell in (each, "modelled", "%", "rounds %")), "")]
    rows.append(("|---",) * (len(rows[0]) - 1) + ("",))
    errors: dict[str, list[float]] = {each: [] for each in SHOWN}
    between: dict[str, list[float]] = {each: [] for each in SHOWN}
    for rounds in filter(None, apart):
        modelled = run_trial(trial(rounds[0]), fitted.deployment)  # the requests of all rounds are equal
        cells = [f"| {rounds[0].load}"]
        for each in SHOWN:
            values, made = [figure(level, each) for level in rounds], figure(modelled, each)
            real = float(np.mean(values))
            errors[each].append(100 * (made / real - 1))
            between[each].append(100 * (max(values) / min(values) - 1))
            cells += [f"{real:.3g}", f"{made:.3g}", f"{errors[each][-1]:+.0f}", f"{between[each][-1]:.0f}"]
        rows.append((*cells, ""))
    sys.stdout.write("\n".join(" | ".join(row).strip() for row in rows) + "\n")
    for each in SHOWN:
        off, apart_by = np.abs(errors[each]), between[each]
        sys.stdout.write(
            f"{each}: median {np.median(off):.1f} %, mean {np.mean(off):.1f} % (goal {SHOWN[each][2]:g} %); "
            f"between rounds {np.median(apart_by):.1f} / {np.mean(apart_by):.1f} %\n"
        )


def main() -> None:
    """Check every server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--users", default="1,4,12", help="of the run that is fitted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs") / "fit-http")
    options = parser.parse_args()
    try:
        for server in options.servers:
            name, _, url = server.partition("=")
            check(name, url, options)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
