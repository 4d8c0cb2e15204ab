"""Measure the load generator itself: rate, pacing and bias against a stub server whose own timestamps are known.

python scripts/measure_loadgen.py                  about 40 s, on a quiet machine
python scripts/measure_loadgen.py --seconds 30     longer, for published numbers
"""

import argparse
import gzip
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipelines.domain.benchmark import BenchmarkResult  # noqa: E402
from pipelines.domain.summary import percentile  # noqa: E402
from pipelines.loadgen.run import run_benchmark  # noqa: E402
from tests.support.load_records import RequestTiming, from_columns  # noqa: E402
from tests.support.load_settings import TINY_LLAMA, benchmark, workload  # noqa: E402
from tests.support.stub_triton import Running, running  # noqa: E402

MS = 1e-6


def main() -> None:
    """Run every measurement and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measured window")
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    seconds, processes = (options := parser.parse_args()).seconds, options.processes
    _say(f"rate:   {rate(seconds, processes)}")
    _say(f"pacing: {pacing(seconds)}")
    _say(f"bias:   {bias(seconds, None)}")
    _say(f"bias:   {bias(seconds, 20)}")
    _say(f"bias:   {bias(seconds, 100)}")


def rate(seconds: float, processes: int) -> str:
    """Measure streaming requests per second, with four tokens each and a timestamp for every token."""
    with running() as server, tempfile.TemporaryDirectory() as folder:
        result = _run(server, Path(folder), {"osl": 4}, {"concurrency": [32], "processes": processes}, seconds)
    level = result.levels[0]
    share = level.client.facts["cpu_share"]
    return (
        f"{level.summary.requests_per_s:.0f} requests/s, {level.summary.output_tokens_per_s:.0f} tokens/s "
        f"(4 tokens each, 32 in flight, {processes} client process at {share:.0%} of a CPU)"
    )


def pacing(seconds: float) -> str:
    """Measure deviations from a schedule of 100 requests/s, as seen by the client and by the server."""
    with running() as server, tempfile.TemporaryDirectory() as folder:
        _run(server, Path(folder), {"arrival": "constant", "osl": 4}, {"request_rate": [100]}, seconds)
        start, timings = _records(Path(folder))
        seen = server.stamps()
    own = sorted((t.sent_ns - t.intended_ns) * MS for t in timings)
    offsets = [(seen[t.index][0] - start - t.intended_ns) * MS for t in timings]
    middle = median(offsets)
    off = sorted(abs(offset - middle) for offset in offsets)
    return (
        f"100 requests/s: sent after schedule p50 {percentile(own, 0.5):.3f} p99 {percentile(own, 0.99):.3f} ms; "
        f"at the server {middle:.2f} ms later, deviation "
        f"p50 {percentile(off, 0.5):.3f} p99 {percentile(off, 0.99):.3f} ms"
    )


def bias(seconds: float, rate_per_s: int | None) -> str:
    """Measure the client's TTFT minus the TTFT by the server's own timestamps, and where the difference arises.

    Both ends run Python's gRPC, which takes about as long to hand over a message at the server as at the client; a
    server in C++ adds less. At a fixed rate the first token comes after 5 ms, by which time CPUs have gone to sleep;
    where waking them is slow (virtual machines), this adds to the difference. A single user who never waits shows the
    difference without that effect.
    """
    how = {"concurrency": [1]} if rate_per_s is None else {"request_rate": [rate_per_s]}
    arrival = "closed" if rate_per_s is None else "constant"
    with running("--ttft-ms", "0" if rate_per_s is None else "5") as server, tempfile.TemporaryDirectory() as folder:
        _run(server, Path(folder), {"arrival": arrival, "osl": 4}, how, seconds)
        start, timings = _records(Path(folder))
        seen = server.stamps()
    there = sorted((seen[t.index][0] - start - t.sent_ns) * MS for t in timings)
    back = sorted(((t.first_token_ns or 0) + start - seen[t.index][1]) * MS for t in timings)
    extra = sorted(
        (((t.first_token_ns or t.intended_ns) - t.intended_ns) - (seen[t.index][1] - seen[t.index][0])) * MS
        for t in timings
    )
    return (
        f"{'one user' if rate_per_s is None else f'{rate_per_s} requests/s'}: TTFT +{percentile(extra, 0.5):.3f} ms "
        f"(median) over the server's own: {percentile(there, 0.5):.3f} ms there, {percentile(back, 0.5):.3f} ms back"
    )


def _run(server: Running, folder: Path, work: dict[str, Any], how: dict[str, Any], seconds: float) -> BenchmarkResult:
    settings = benchmark(warmup_s=1, duration_s=seconds, **how)
    labels = {"model": "stub", "precision": "none"}
    return run_benchmark(
        server.url, workload(**work), settings, labels=labels, tokenizer_dir=TINY_LLAMA, out_dir=folder
    )


def _records(folder: Path) -> tuple[int, list[RequestTiming]]:
    """Return the start of the clock and the requests of the measured window."""
    with gzip.open(folder / "requests-1.json.gz", "rt") as file:
        data = json.load(file)
    begin, end = data["window_ns"]
    return data["start_monotonic_ns"], [t for t in from_columns(data) if begin <= t.intended_ns < end]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
