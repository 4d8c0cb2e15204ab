"""Measure the simulator's speed in request-iterations (requests per iteration, summed) per second of CPU time.

python scripts/bench_simulator.py                  about 10 s; longer the first time, when numba compiles
python scripts/bench_simulator.py --repeat 20      for published numbers
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipelines.predict.simulator.backend import Backend  # noqa: E402
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits  # noqa: E402
from pipelines.predict.simulator.run import IterationCost, simulate  # noqa: E402

COST = IterationCost(
    token_compute=3e-5, row_compute=1e-6, weights=4e-3, head_weights=3e-4, prefill_attention=1e-10, kv_token=4e-8,
    token=1e-7, fixed=1e-3, sequence=1e-5, prefill=1e-4,
)  # fmt: skip
Case = tuple[SchedulerLimits, OfferedLoad]
BACKENDS: tuple[Backend, ...] = ("numba", "numpy")


def closed(users: int, requests: int, isl: int, osl: int) -> OfferedLoad:
    """Make a closed loop of identical requests."""
    return OfferedLoad(np.full(requests, isl), np.full(requests, osl), users=users, client_delay=0.01)


def poisson(rate: float, requests: int, seed: int = 0) -> OfferedLoad:
    """Make an open loop of requests with random lengths."""
    rng = np.random.default_rng(seed)
    isl, osl = rng.integers(100, 3000, requests), rng.integers(10, 400, requests)
    return OfferedLoad(isl, osl, arrival=np.cumsum(rng.exponential(1 / rate, requests)))


CASES: dict[str, Case] = {
    "64 users, 2000/200 tokens, 640 requests": (SchedulerLimits(slots=256), closed(64, 640, 2000, 200)),
    "256 users, 128/20 tokens, 2,560 requests": (SchedulerLimits(slots=256), closed(256, 2560, 128, 20)),
    "8 users, 512/1000 tokens, 80 requests": (SchedulerLimits(slots=256), closed(8, 80, 512, 1000)),
    "Poisson 10/s, random lengths, 2,000 requests": (SchedulerLimits(slots=256), poisson(10, 2000)),
    "the same in chunks of 512": (SchedulerLimits("inflight_chunked", 256, max_num_tokens=512), poisson(10, 2000)),
    "the same, blocks on demand, pausing": (
        SchedulerLimits(slots=256, admission="MAX_UTILIZATION", kv_blocks=800),
        poisson(10, 2000),
    ),
}


def seconds(case: Case, backend: Backend, repeat: int, *, iterations: bool = False) -> tuple[float, int]:
    """Return the best time of several runs, and the request-iterations of one run."""
    best, work = float("inf"), 0
    for _ in range(repeat + 1):  # the first run also compiles
        start = time.process_time()
        work = simulate(*case, COST, backend=backend, iterations=iterations).request_iterations
        best = min(best, time.process_time() - start)
    return best, work


def sweep(backend: Backend) -> float:
    """Time a sweep of 6 layouts at 20 rates with 2,000 requests each, in seconds."""
    start = time.process_time()
    for layout in range(6):
        cost = COST if layout == 0 else IterationCost(**{**_fields(), "weights": COST.weights / (layout + 1)})
        for rate in np.linspace(1, 12, 20):
            simulate(
                SchedulerLimits(slots=256, kv_blocks=4000 * (layout + 1)), poisson(rate, 2000), cost, backend=backend
            )
    return time.process_time() - start


def _fields() -> dict[str, float]:
    return {name: getattr(COST, name) for name in COST.__slots__}


def main() -> None:
    """Run every case and print the results as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each case; the best counts")
    repeat = parser.parse_args().repeat
    print("| load | request-iterations | numba ms | 1e6/s | numpy ms | 1e6/s |\n|---|---|---|---|---|---|")  # noqa: T201
    first = next(iter(CASES))
    named = {**CASES, f"{first}, with the table of iterations": CASES[first]}
    for name, case in named.items():
        cells = []
        for backend in BACKENDS:
            taken, work = seconds(case, backend, repeat, iterations="table" in name)
            cells += [f"{1e3 * taken:.2f}", f"{work / taken / 1e6:,.1f}"]
        print(f"| {name} | {work:,} | {' | '.join(cells)} |", flush=True)  # noqa: T201
    for backend in BACKENDS:
        print(f"6 layouts x 20 rates x 2,000 requests with {backend}: {sweep(backend):.2f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
