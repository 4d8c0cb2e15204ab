"""Measure what the OpenAI service adds: TTFT and requests/s through it and through Triton's gRPC, in one run.

    python -m scripts.measure_openai ENGINE TOKENIZER [--users 8 --requests 96 --isl 128 --osl 64 --rounds 3]

Both stream texts in a closed loop, in turns; the texts are new each time, and no answer ends early. gRPC asks
`ensemble`, which takes text as well. Pieces are what brings text: a token that is part of a character brings none yet,
for which `ensemble` sends an empty response and the OpenAI service none.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import tritonclient.grpc.aio as grpc

from pipelines.serving.config import ServingSettings
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.process import TritonServer
from scripts.measure_serving_overhead import Load, text_inputs, texts_of
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec
from triton_repo.write import write_repository

Pieces = Callable[[str], AsyncIterator[None]]
"""Ask for one text and yield when a piece of the answer has arrived."""


@dataclass
class Found:
    """What a pass found: seconds to the first piece of each answer, pieces of all answers, and seconds in all."""

    first: list[float] = field(default_factory=list)
    pieces: int = 0
    seconds: float = 0.0


async def closed_loop(texts: list[str], users: int, ask: Pieces) -> Found:
    """Answer all texts, with one request of each user at a time."""
    found, waiting = Found(), list(texts)

    async def user() -> None:
        while waiting:
            text, asked = waiting.pop(), time.perf_counter()
            begun = False
            async for _ in ask(text):
                if not begun:
                    begun = True
                    found.first.append(time.perf_counter() - asked)
                found.pieces += 1

    started = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(users)))
    found.seconds = time.perf_counter() - started
    return found


async def through_grpc(url: str, texts: list[str], load: Load) -> Found:
    """Ask `ensemble`."""
    client = grpc.InferenceServerClient(url)

    async def ask(text: str) -> AsyncIterator[None]:
        async def request() -> AsyncIterator[dict[str, object]]:
            inputs = text_inputs(text, load, stream=True)
            yield {"model_name": "ensemble", "inputs": inputs, "enable_empty_final_response": True}

        async for result, error in client.stream_infer(request()):
            if error is not None:
                raise error
            if (part := result.as_numpy("text_output")) is not None and part.reshape(-1)[0]:
                yield
            if result.get_response().parameters["triton_final_response"].bool_param:
                return

    found = await closed_loop(texts, load.concurrency, ask)
    await client.close()
    return found


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


def main() -> None:
    """Measure both ways in turns and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("tokenizer", type=Path)
    for name, value in {"users": 8, "requests": 96, "isl": 128, "osl": 64, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    load, random = Load(asked.requests, asked.users, asked.isl, asked.osl), np.random.default_rng()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        spec = RepositorySpec(flavour="openvino", label="measured", variant="measured", enable_kv_cache_reuse=False)
        write_repository(
            repository,
            engine_dir=asked.engine,
            tokenizer_dir=asked.tokenizer,
            settings=TritonSettings(),
            spec=spec,
            made_from={},
        )
        with TritonServer(repository, ServingSettings(openai=True)) as server, OpenAiFrontend(server):
            ways = {
                "gRPC, ensemble": lambda texts: through_grpc(server.grpc_url, texts, load),
                "OpenAI": lambda texts: through_openai(server.openai_url, server.openai_model, texts, load),
            }
            passes: dict[str, list[Found]] = {name: [] for name in ways}
            for count in range(asked.rounds + 1):
                for name, way in ways.items():
                    found = asyncio.run(way(texts_of(asked.tokenizer, load, random)))
                    passes[name] += [found] if count else []
    for name, all_found in passes.items():
        first = statistics.median(1000 * each for found in all_found for each in found.first)
        rate = statistics.median(load.requests / found.seconds for found in all_found)
        sys.stdout.write(
            f"{name:15} TTFT p50 {first:6.1f} ms, {rate:6.1f} requests/s,"
            f" {all_found[0].pieces / load.requests:.1f} pieces per answer\n"
        )


if __name__ == "__main__":
    main()
