"""Measure how a benchmark's figures depend on the length of the window: the spread of short windows in a long one.

    make benchmark quant=fp8 benchmark.duration_s=60
    python -m scripts.measure_windows artifacts/benchmark/ARTIFACT [--seconds 3 6 12]

Each load is cut into windows of so many seconds. Printed are the standard deviations of their responses/s, median TTFT,
p99 of TTFT and median ITL, in percent of the mean.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path
from statistics import fmean, median, stdev

from pipelines.domain.summary import SECOND, RequestColumns, ordered, percentile
from pipelines.loadgen.health import from_stored

COLUMNS = ("responses/s", "TTFT p50", "TTFT p99", "ITL p50")


def main() -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--seconds", type=float, nargs="+", default=[3, 6, 12])
    options = parser.parse_args()
    levels = json.loads((options.artifact / "benchmark.json").read_text())["levels"]
    for number, level in enumerate(levels, 1):
        with gzip.open(options.artifact / f"requests-{number}.json.gz", "rt") as file:
            data = json.load(file)
        begin, end = data["window_ns"]
        for seconds in options.seconds:
            rows = windows(from_stored(data), begin, end, seconds)
            spread = [100 * stdev(column) / fmean(column) for column in zip(*rows, strict=True)]
            figures = ", ".join(f"{name} {value:.0f} %" for name, value in zip(COLUMNS, spread, strict=True))
            sys.stdout.write(f"concurrency {level['concurrency']}, {len(rows)} windows of {seconds:g} s: {figures}\n")


def windows(requests: RequestColumns, begin: int, end: int, seconds: float) -> list[tuple[float, ...]]:
    """Return the figures of each window of so many seconds."""
    rows: list[tuple[float, ...]] = []
    step, fine, responses = round(seconds * SECOND), requests.fine(), requests.responses
    assert responses is not None
    for start in range(begin, end - step + 1, step):
        due = fine & (start <= requests.due) & (requests.due < start + step)
        arrived = int((responses.before(start + step) - responses.before(start))[fine].sum())
        ttft, itl = ordered(requests.ttft()[due]), ordered(requests.itl()[due])
        rows.append((arrived / seconds, median(ttft), percentile(ttft, 0.99), median(itl)))
    return rows


if __name__ == "__main__":
    main()
