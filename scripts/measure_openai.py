"""Measure what the OpenAI service adds: TTFT and requests/s through it and through Triton's gRPC, in one run.

    python -m scripts.measure_openai ENGINE TOKENIZER [--users 8 --requests 96 --isl 128 --osl 64 --rounds 3]
        [--beside CHECKOUT]

Both stream texts in a closed loop, in turns; the texts are new each time, and no answer ends early. gRPC asks
`ensemble`, which takes text as well. Pieces are what brings text: a token that is part of a character brings none yet,
for which `ensemble` sends an empty response and the OpenAI service none. With --beside, the service of another checkout
takes turns with this one's, before the same server. What the metrics cost is too little to be seen there; it is
measured in this process, on an answer whose tokens are there already.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import tritonclient.grpc.aio as grpc

from pipelines.serving import frontend
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.openai.generation import Completion, Prompt, TokenPart
from pipelines.serving.openai.inputs import ServedEngine
from pipelines.serving.openai.metrics import AnswerClock, ServiceMetrics
from pipelines.serving.openai.schema import CompletionRequest
from pipelines.serving.openai.tokenizer import ServedTokenizer
from pipelines.serving.ports import free_port
from pipelines.serving.process import TritonServer
from pipelines.serving.repository import ModelRepository
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


def another_service(stack: ExitStack, server: TritonServer, checkout: Path) -> tuple[OpenAiFrontend, str]:
    """Start the service of another checkout before the same server; return it and its address."""
    beside = copy(server)
    beside.ports = server.ports | {"openai_port": free_port("127.0.0.1", server.ports)}
    beside.log_file = server.log_file.with_suffix(".beside.log")
    own, frontend.PROJECT_ROOT = frontend.PROJECT_ROOT, checkout.absolute()
    service = stack.enter_context(OpenAiFrontend(beside))
    frontend.PROJECT_ROOT = own
    return service, beside.openai_url


async def answered(tokenizer: ServedTokenizer, clock: AnswerClock | None, tokens: int = 2000) -> float:
    """Turn tokens into text as the service does; return microseconds of processor time per token."""

    class Made:
        async def generate(self, _inputs: object) -> AsyncIterator[TokenPart]:
            for token in range(tokens):
                yield TokenPart((300 + token % 1000,))

    request = CompletionRequest(model="m", prompt="a", stream=True, ignore_eos=True)
    engine = ServedEngine(tokenizer, ModelRepository(Path(), (), "m", False, 1))
    completion = Completion(0, Prompt((1,), "a"), tokens + 1, engine, clock=clock)
    started = time.process_time()
    async for _ in completion.run(Made(), request):
        pass
    return 1e6 * (time.process_time() - started) / tokens


def cost_of_metrics(folder: Path) -> float:
    """Return what measuring an answer costs per token, microseconds: the median of 40 pairs."""
    tokenizer, metrics = ServedTokenizer(folder, adds_special=True), ServiceMetrics("m")
    pairs = [
        [asyncio.run(answered(tokenizer, clock)) for clock in (None, AnswerClock(metrics, time.perf_counter()))]
        for _ in range(40)
    ]
    return statistics.median(measured - plain for plain, measured in pairs)


def main() -> None:
    """Measure both ways in turns and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("tokenizer", type=Path)
    for name, value in {"users": 8, "requests": 96, "isl": 128, "osl": 64, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--beside", type=Path, help="another checkout, whose service takes turns with this one's")
    arguments = parser.parse_args()
    load, random = Load(arguments.requests, arguments.users, arguments.isl, arguments.osl), np.random.default_rng()
    with served(arguments.engine, arguments.tokenizer, openai=True) as server, ExitStack() as stack:
        services = {"OpenAI": (stack.enter_context(OpenAiFrontend(server)), server.openai_url)}
        if arguments.beside:
            services["OpenAI, beside"] = another_service(stack, server, arguments.beside)
        ways = {
            "gRPC, ensemble": lambda texts: through_grpc(server.grpc_url, texts, load),
            **{
                name: partial(through_service, *service, server.openai_model, load=load)
                for name, service in services.items()
            },
        }
        passes: dict[str, list[Found]] = {name: [] for name in ways}
        for count in range(arguments.rounds + 1):
            for name, way in ways.items():
                result = asyncio.run(way(texts_of(arguments.tokenizer, load, random)))
                passes[name] += [result] if count else []
    sys.stdout.write(f"metrics: {cost_of_metrics(arguments.tokenizer):.2f} us per token\n")
    for name, all_found in passes.items():
        first = statistics.median(1000 * each for result in all_found for each in result.first)
        rate = statistics.median(load.requests / result.seconds for result in all_found)
        sys.stdout.write(
            f"{name:15} TTFT p50 {first:6.1f} ms, {rate:6.1f} requests/s,"
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
