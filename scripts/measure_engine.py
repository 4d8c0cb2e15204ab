"""Output tokens per second of an engine by itself, without a server: any engine folder, through the engine port.

    python -m scripts.measure_engine ENGINE [--requests 64 --isl 128 --osl 128 --rounds 3]

All requests are handed over at once, with random prompts and no end token, and the engine batches them in flight. The
rounds after the first count. For engines of OpenVINO and, on a GPU machine, of TensorRT-LLM (its own Python runtime).
"""

from __future__ import annotations

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
    """Seconds of each round after one that warms up.

    Args:
        engine: the folder.
        requests: all at once.
        isl: tokens of each prompt.
        osl: tokens of each answer.
        rounds: that count.

    Raises:
        UserError: it is no engine, belongs elsewhere, or the lengths do not fit it.
        RuntimeError: an answer has not the length asked for.
    """
    limits, seconds = EngineLimits.load(engine), []
    with open_engine(limits.flavour).open(engine) as session:
        for number in range(rounds + 1):
            draw = random.Random(number)  # other prompts each time: none is found in the KV cache
            prompts = [[draw.randrange(4, limits.vocab_size) for _ in range(isl)] for _ in range(requests)]
            started = time.perf_counter()
            answers = session.generate(prompts, SamplingParams(osl), SilentProgress())
            seconds.append(time.perf_counter() - started)
            if any(len(answer.token_ids) != osl for answer in answers):
                raise RuntimeError(f"An answer has not the {osl} tokens that were asked for.")
    return seconds[1:]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    for name, default in (("requests", 64), ("isl", 128), ("osl", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    try:
        limits = EngineLimits.load(asked.engine)
        seconds = measure(asked.engine, asked.requests, asked.isl, asked.osl, asked.rounds)
    except UserError as error:
        sys.exit(f"error: {error}")
    rates = [asked.requests * asked.osl / each for each in seconds]
    sys.stdout.write(
        f"{limits.flavour} {limits.version}, {limits.architecture} {limits.quant_algo or '16 bit'}, "
        f"ISL {asked.isl}, OSL {asked.osl}, {asked.requests} requests at once, TP {limits.tp_size}: "
        f"{statistics.median(rates):,.0f} output tokens/s ({min(rates):,.0f} to {max(rates):,.0f}), "
        f"{asked.requests / statistics.median(seconds):.1f} requests/s (measured)\n"
    )


if __name__ == "__main__":
    main()
