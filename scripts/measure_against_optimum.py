"""Measure the CPU engine beside the one that optimum-intel exports of the same model, in the same pipeline.

    python -m scripts.measure_against_optimum WORK_FOLDER PYTHON_OF_OPTIMUM [HIDDEN LAYERS ROUNDS]

PYTHON_OF_OPTIMUM is the interpreter of an environment that has optimum-intel 2.2 and no torchvision. The model is a
random Llama (1,024 x 20: 322 million parameters). Prints tokens/s of decoding with 1, 8 and 32 requests, the ratio of
pairs measured one after the other, all as medians, and the anonymous memory after eight requests. Each engine has a
process of its own, started three times: the same engine differs by 2 to 6 % with where its weights lie. Turns are
short, because machines change their speed from second to second. Threads, the arithmetic, KV cache and scheduler are
the same on both sides; the rounding of activations is what its users get. INT8 and INT4 are measured beside
optimum-intel's own, whose head is INT8, and beside the same with its head in 16 bits.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions, kv_precision, properties
from scripts.measure_fidelity import build, resident
from scripts.measure_streaming import SHAPES, make_model

THREADS, PROMPT, NEW_TOKENS, KV_BLOCKS, LOADS = 2, 16, 12, 1024, 3
REQUESTS = (1, 8, 32)
FORMATS = {"none": None, "int8_wo": {"bits": 8, "sym": True}, "int4_rtn": {"bits": 4, "sym": True, "group_size": 128}}
"""Ours, and the nearest that optimum-intel quantizes to without data: its head is INT8 then."""
HEAD_LEFT_OUT = {"ignored_scope": {"patterns": [".*lm_head.*"]}}
"""Leaves its head in 16 bits, as that of a TensorRT-LLM checkpoint is."""
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


def rate(pipeline: genai.ContinuousBatchingPipeline, requests: int) -> float:
    """Return tokens/s of decoding, without the prompts."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.eos_token_id, config.stop_token_ids, config.ignore_eos = NEW_TOKENS, 0, {0}, True
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


class LoadedEngine:
    """An engine in a process of its own."""

    def __init__(self, folder: str, chosen: dict[str, Any]) -> None:
        """Start loading it."""
        words = [sys.executable, "-m", "scripts.measure_against_optimum", "loaded", folder, json.dumps(chosen)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> float:
        """Return the decoded tokens/s of so many requests, or the MiB of "memory"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def answer(folder: str, chosen: dict[str, Any]) -> None:
    """Be the process of an engine: every line of standard input asks for a number."""
    pipeline = opened(folder, chosen)
    for line in sys.stdin:
        found = resident("RssAnon") if line.strip() == "memory" else rate(pipeline, int(line))
        sys.stdout.write(f"{found}\n")
        sys.stdout.flush()


def measured(sides: dict[str, tuple[str, dict[str, Any]]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return what each side found, in turns: rates by number of requests, and memory after the first eight."""
    found: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for load in range(LOADS):
        engines = {side: LoadedEngine(*where) for side, where in sides.items()}
        for engine in engines.values():  # the first requests compile kernels
            engine.ask("8")
        for side, engine in engines.items():
            found[side].setdefault("memory", []).append(engine.ask("memory"))
        for number in REQUESTS:
            for engine in engines.values():
                engine.ask(str(number))
            for turn in range(rounds):
                for side in list(sides)[:: 1 if (load + turn) % 2 else -1]:
                    found[side].setdefault(str(number), []).append(engines[side].ask(str(number)))
        for engine in engines.values():
            engine.close()
    return found


def main() -> None:
    """Make the model and both engines of each format, then measure."""
    if sys.argv[1] == "loaded":
        answer(sys.argv[2], json.loads(sys.argv[3]))
        return
    work, optimum = Path(sys.argv[1]).absolute(), sys.argv[2]
    hidden, layers, rounds = (int(word) for word in (*sys.argv[3:], *("1024", "20", "10")[len(sys.argv) - 3 :]))
    model = work / f"llama_{hidden}x{layers}"
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "num_hidden_layers": layers}
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "head_dim": 64, "vocab_size": 32_000}
    make_model(model, {**SHAPES["llama_8b"], "max_position_embeddings": 2048, **heads, **sizes})
    sys.stdout.write(
        "format    its head  requests  ours tokens/s  optimum tokens/s  ratio (least to most)   ours MiB  optimum MiB\n"
    )
    for qformat, chosen, head in _exports():
        ours, theirs = build(work, model, qformat), work / f"optimum_{hidden}x{layers}_{qformat}_head_{head}"
        if not (theirs / "openvino_model.xml").is_file():
            subprocess.run([optimum, "-c", EXPORT, str(model), str(theirs), json.dumps(chosen)], check=True)
        config, options = EngineFolder.load(ours).config, OpenVinoOptions(num_threads=THREADS)
        usual = properties(config, options, kv_precision(config, options))
        same = {name: value for name, value in usual.items() if name != "DYNAMIC_QUANTIZATION_GROUP_SIZE"}
        sides = {"ours": (str(ours), usual), "optimum": (str(theirs), same)}
        found = measured(sides, rounds)
        memory = {side: statistics.median(found[side]["memory"]) for side in sides}
        for number in map(str, REQUESTS):
            mine, other = found["ours"][number], found["optimum"][number]
            ratios = sorted(a / b for a, b in zip(mine, other, strict=True))
            sys.stdout.write(
                f"{qformat:<9} {head:<8} {number:>9} {statistics.median(mine):14.1f} {statistics.median(other):17.1f}"
                f" {statistics.median(ratios):6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                f" {memory['ours']:9,.0f} {memory['optimum']:12,.0f}\n"
            )
            sys.stdout.flush()


def _exports() -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """Yield our format, how optimum-intel is asked for its own, and the type of its head."""
    for qformat, chosen in FORMATS.items():
        if chosen is not None:
            yield qformat, chosen, "int8"
        yield qformat, chosen and chosen | HEAD_LEFT_OUT, "16bit"


if __name__ == "__main__":
    main()
