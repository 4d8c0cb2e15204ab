"""Measure what the OpenAI service adds: TTFT and requests/s through it and through Triton's gRPC, in one run.

    python -m scripts.measure_openai ENGINE TOKENIZER [--users 8 --requests 96 --isl 128 --osl 64 --rounds 3]

Both stream texts in a closed loop, in turns; the texts are new each time, and no answer ends early. gRPC asks
`ensemble`, which takes text as well. Pieces are what brings text: a token that is part of a character brings none yet,
for which `ensemble` sends an empty response and the OpenAI service none.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import tritonclient.grpc.aio as grpc

from pipelines.serving.frontend import OpenAiFrontend
from scripts.measure_serving_overhead import Load, tensor, text_inputs, texts_of
from scripts.served import served

Pieces = Callable[[str], AsyncIterator[None]]
"""Ask for one text and yield when a piece of the answer has arrived."""


@dataclass
class Found:
    """What a pass found: seconds to the first piece of each answer, pieces of all answers, and seconds in all.

    Of the service, also the processor time, in seconds.
    """

    first: list[float] = field(default_factory=list)
    pieces: int = 0
    seconds: float = 0.0
    cpu: float = 0.0


async def closed_loop(texts: list[str], users: int, ask: Pieces) -> Found:
    """Answer all texts, with one request of each user at a time."""
    result, waiting = Found(), list(texts)

    async def user() -> None:
        while waiting:
            text, sent = waiting.pop(), time.perf_counter()
            begun = False
            async for _ in ask(text):
                if not begun:
                    begun = True
                    result.first.append(time.perf_counter() - sent)
                result.pieces += 1

    started = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(users)))
    result.seconds = time.perf_counter() - started
    return result


async def through_grpc(url: str, texts: list[str], load: Load) -> Found:
    """Ask `ensemble`."""
    client = grpc.InferenceServerClient(url)

    async def ask(text: str) -> AsyncIterator[None]:
        async def request() -> AsyncIterator[dict[str, object]]:
            inputs = [tensor(name, *value) for name, value in text_inputs(text, load, stream=True).items()]
            yield {"model_name": "ensemble", "inputs": inputs}

        async for result, error in client.stream_infer(request()):
            if error is not None:
                raise error
            if (part := result.as_numpy("text_output")) is not None and part.reshape(-1)[0]:
                yield

    passed = await closed_loop(texts, load.concurrency, ask)
    await client.close()
    return passed


async def through_openai(url: str, model: str, texts: list[str], load: Load) -> Found:
    """Ask /v1/completions."""
    async with aiohttp.ClientSession() as session:

        async def ask(text: str) -> AsyncIterator[None]:
            body = {"model": model, "prompt": text, "max_tokens": load.osl, "ignore_eos": True, "stream": True}
            async with session.post(f"{url}/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield

        return await closed_loop(texts, load.concurrency, ask)


async def through_service(service: OpenAiFrontend, url: str, model: str, texts: list[str], load: Load) -> Found:
    """Ask a service, and watch its process."""
    process = psutil.Process(service._process.pid)
    before = process.cpu_times()
    result = await through_openai(url, model, texts, load)
    after = process.cpu_times()
    result.cpu = after.user + after.system - before.user - before.system
    return result


def main() -> None:
    """Measure both ways in turns and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("tokenizer", type=Path)
    for name, value in {"users": 8, "requests": 96, "isl": 128, "osl": 64, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    load, random = Load(arguments.requests, arguments.users, arguments.isl, arguments.osl), np.random.default_rng()
    with served(arguments.engine, arguments.tokenizer, openai=True) as server, OpenAiFrontend(server) as service:
        ways = {
            "gRPC, ensemble": lambda texts: through_grpc(server.grpc_url, texts, load),
            "OpenAI": partial(through_service, service, server.openai_url, server.openai_model, load=load),
        }
        passes: dict[str, list[Found]] = {name: [] for name in ways}
        for count in range(arguments.rounds + 1):
            for name, way in ways.items():
                result = asyncio.run(way(texts_of(arguments.tokenizer, load, random)))
                passes[name] += [result] if count else []
    for name, all_found in passes.items():
        first = statistics.median(1000 * each for result in all_found for each in result.first)
        rate = statistics.median(load.requests / result.seconds for result in all_found)
        sys.stdout.write(
            f"{name:14} TTFT p50 {first:6.1f} ms, {rate:6.1f} requests/s,"
            f" {all_found[0].pieces / load.requests:.1f} pieces per answer"
        )
        cpu = sorted(1e6 * result.cpu / result.pieces for result in all_found)
        sys.stdout.write(
            f", {statistics.median(cpu):.0f} us of its processor time per piece ({cpu[0]:.0f} to {cpu[-1]:.0f})\n"
            if cpu[-1]
            else "\n"
        )


if __name__ == "__main__":
    main()
