"""Measure the cost of serving: output tokens per second through tritonserver against the engine driven directly.

    python -m scripts.measure_serving_overhead ENGINE TOKENIZER [--isl 128 --osl 128]

Both answer the same closed loop (`--concurrency` requests always in flight, random prompts, no end token) alternately,
`--rounds` times in one run, so that background load affects both. The server and its client share the machine with the
engine; the direct loop has it to itself. KV reuse is off on both sides: a pool full of cached prefixes slows down a
long-lived engine, whereas the direct one is new every time. Modes: `tensorrt_llm` and `ensemble`, each with whole and
with streamed responses.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpc

from pipelines.checkpoint.tokenizer import opened
from scripts.served import served

MODES = [(model, stream) for model in ("tensorrt_llm", "ensemble") for stream in (False, True)]
Request = dict[str, tuple[np.ndarray[Any, Any], str]]
"""Values with the batch dimension, and their Triton type, by the name of the tensor."""
WORDS = ["The", "capital", "of", "Feltex", "is", "tenkun", "and", "the", "organ", "of", "Sastreth", "is", "rurlex"]


@dataclass(frozen=True)
class Load:
    """A closed loop: total requests, requests in flight, and prompt and answer lengths in tokens."""

    requests: int
    concurrency: int
    isl: int
    osl: int


@dataclass
class Found:
    """Seconds and responses of one pass."""

    seconds: float
    responses: int = 0


class DirectLoop:
    """The engine's pipeline on its own, without a server."""

    def __init__(self, engine: Path) -> None:
        from pipelines.engines.openvino.pipeline import open_pipeline
        from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions

        self.folder = EngineFolder.load(engine)
        self._pipeline = open_pipeline(self.folder, OpenVinoOptions(enable_prefix_caching=False))

    def run(self, prompts: list[np.ndarray[Any, Any]], load: Load) -> Found:
        """Answer all prompts and measure the time."""
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = load.osl, True
        config.eos_token_id, config.stop_token_ids = 0, {0}
        running: list[Any] = []
        waiting = list(enumerate(prompts))
        started = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < load.concurrency:
                index, prompt = waiting.pop()
                running.append(self._pipeline.add_request(index, ov.Tensor(prompt), config))
            self._pipeline.step()
            running = [handle for handle in running if handle.get_status() == genai.GenerationStatus.RUNNING]
        return Found(time.perf_counter() - started)


def number(value: int) -> tuple[np.ndarray[Any, Any], str]:
    """Make a tensor of one number."""
    return np.array([[value]], dtype=np.int32), "INT32"


def truth(value: bool) -> tuple[np.ndarray[Any, Any], str]:
    """Make a tensor of one truth value."""
    return np.array([[value]]), "BOOL"


def core_inputs(prompt: np.ndarray[Any, Any], load: Load, stream: bool) -> Request:
    """Make the inputs of the model `tensorrt_llm`."""
    return {
        "input_ids": (prompt.astype(np.int32), "INT32"),
        "input_lengths": number(load.isl),
        "request_output_len": number(load.osl),
        "exclude_input_in_output": truth(True),
        "streaming": truth(stream),
    }


def text_inputs(text: str, load: Load, stream: bool) -> Request:
    """Make the inputs of the model `ensemble`."""
    return {
        "text_input": (np.array([[text.encode()]], dtype=object), "BYTES"),
        "max_tokens": number(load.osl),
        "end_id": number(-1),
        "exclude_input_in_output": truth(True),
        "stream": truth(stream),
    }


def tensor(name: str, values: np.ndarray[Any, Any], kind: str) -> Any:
    """Make one input tensor of NVIDIA's Python client."""
    made = grpc.InferInput(name, values.shape, kind)
    made.set_data_from_numpy(values)
    return made


async def asked_by_python(url: str, model: str, requests: list[Request], concurrency: int) -> Found:
    """Answer all requests through the server, asked by NVIDIA's Python client."""
    client = grpc.InferenceServerClient(url)
    waiting = [(index, [tensor(name, *each) for name, each in made.items()]) for index, made in enumerate(requests)]
    responses = 0

    async def lane() -> None:
        nonlocal responses
        sending: asyncio.Queue[Any] = asyncio.Queue()

        async def source() -> Any:
            while (request := await sending.get()) is not None:
                yield request

        answers = client.stream_infer(source())
        while waiting:
            index, inputs = waiting.pop()
            await sending.put(
                {"model_name": model, "inputs": inputs, "request_id": str(index), "enable_empty_final_response": True}
            )
            async for result, error in answers:
                if error is not None:
                    raise error
                responses += 1
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
        await sending.put(None)

    started = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(concurrency)))
    seconds = time.perf_counter() - started
    await client.close()
    return Found(seconds, responses)


def texts_of(tokenizer: Path, load: Load, random: np.random.Generator) -> list[str]:
    """Make texts of exactly isl tokens, including the special tokens at the start of a prompt."""
    coder = opened(tokenizer).tokenizer
    texts = []
    while len(texts) < load.requests:
        text = " ".join(random.choice(WORDS, size=load.isl))
        ids = coder.encode(text, add_special_tokens=False).ids[: load.isl - 1]
        text = coder.decode(ids, skip_special_tokens=False)
        if len(coder.encode(text).ids) == load.isl:
            texts.append(text)
    return texts


def one_pass(
    url: str, mode: tuple[str, bool], load: Load, arguments: argparse.Namespace, random: np.random.Generator
) -> Found:
    """Measure one mode once, with new prompts."""
    model, stream = mode
    if model == "ensemble":
        requests = [text_inputs(text, load, stream) for text in texts_of(arguments.tokenizer, load, random)]
    else:
        requests = [core_inputs(prompt, load, stream) for prompt in prompts_of(load, random)]
    return asyncio.run(asked_by_python(url, model, requests, load.concurrency))


def prompts_of(load: Load, random: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Make prompts of random token ids, each of shape [1, isl]."""
    return [random.integers(300, 1700, (1, load.isl)).astype(np.int64) for _ in range(load.requests)]


def measure_direct(arguments: argparse.Namespace, load: Load) -> float:
    """Return the seconds of the direct loop, run in a separate process so that its memory and threads are released."""
    command = [
        sys.executable,
        "-m",
        "scripts.measure_serving_overhead",
        str(arguments.engine),
        str(arguments.tokenizer),
        "--direct",
    ]
    for name in ("requests", "concurrency", "isl", "osl"):
        command += [f"--{name}", str(getattr(load, name))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Measure and print one line per mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("tokenizer", type=Path)
    for name, value in {"requests": 128, "concurrency": 32, "isl": 128, "osl": 128, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--direct", action="store_true", help="run only the direct loop and print its seconds")
    arguments = parser.parse_args()
    load = Load(arguments.requests, arguments.concurrency, arguments.isl, arguments.osl)
    random = np.random.default_rng()
    if arguments.direct:
        loop = DirectLoop(arguments.engine)
        loop.run(prompts_of(Load(8, 8, load.isl, 8), random), Load(8, 8, load.isl, 8))
        sys.stdout.write(f"{loop.run(prompts_of(load, random), load).seconds}\n")
        return
    report(arguments, load, random)


def report(arguments: argparse.Namespace, load: Load, random: np.random.Generator) -> None:
    """Measure the server and the direct loop alternately and print the medians."""
    tokens = load.requests * load.osl
    direct: list[float] = []
    ratios: dict[tuple[str, bool], list[float]] = {mode: [] for mode in MODES}
    rates: dict[tuple[str, bool], list[float]] = {mode: [] for mode in MODES}
    sizes: dict[tuple[str, bool], float] = {}
    with served(arguments.engine, arguments.tokenizer) as server:
        for mode in MODES:
            one_pass(server.grpc_url, mode, Load(32, 32, load.isl, 8), arguments, random)
        for turn in range(arguments.rounds):
            for mode in MODES:
                alone = tokens / measure_direct(arguments, load)
                result = one_pass(server.grpc_url, mode, load, arguments, random)
                direct.append(alone)
                rates[mode].append(tokens / result.seconds)
                ratios[mode].append(tokens / result.seconds / alone)
                sizes[mode] = tokens / result.responses
                sys.stderr.write(
                    f"round {turn + 1} of {arguments.rounds}, {mode[0]} {'stream' if mode[1] else 'whole'}: "
                    f"{rates[mode][-1]:,.0f} tokens/s, direct {alone:,.0f}\n"
                )
    sys.stdout.write(f"{load}; direct: {statistics.median(direct):,.0f} output tokens/s\n")
    for (model, stream), found_ratios in ratios.items():
        rate = statistics.median(rates[model, stream])
        ratio, low, high = statistics.median(found_ratios), min(found_ratios), max(found_ratios)
        sys.stdout.write(
            f"{model:13} {'stream' if stream else 'whole':7} {rate:9,.0f} tokens/s  {100 * ratio:5.1f} % of direct"
            f" ({100 * low:.0f}-{100 * high:.0f})  {sizes[model, stream]:6.1f} tokens per response\n"
        )


if __name__ == "__main__":
    main()
