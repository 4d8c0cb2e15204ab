"""Measure a mixture of experts on the CPU engine beside the dense model of its active size.

    python -m scripts.measure_experts WORK_FOLDER [--quant int8_wo] [--sizes 1024x6x64x384x8] [--rounds 7]

SIZES are hidden size x layers x experts x width of one x experts of a token, of a Qwen3 MoE with random weights. It is
built with products of each expert and with one product for all (engine.openvino.experts), which needs a processor with
AMX. Each engine runs in a process of its own. Prints the memory that each takes once it has decoded, and for some loads
the ms of an iteration through paged attention (medians of turns) and the median ratio to the dense model in a turn.
"""

import argparse
import statistics
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import psutil
import torch
import transformers

from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions, kv_precision, properties
from scripts.measure_beside_llamacpp import in_turns, train_tokenizer
from scripts.measure_beside_optimum import asked, serve
from scripts.served import ROOT

VOCABULARY = 32_000
LOADS = {
    "token of one user": (1, 16, 17),
    "tokens of eight users": (8, 16, 13),
    "prompt of 128 tokens": (1, 128, 1),
    "prompt of 512 tokens": (1, 512, 1),
    "prompt of 2,000 tokens": (1, 2000, 1),
}
"""Requests, their tokens, and output tokens; where that is one, the prompt is timed."""


def make(folder: Path, hidden: int, layers: int, experts: int, width: int, chosen: int) -> Path:
    """Write a model with random weights and its tokenizer; one expert is a dense model."""
    if (folder / "tokenizer.json").is_file():
        return folder
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers, "head_dim": 64,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip
    mixed = {"num_experts": experts, "moe_intermediate_size": width, "num_experts_per_tok": chosen}
    dense = transformers.Qwen3Config(**sizes, intermediate_size=width)
    config = dense if experts == 1 else transformers.Qwen3MoeConfig(**sizes, **mixed, norm_topk_prob=True)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    train_tokenizer(folder)
    return folder


def milliseconds(pipeline: genai.ContinuousBatchingPipeline, load: tuple[int, int, int]) -> float:
    """Return the median time of an iteration, of a prompt or of decoding."""
    requests, prompt, new = load
    config = genai.GenerationConfig(max_new_tokens=new, eos_token_id=0, stop_token_ids={0}, ignore_eos=True)
    numbers = np.random.default_rng(time.perf_counter_ns())
    handles = [
        pipeline.add_request(number, ov.Tensor(numbers.integers(5, VOCABULARY, (1, prompt))), config)
        for number in range(requests)
    ]
    taken = []
    while pipeline.has_non_finished_requests():
        start = time.perf_counter()
        pipeline.step()
        taken.append(time.perf_counter() - start)
    del handles
    return 1000 * (taken[0] if new == 1 else statistics.median(taken[1:]))


def main() -> None:
    """Make both models and the engines, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=lambda text: Path(text).absolute())
    parser.add_argument("--quant", default="int8_wo")
    parser.add_argument("--sizes", default="1024x6x64x384x8")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    work, quant = options.work, options.quant
    hidden, layers, experts, width, chosen = map(int, options.sizes.split("x"))
    mixture = make(work / f"experts_{options.sizes}", hidden, layers, experts, width, chosen)
    dense = make(work / f"dense_{options.sizes}", hidden, layers, 1, width * chosen, 1)
    run = OpenVinoOptions(num_threads=psutil.cpu_count(logical=False))
    sides: dict[str, Connection] = {}
    for side, model in (("grouped", mixture), ("separate", mixture), ("dense", dense)):
        words = [f"model.path={model}", f"quant={quant}", f"paths.runs={work}/runs", "build.max_num_tokens=2048"]
        words += [f"paths.store={work}/{side}_{options.sizes}"] + (
            [] if side == "dense" else [f"engine.openvino.experts={side}"]
        )
        subprocess.run([sys.executable, "-m", "pipelines", "build", *words], cwd=ROOT, check=True)
        (engine,) = (work / f"{side}_{options.sizes}" / "build").glob(f"{model.name}-{quant}-*")
        config = EngineFolder.load(engine).config
        chosen_properties = properties(config, run, kv_precision(config, run))
        sides[side], its_end = get_context("spawn").Pipe()
        words_of = (engine, chosen_properties, True, its_end, milliseconds)
        get_context("spawn").Process(target=serve, args=words_of, daemon=True).start()
        sys.stdout.write(f"{side}: {sides[side].recv():,.0f} MiB\n")
    for load, numbers in LOADS.items():
        in_turns(sides, 2, lambda side, _, numbers=numbers: asked(side, numbers))  # kernels are compiled
        times, ratios = in_turns(sides, options.rounds, lambda side, _, numbers=numbers: asked(side, numbers))
        each = ", ".join(f"{side} {statistics.median(found):.1f} ({ratios[side]:.2f})" for side, found in times.items())
        sys.stdout.write(f"{load}: {each} ms (ratio)\n")
        sys.stdout.flush()
    for end in sides.values():
        end.send(0)


if __name__ == "__main__":
    main()
