"""Measure the CPU engine beside the one that optimum-intel exports of the same model, in the same pipeline.

    python -m scripts.measure_against_optimum WORK_FOLDER PYTHON_OF_OPTIMUM [HIDDEN LAYERS ROUNDS]

PYTHON_OF_OPTIMUM is the interpreter of an environment that has optimum-intel 2.2 and no torchvision. The model is a
random Llama (1,024 x 20: 322 million parameters). Prints tokens/s of decoding with 1, 8 and 32 requests, medians of
rounds in turn, their ratio, and the anonymous memory of a process that has answered eight requests. Threads, the
arithmetic, KV cache and scheduler are the same on both sides; the rounding of activations is what its users get.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.runtime import EngineFolder, kv_precision, properties
from scripts.measure_fidelity import build, resident
from scripts.measure_streaming import SHAPES, make_model

THREADS, PROMPT, NEW_TOKENS, KV_BLOCKS = 2, 16, 48, 1024
REQUESTS = (1, 8, 32)
FORMATS = {"none": None, "int8_wo": {"bits": 8, "sym": True}, "int4_rtn": {"bits": 4, "sym": True, "group_size": 128}}
"""Ours, and the nearest that optimum-intel quantizes to without data."""
EXPORT = """
import json, sys
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
model, out, chosen = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
how = {"quantization_config": OVWeightQuantizationConfig(**chosen)} if chosen else {"load_in_8bit": False}
OVModelForCausalLM.from_pretrained(model, export=True, compile=False, **how).save_pretrained(out)
"""


def opened(folder: str, chosen: dict[str, Any]) -> genai.ContinuousBatchingPipeline:
    """Load a folder with openvino_model.xml."""
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2048, max(REQUESTS)
    scheduler.cache_size, scheduler.num_kv_blocks = 0, KV_BLOCKS
    scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = False, True
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", chosen)


def rate(pipeline: genai.ContinuousBatchingPipeline, requests: int, new_tokens: int = NEW_TOKENS) -> float:
    """Return tokens/s of decoding, without the prompts."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.eos_token_id, config.stop_token_ids, config.ignore_eos = new_tokens, 0, {0}, True
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


def measured(sides: dict[str, tuple[str, dict[str, Any]]], rounds: int) -> dict[str, dict[int, float]]:
    """Return the median rate of each side by number of requests."""
    pipelines = {side: opened(*where) for side, where in sides.items()}
    found: dict[str, dict[int, list[float]]] = {side: {number: [] for number in REQUESTS} for side in sides}
    for number in REQUESTS:
        for pipeline in pipelines.values():
            rate(pipeline, number, 4)
        for _ in range(rounds):
            for side, pipeline in pipelines.items():
                found[side][number].append(rate(pipeline, number))
    return {side: {number: statistics.median(of) for number, of in rates.items()} for side, rates in found.items()}


def main() -> None:
    """Make the model and both engines of each format, then measure."""
    if sys.argv[1] == "memory":
        pipeline = opened(sys.argv[2], json.loads(sys.argv[3]))
        rate(pipeline, 8, 8)
        sys.stdout.write(str(resident("RssAnon")))
        return
    work, optimum = Path(sys.argv[1]).absolute(), sys.argv[2]
    hidden, layers, rounds = (int(word) for word in (*sys.argv[3:], *("1024", "20", "5")[len(sys.argv) - 3 :]))
    model = work / f"llama_{hidden}x{layers}"
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "num_hidden_layers": layers}
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "head_dim": 64, "vocab_size": 32_000}
    make_model(model, {**SHAPES["llama_8b"], "max_position_embeddings": 2048, **heads, **sizes})
    sys.stdout.write("format    requests  ours tokens/s  optimum tokens/s  ratio    ours MiB  optimum MiB\n")
    for qformat, chosen in FORMATS.items():
        ours, theirs = build(work, model, qformat), work / f"optimum_{hidden}x{layers}_{qformat}"
        if not (theirs / "openvino_model.xml").is_file():
            subprocess.run([optimum, "-c", EXPORT, str(model), str(theirs), json.dumps(chosen)], check=True)
        config, options = EngineFolder.load(ours).config, OpenVinoOptions(num_threads=THREADS)
        usual = properties(config, options, kv_precision(config, options))
        same = {name: value for name, value in usual.items() if name != "DYNAMIC_QUANTIZATION_GROUP_SIZE"}
        sides = {"ours": (str(ours), usual), "optimum": (str(theirs), same)}
        rates, memory = measured(sides, rounds), {side: _memory(*where) for side, where in sides.items()}
        for number in REQUESTS:
            mine, other = rates["ours"][number], rates["optimum"][number]
            sys.stdout.write(
                f"{qformat:<9} {number:8} {mine:14.1f} {other:17.1f} {mine / other:6.2f}"
                f" {memory['ours']:11,.0f} {memory['optimum']:12,.0f}\n"
            )
            sys.stdout.flush()


def _memory(folder: str, chosen: dict[str, Any]) -> float:
    words = [sys.executable, "-m", "scripts.measure_against_optimum", "memory", folder, json.dumps(chosen)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
