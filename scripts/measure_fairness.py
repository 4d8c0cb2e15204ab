"""TTFT of a good client while others attack the OpenAI service, as a ratio to its TTFT in the same run without them.

    python -m scripts.measure_fairness [--seconds 5] [--rounds 4] [--attackers 2] [--host 0.0.0.0] [ATTACK...]

Quiet and attacked spells take turns, so that a machine that grows busier changes both. Attackers are processes of their
own in the scheduler's idle class, which gives way at once: on another machine their work would cost the server nothing.
What the server does for them is not excluded.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

from tests.torture.attacks import ATTACKS, PROMPT, Front, served

PAUSE_S = 0.01


def main(words: list[str]) -> int:
    """Measure every attack that was named and print one line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5, help="length of a spell (default: 5)")
    parser.add_argument("--rounds", type=int, default=4, help="spells of each kind per attack (default: 4)")
    parser.add_argument("--attackers", type=int, default=2, help="attackers at a time (default: 2)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 puts nginx in front (default: 127.0.0.1)")
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help="names of attacks (default: all)")
    arguments = parser.parse_args(words)
    names = arguments.attacks or [attack.__name__ for attack in ATTACKS]
    header = f"{'quiet p50':>9} {'p99 ms':>7} {'attacked p50':>12} {'p99 ms':>7} {'p99 ratio':>9}"
    sys.stdout.write(f"{'attack':16} {'requests':>8} {header}\n")
    with served(arguments.host) as front:
        spell(front, arguments.seconds)  # first requests pay for connections and kernels
        for name in names:
            quiet: list[float] = []
            attacked: list[float] = []
            for _ in range(arguments.rounds):
                quiet += spell(front, arguments.seconds)
                with attackers(name, front, arguments.attackers):
                    attacked += spell(front, arguments.seconds)
            a, b = _p99(quiet), _p99(attacked)
            sys.stdout.write(
                f"{name:16} {len(attacked):8,} {statistics.median(quiet):9.1f} {a:7.1f} "
                f"{statistics.median(attacked):12.1f} {b:7.1f} {b / a:9.2f}\n"
            )
            sys.stdout.flush()
    return 0


def spell(front: Front, seconds: float) -> list[float]:
    """Ask one streamed question after the other for some seconds; return each TTFT in milliseconds."""
    until, times = time.monotonic() + seconds, []
    while time.monotonic() < until:
        times.append(time_to_first_token(front) * 1000)
        time.sleep(PAUSE_S)
    return times


def time_to_first_token(front: Front) -> float:
    """Return the seconds from sending a streamed completion to its first piece of text."""
    connection = http.client.HTTPConnection(front.host, front.port, timeout=120)
    try:
        begun = time.perf_counter()
        connection.request(
            "POST", "/v1/completions", json.dumps(PROMPT | {"stream": True}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200 or not answer.readline().startswith(b"data: {"):
            raise RuntimeError(f"the good client got status {answer.status}")
        took = time.perf_counter() - begun
        answer.read()
        return took
    finally:
        connection.close()


@contextmanager
def attackers(name: str, front: Front, count: int) -> Iterator[None]:
    """Keep some attackers at work."""
    context = multiprocessing.get_context("spawn")
    end = context.Event()
    ready = context.Barrier(count + 1)
    at_work = [context.Process(target=_attack, args=(name, front, seed, ready, end)) for seed in range(count)]
    for process in at_work:
        process.start()
    try:
        ready.wait(60)  # importing this module takes processor time of the good client
        yield
    finally:
        end.set()
        for process in at_work:
            process.join()


def _attack(name: str, front: Front, seed: int, ready: Barrier, end: Event) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # gives way at once, as another machine would
    os.setsid()
    with suppress(OSError):  # a session has its share of the processors however idle its processes are
        Path("/proc/self/autogroup").write_text("19")
    rng = random.Random(seed)
    (attack,) = (attack for attack in ATTACKS if attack.__name__ == name)
    ready.wait(60)
    parent = os.getppid()
    while not end.is_set() and os.getppid() == parent:  # nobody else ends it, in a session of its own
        attack(front, rng)


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
