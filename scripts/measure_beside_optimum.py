"""Measure the CPU engine in 16 bit beside the one that optimum-intel exports of the same model, in the same pipeline.

    python -m scripts.measure_beside_optimum WORK_FOLDER PYTHON_OF_OPTIMUM [--rounds 8] [--size 1024x20]

PYTHON_OF_OPTIMUM is the interpreter of an environment with optimum-intel 2.2. The model is that of
measure_beside_llamacpp; threads, arithmetic, KV cache and scheduler are the same on both sides. This project moves an
engine's weights to huge pages once it is loaded, openvino_genai alone does not, so each graph is measured with and
without, each in a process of its own. Prints how many nodes of some kinds the plugin made of each graph, the memory
that each takes once it has decoded, tokens/s of decoding with 1, 8 and 32 requests (medians of turns), and the median
ratio to optimum-intel's graph without huge pages in the same turn.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import psutil

from pipelines.engines.openvino.build import MODEL_FILE
from pipelines.engines.openvino.runtime import (
    EngineFolder,
    OpenVinoOptions,
    drop_pages,
    kv_precision,
    properties,
    use_huge_pages,
)
from scripts.measure_beside_llamacpp import in_turns, make
from scripts.served import ROOT

PROMPT, NEW_TOKENS, KV_BLOCKS, REQUESTS = 16, 12, 1024, (1, 8, 32)
KINDS = ("FullyConnected", "LLMMLP", "QKVProjection")
EXPORT = """
import sys
from optimum.intel import OVModelForCausalLM
model, out = sys.argv[1:]
OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False).save_pretrained(out)
"""


def rate(pipeline: genai.ContinuousBatchingPipeline, requests: int) -> float:
    """Return tokens/s of decoding, without the prompts."""
    config = genai.GenerationConfig(max_new_tokens=NEW_TOKENS, eos_token_id=0, stop_token_ids={0}, ignore_eos=True)
    numbers = np.random.default_rng(1)
    handles = [
        pipeline.add_request(number, ov.Tensor(numbers.integers(5, 30_000, (1, PROMPT))), config)
        for number in range(requests)
    ]
    pipeline.step()
    start, steps = time.perf_counter(), 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        steps += 1
    del handles
    return requests * steps / (time.perf_counter() - start)


def kinds(folder: Path, chosen: dict[str, Any]) -> str:
    """Return how many nodes of some kinds the plugin makes of a graph, in words."""
    nodes = ov.Core().compile_model(folder / MODEL_FILE, "CPU", chosen).get_runtime_model().get_ops()
    counts = Counter(node.get_rt_info()["layerType"].astype(str) for node in nodes)
    return ", ".join(f"{kind} {counts[kind]}" for kind in KINDS)


def serve(
    folder: Path, chosen: dict[str, Any], huge_pages: bool, pipe: Connection, measured: Callable[..., float] = rate
) -> None:
    """Load a folder, send the MiB it takes, then answer each load (a number of requests) with its figure; 0 ends it."""
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2048, max(REQUESTS)
    scheduler.cache_size, scheduler.num_kv_blocks = 0, KV_BLOCKS
    scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = False, True
    before = psutil.Process().memory_info()
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", chosen)
    rate(pipeline, max(REQUESTS))
    if huge_pages:
        drop_pages((folder / MODEL_FILE).with_suffix(".bin"))
        use_huge_pages()
    after = psutil.Process().memory_info()
    pipe.send((after.rss - after.shared - before.rss + before.shared) / 2**20)
    while load := pipe.recv():
        pipe.send(measured(pipeline, load))


def asked(side: Connection, load: Any) -> float:
    """Return the figure that a process of `serve` measures, e.g. tokens/s."""
    side.send(load)
    return float(side.recv())


def measure(sides: dict[str, Connection], rounds: int) -> None:
    """Print tokens/s of the sides in turns, and their ratios to the last one."""
    for number in REQUESTS:
        rates, ratios = in_turns(sides, rounds, lambda side, _, number=number: asked(side, number))
        each = ", ".join(f"{side} {statistics.median(found):.1f} ({ratios[side]:.2f})" for side, found in rates.items())
        sys.stdout.write(f"{number:>3} requests: {each} tokens/s (ratio)\n")
        sys.stdout.flush()


def main() -> None:
    """Make the model and both engines, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=lambda text: Path(text).absolute())
    parser.add_argument("optimum")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--size", default="1024x20", help="hidden size x layers")
    options = parser.parse_args()
    work, model, theirs = options.work, options.work / f"llama_{options.size}", options.work / f"optimum_{options.size}"
    make(model, *map(int, options.size.split("x")))
    words = [f"model.path={model}", "quant=none", f"paths.store={work / 'artifacts'}", f"paths.runs={work}/runs"]
    subprocess.run([sys.executable, "-m", "pipelines", "build", *words], cwd=ROOT, check=True)
    (ours,) = (work / "artifacts" / "build").glob(f"{model.name}-none-*")
    if not theirs.is_dir():
        subprocess.run([options.optimum, "-c", EXPORT, str(model), str(theirs)], check=True)
    config = EngineFolder.load(ours).config
    run = OpenVinoOptions(num_threads=psutil.cpu_count(logical=False))
    chosen = properties(config, run, kv_precision(config, run))
    sides: dict[str, Connection] = {}
    for graph, folder in {"ours": ours, "optimum": theirs}.items():
        sys.stdout.write(f"{graph}: {kinds(folder, chosen)}\n")
        for pages in ("huge pages", "small pages"):
            sides[f"{graph}, {pages}"], its_end = get_context("spawn").Pipe()
            words_of = (folder, chosen, pages == "huge pages", its_end)
            get_context("spawn").Process(target=serve, args=words_of, daemon=True).start()
            sys.stdout.write(f"{graph}, {pages}: {sides[f'{graph}, {pages}'].recv():,.0f} MiB\n")
    measure(sides, options.rounds)
    for side in sides.values():
        side.send(0)


if __name__ == "__main__":
    main()
