"""Measure the OpenAI service on the CPU engine beside llama.cpp's server, in turns, with the project's load generator.

    python -m scripts.measure_beside_llamacpp WORK_FOLDER [--loads 16x128@1 360x1@1 ...] [--rounds 2] [--seconds 6]
        [--size 1024x20] [--heads checkpoint int8] [--llama-server BINARY] [--vllm PYTHON] [--quick] [--memory]
        [-o KEY=VALUE ...]

The model is a random Llama (1,024 x 20: 322 million parameters) with a tokenizer of 32,000 words, so every token has
text. Ours is `int4_rtn` (groups of 128), with each of the heads that --heads names (`engine.openvino.head_precision`);
llama.cpp's is Q4_0 with its head and its KV cache in f16, from the package xllamacpp, which is installed into
WORK_FOLDER and has no code for more than AVX2; --llama-server names a server that was compiled for the processor, say
from the sources in the package llama-cpp-python. On a processor with more, scripts/only_avx2.sh holds both sides to
AVX2. --vllm names the Python of an environment with vLLM for CPUs, which is measured too: linears in INT4
(GPTQ's layout, groups of 128), embedding, head and KV cache in bf16. All hold 32 requests of 512 tokens, compute at
most 512 tokens at a time with as many threads as there are cores, and keep no prompts for later ones. A load is
ISLxOSL@USERS; --memory fills all 32 slots and prints the resident memory of the process that computes. -o sets
options that an engine is run with (`engine.openvino.*`). --quick is a small model and short windows, to try the
script itself.
"""

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipelines.engines.openvino.memory import blocks_of
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions, kv_block_bytes, kv_precision
from pipelines.host.lifetimes import SupervisedProcess
from pipelines.serving.frontend import OpenAiFrontend
from scripts.measure_streaming import SHAPES, make_model
from scripts.served import ROOT, loaded, served

PACKAGES = ("xllamacpp==2026.10.11549", "gguf==0.19.0")
VOCABULARY, SLOTS, SLOT_TOKENS, BATCH = 32_000, 32, 512, 512
GROUP = 128
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
LOADS = ("16x128@1", "16x128@8", "16x128@32", "128x64@1", "128x64@8", "128x64@32", "360x1@1")
FULL = "380x128@32"
"""Fills every slot."""
LLAMA_CPP = """
import sys, xllamacpp
model, port, threads, slots, tokens, batch = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.port, params.warmup = model, port, True
params.n_parallel, params.n_ctx, params.kv_unified = slots, slots * tokens, False
params.n_batch = params.n_ubatch = batch
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F16
params.cache_prompt, params.cache_ram_mib, params.n_predict = False, 0, -1
server = xllamacpp.Server(params)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A running server: its address up to and with /v1, and the process that computes."""

    url: str
    process: psutil.Process

    def resident(self) -> float:
        """Return its resident memory, MiB."""
        return float(self.process.memory_info().rss) / 2**20


def train_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer of the model's size, trained on invented words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    numbers = random.Random(1)
    syllables = [first + vowel + last for first in "bdfgklmnprstvz" for vowel in "aeiou" for last in ("", "n", "r")]
    words = [" " + "".join(numbers.choices(syllables, k=numbers.randint(1, 4))) for _ in range(400_000)]
    bundled = Tokenizer.from_file(str(ROOT / "pipelines/bundled/models/tiny_llama/tokenizer.json"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = bundled.pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BEGIN, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"The tokenizer has {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}.")
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))


def make(folder: Path, hidden: int, layers: int) -> None:
    """Write the model and its tokenizer."""
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "num_hidden_layers": layers}
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "head_dim": 64, "vocab_size": VOCABULARY}
    if not (folder / "model.safetensors.index.json").is_file():
        make_model(folder, {**SHAPES["llama_8b"], "max_position_embeddings": 2048, **heads, **sizes})
        train_tokenizer(folder)


def write_gguf(model: Path, file: Path) -> None:
    """Write the model for llama.cpp: linears and the embedding in Q4_0, the head in f16."""
    import gguf
    import numpy as np
    from gguf.constants import GGMLQuantizationType as Type
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    tokens = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in (BEGIN, END) else gguf.TokenType.NORMAL for token in ordered]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(ordered)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokens["model"]["merges"]])
    writer.add_bos_token_id(vocabulary[BEGIN])
    writer.add_eos_token_id(vocabulary[END])
    writer.add_add_bos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in sorted(set(index.values())):
        with safe_open(model / shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                values = tensors.get_tensor(name).float().numpy()
                if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbouring channels
                    values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
                kind = Type.F32 if values.ndim == 1 else Type.F16 if name == "lm_head.weight" else Type.Q4_0
                data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
                writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gptq(model: Path, folder: Path) -> None:
    """Write the model for vLLM: linears rounded to INT4 in GPTQ's layout, all else in bf16."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Any] = {}
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                weight = file.get_tensor(name)
                if not name.endswith("_proj.weight"):
                    tensors[name] = weight.bfloat16()
                    continue
                groups = weight.float().T.unflatten(0, (-1, GROUP))  # [groups, GROUP, out]
                scales = (groups.abs().amax(1) / 7).half()
                codes = ((groups / scales[:, None].float()).round().clamp(-8, 7) + 8).int().flatten(0, 1)
                packed = (codes.unflatten(0, (-1, 8)) << (4 * torch.arange(8, dtype=torch.int32))[:, None]).sum(1)
                zeros = torch.full((scales.shape[0], scales.shape[1] // 8), 0x77777777, dtype=torch.int32)
                order = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
                own = {"qweight": packed.int(), "qzeros": zeros, "scales": scales, "g_idx": order}
                tensors |= {f"{name.removesuffix('weight')}{key}": each.contiguous() for key, each in own.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def build(work: Path, model: Path, head: str) -> Path:
    """Build our engine as a user would and return its folder."""
    limits = [
        f"build.max_batch_size={SLOTS}", f"build.max_seq_len={SLOT_TOKENS}", f"build.max_input_len={SLOT_TOKENS}",
        f"build.max_num_tokens={BATCH}", "runtime.enable_chunked_context=true",
    ]  # fmt: skip
    words = [f"model.path={model}", "quant=int4_rtn", f"paths.store={work / 'artifacts'}", f"paths.runs={work}/runs"]
    words.append(f"engine.openvino.head_precision={head}")
    subprocess.run([sys.executable, "-m", "pipelines", "build", *words, *limits], cwd=ROOT, check=True)
    engines = (work / "artifacts" / "build").glob(f"{model.name}-int4_rtn-*")
    fitting = [each for each in engines if EngineFolder.load(each).int8_head == (head == "int8")]
    return max(fitting, key=lambda each: each.stat().st_mtime)


@contextmanager
def ours(engine: Path, model: Path, options: dict[str, str]) -> Iterator[Served]:
    """Serve our engine, with a KV cache for all slots."""
    config = EngineFolder.load(engine).config
    precision = kv_precision(config, OpenVinoOptions.judged(options, "engine.openvino."))
    pool = SLOTS * blocks_of(SLOT_TOKENS) * kv_block_bytes(config, precision)
    own = {"options": {"kv_cache_bytes": pool, **options}, "enable_chunked_context": True}
    with served(engine, model, openai=True, **own) as server, OpenAiFrontend(server):
        processes = psutil.Process(server.pid).children(recursive=True)
        yield Served(server.openai_url, max(processes, key=lambda each: each.memory_info().rss))


@contextmanager
def llama_cpp(packages: Path, binary: str | None, file: Path, log: Path) -> Iterator[Served]:
    """Serve with llama.cpp: with its own server if a binary is given, else with xllamacpp's."""
    threads = psutil.cpu_count(logical=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        binary, "--model", file, "--port", port, "--threads", threads, "--parallel", SLOTS, "--no-kv-unified",
        "--ctx-size", SLOTS * SLOT_TOKENS, "--batch-size", BATCH, "--ubatch-size", BATCH,
        "--no-cache-prompt", "--cache-ram", 0,
    ] if binary else [sys.executable, "-c", LLAMA_CPP, file, port, threads, SLOTS, SLOT_TOKENS, BATCH]  # fmt: skip
    with log.open("w") as output, subprocess.Popen(
        [str(word) for word in words], stdin=subprocess.PIPE, stdout=output, stderr=output,
        env={**os.environ, "PYTHONPATH": str(packages)},
    ) as process:  # fmt: skip
        try:
            while "listening on" not in log.read_text():
                if process.poll() is not None:
                    raise SystemExit(f"llama.cpp's server did not start; see {log}")
                time.sleep(0.1)
            yield Served(f"http://127.0.0.1:{port}/v1", psutil.Process(process.pid))
        finally:
            process.kill()


@contextmanager
def vllm(python: str, model: Path, log: Path) -> Iterator[Served]:
    """Serve with vLLM, with a KV cache for all slots."""
    config = json.loads((model / "config.json").read_text())
    token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", port,
        "--dtype", "bfloat16", "--max-num-seqs", SLOTS, "--max-model-len", SLOT_TOKENS,
        "--max-num-batched-tokens", BATCH, "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes", SLOTS * SLOT_TOKENS * token_bytes,
    ]  # fmt: skip
    own = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(psutil.cpu_count() or 1) - 1}",
    }
    log.unlink(missing_ok=True)
    process = SupervisedProcess(
        [str(word) for word in words], env={**os.environ, **own}, cwd=log.parent, log_file=log
    )  # fmt: skip
    try:
        while "Application startup complete" not in log.read_text():
            if process.poll() is not None:
                raise SystemExit(f"vLLM did not start; see {log}")
            time.sleep(1)
        processes = psutil.Process(process.pid).children(recursive=True)
        yield Served(f"http://127.0.0.1:{port}/v1", max(processes, key=lambda each: each.memory_info().rss))
    finally:
        process.kill()


def benchmark(server: Served, model: Path, load: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run the load generator and return the summary of its window."""
    lengths, users = load.split("@")
    isl, osl = lengths.split("x")
    return loaded(
        f"benchmark.url={server.url}", f"model.path={model}", f"workload.isl={isl}", f"workload.osl={osl}",
        f"workload.seed={seed}", f"benchmark.concurrency={users}", f"benchmark.duration_s={seconds}",
        "benchmark.warmup_s=1", "benchmark.min_requests=2",
    )  # fmt: skip


def figure(summary: dict[str, Any], load: str) -> float:
    """Return output tokens/s, or of a load that only reads prompts their tokens/s."""
    lengths, _ = load.split("@")
    isl, osl = map(int, lengths.split("x"))
    return isl / float(summary["ttft_s"]["p50"]) if osl == 1 else float(summary["output_tokens_per_s"])


def in_turns(
    sides: Mapping[str, Any], rounds: int, rate: Callable[[Any, int], float]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return each side's rates, measured in turns in alternating order, and its median ratio to the last side's."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            rates[side].append(rate(sides[side], turn))
    *_, last = rates.values()
    ratios = {side: statistics.median(a / b for a, b in zip(each, last, strict=True)) for side, each in rates.items()}
    return rates, ratios


def measure(sides: dict[str, Served], model: Path, options: argparse.Namespace) -> None:
    """Print the figures of the servers under each load, and the ratio of each of ours to the last one."""
    for load in options.loads:
        rates, ratios = in_turns(
            sides,
            options.rounds,
            lambda server, turn, load=load: figure(benchmark(server, model, load, 100 + turn, options.seconds), load),
        )
        each = "  ".join(
            f"{side} {', '.join(f'{rate:.1f}' for rate in found)} ({ratios[side]:.2f})" for side, found in rates.items()
        )
        sys.stdout.write(f"{load:>10}  {each}  tokens/s (ratio)\n")
        sys.stdout.flush()
    if options.memory:
        for side, server in sides.items():
            benchmark(server, model, FULL, 7, 1)
            sys.stdout.write(f"resident memory with every slot used: {side} {server.resident():,.0f} MiB\n")


def main() -> None:
    """Make what is missing, start both servers, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--loads", nargs="*", default=LOADS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--size", default="1024x20", help="hidden size x layers")
    parser.add_argument("--heads", nargs="*", choices=("checkpoint", "int8"), default=["checkpoint"])
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.quick:
        options.size, options.seconds, options.rounds = "512x2", 1, 1
    work = options.work.absolute()
    packages, model = work / "packages", work / f"llama_{options.size}"
    file = model.with_suffix(".gguf")
    if not packages.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(packages), *PACKAGES], check=True)
    sys.path.append(str(packages))
    make(model, *map(int, options.size.split("x")))
    if not file.is_file():
        write_gguf(model, file)
    engines = {head: build(work, model, head) for head in options.heads}
    with ExitStack() as stack:
        chosen = dict(each.split("=", 1) for each in options.option)
        sides = {
            f"ours, head {head}": stack.enter_context(ours(engine, model, chosen)) for head, engine in engines.items()
        }
        if options.vllm:
            folder = work / f"{model.name}_gptq"
            if not folder.is_dir():
                write_gptq(model, folder)
            sides["vLLM"] = stack.enter_context(vllm(options.vllm, folder, work / "vllm.log"))
        sides["llama.cpp"] = stack.enter_context(
            llama_cpp(packages, options.llama_server, file, work / "llama_cpp.log")
        )
        measure(sides, model, options)


if __name__ == "__main__":
    main()
