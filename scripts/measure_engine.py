"""Measure the output tokens per second of any engine folder through the engine port, without a server.

    python -m scripts.measure_engine ENGINE [--requests 64 --isl 128 --osl 128 --rounds 3]

All requests are submitted at once, with random prompts and no end token, and the engine batches them in flight. The
first round is a warm-up and not counted. Works for OpenVINO engines and, on a GPU machine, for TensorRT-LLM engines
(through TensorRT-LLM's own Python runtime).
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.engines.limits import EngineLimits
from pipelines.engines.port import SamplingParams
from pipelines.engines.registry import open_engine


def measure(engine: Path, requests: int, isl: int, osl: int, rounds: int) -> list[float]:
    """Return the seconds of each round, after one warm-up round.

    Raises:
        UserError: the folder is not an engine, cannot run on this machine, or does not support these lengths.
        RuntimeError: an answer does not have the requested length.
    """
    limits, seconds = EngineLimits.load(engine), []
    with open_engine(limits.flavour).open(engine) as session:
        for number in range(rounds + 1):
            draw = random.Random(number)  # new prompts in each round, so that none is found in the KV cache
            prompts = [[draw.randrange(4, limits.vocab_size) for _ in range(isl)] for _ in range(requests)]
            started = time.perf_counter()
            answers = session.generate(prompts, SamplingParams(osl), SilentProgress())
            seconds.append(time.perf_counter() - started)
            if any(len(answer.token_ids) != osl for answer in answers):
                raise RuntimeError(f"An answer does not have the requested {osl} tokens.")
    return seconds[1:]


def main() -> None:
    """Measure the engine given on the command line and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    for name, default in (("requests", 64), ("isl", 128), ("osl", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    try:
        limits = EngineLimits.load(arguments.engine)
        seconds = measure(arguments.engine, arguments.requests, arguments.isl, arguments.osl, arguments.rounds)
    except UserError as error:
        sys.exit(f"error: {error}")
    rates = [arguments.requests * arguments.osl / each for each in seconds]
    sys.stdout.write(
        f"{limits.flavour} {limits.version}, {limits.architecture} {limits.quant_algo or '16 bit'}, "
        f"ISL {arguments.isl}, OSL {arguments.osl}, {arguments.requests} requests at once, TP {limits.tp_size}: "
        f"{statistics.median(rates):,.0f} output tokens/s ({min(rates):,.0f} to {max(rates):,.0f}), "
        f"{arguments.requests / statistics.median(seconds):.1f} requests/s (measured)\n"
    )


if __name__ == "__main__":
    main()
