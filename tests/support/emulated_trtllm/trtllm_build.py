"""Emulate trtllm-build's argument grammar, refusals, log and engine folder, without a real engine.

Source: TensorRT-LLM `commands/build.py` at 65f1d15, `builder.py`, `plugin/plugin.py` at c20322f, `_common.py`. Their
errors are raised here with the same wording; checkpoints are checked by this project's own `verify`.
"""

import argparse
import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipelines.checkpoint.verify import verify
from pipelines.engines.tensorrt_llm.config import OPTIONS, BuildOption
from tests.support.emulated_trtllm.engine_folder import write_config, write_rank
from tests.support.emulated_trtllm.nvidia_smi import gpus
from tests.support.emulated_trtllm.plan import Refused, planned, read_checkpoint
from tests.support.emulated_trtllm.talk import info, say, version, warning

CACHE_HEADER = "emulated timing cache"


def parser() -> argparse.ArgumentParser:
    """Make the argument parser from the option table."""
    made = argparse.ArgumentParser(prog="trtllm-build", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for option in OPTIONS.values():
        made.add_argument(option.name, *option.aliases, **_argument(option))
    return made


def _argument(option: BuildOption) -> dict[str, Any]:
    if option.type == "flag":
        return {"action": "store_true", "default": False, "help": "See the table."}
    given: dict[str, Any] = {"default": option.default, "help": "See the table."}
    if option.key in ("kv_cache_type", "paged_kv_cache"):
        given["default"] = argparse.SUPPRESS
    if option.type == "KVCacheType":
        return given | {"type": _kv_cache_type(option)}
    if option.type == "list[str]":
        given["nargs"] = "+"
    if option.choices and option.key != "paged_kv_cache":
        given["choices"] = list(option.choices)
    return given | {"type": int if option.type == "int" else str}


def _kv_cache_type(option: BuildOption) -> Any:
    def parse(value: str) -> str:
        if value.lower() not in (option.choices or ()):
            raise argparse.ArgumentTypeError(f"Invalid value '{value}'. Expected one of {list(option.choices or ())}")
        return value.upper()

    return parse


def main() -> None:
    """Build every rank."""
    say(f"[TensorRT-LLM] TensorRT-LLM version: {version()}")
    args = parser().parse_args()
    warning("Option --gather_generation_logits is deprecated, a build flag is not required anymore. ")
    if args.gather_all_token_logits:
        args.gather_context_logits = args.gather_generation_logits = True
    if args.gather_context_logits and args.max_draft_len > 0:
        raise RuntimeError("Gather context logits is not support with draft len > 0. ")
    start = time.time()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    workers = min(len(gpus()), args.workers)
    checkpoint = Path(args.checkpoint_dir)
    config = read_checkpoint(checkpoint)
    built = planned(args, config, float(gpus()[0].sm) if gpus() else 0.0)
    if workers < 1:
        raise ValueError("max_workers must be greater than 0")
    if faults := verify(checkpoint):
        raise Refused("\n".join(map(str, faults)))
    _break_down()
    world_size = config["mapping"]["world_size"]
    for rank in range(world_size):
        _rank(args, rank, checkpoint, config, built)
    info(f"Total time of building all engines: {_clock(time.time() - start)}")


def _rank(args: argparse.Namespace, rank: int, checkpoint: Path, config: dict[str, Any], built: dict[str, Any]) -> None:
    start = time.time()
    weights = (checkpoint / f"rank{rank}.safetensors").stat().st_size
    info(f"Total time of constructing network from module object {time.time() - start} seconds")
    info("Total optimization profiles added: 1")
    info("Total time to initialize the weights in network Unnamed Network 0: 00:00:00")
    info("Build TensorRT engine Unnamed Network 0")
    entries = _timing_entries(args.input_timing_cache)
    info("Global timing cache in use. Profiling results in this builder pass will be stored.", tool="TRT")
    _take_time()
    info(f"Total Activation Memory: {built['max_num_tokens'] * config['hidden_size'] * 16} bytes", tool="TRT")
    info(f"Total Weights Memory: {weights} bytes", tool="TRT")
    info(f"Engine generation completed in {time.time() - start:.6g} seconds.", tool="TRT")
    peak = "[MemUsageStats] Peak memory usage of TRT CPU/GPU memory allocators: CPU 0 MiB, GPU 385 MiB"
    info(peak, tool="TRT")
    info(f"Total time of building Unnamed Network 0: {_clock(time.time() - start)}")
    if rank == 0:
        Path(args.output_timing_cache).write_text(f"{CACHE_HEADER} {gpus()[0].name} {version()} {entries + 12}\n")
        info(f"Serialized {entries + 12} timing cache entries", tool="TRT")
        info(f"Timing cache serialized to {args.output_timing_cache}")
    info("Build phase peak memory: 6978.95 MB, children: 12049.21 MB")
    output = Path(args.output_dir)
    if rank == 0:
        write_config(output, config, built)
    info(f"Serializing engine to {output}/rank{rank}.engine...")
    write_rank(output, rank, checkpoint)
    info("Engine serialized. Total time: 00:00:00")


def _timing_entries(path: str | None) -> int:
    """Return the number of timing entries in a cache; TensorRT refuses a cache of another GPU or version."""
    if path is None or not Path(path).exists():
        if path is not None:
            warning("Invalid timing cache, using freshly created one")
        return 0
    text = Path(path).read_text().split()
    if " ".join(text[:-1]) != f"{CACHE_HEADER} {gpus()[0].name} {version()}":
        raise RuntimeError("set_timing_cache failed: the cache is of another device or TensorRT version")
    return int(text[-1])


def _take_time() -> None:
    """Spend EMULATED_SECONDS in a separate process, like a builder with workers."""
    if seconds := os.environ.get("EMULATED_SECONDS"):
        subprocess.run(["sleep", seconds], check=True)


def _break_down() -> None:
    """Fail as EMULATED_FAULT requests: "memory", "disk" or "silent"."""
    fault = os.environ.get("EMULATED_FAULT")
    if fault == "memory":
        say("[11/21/2026-12:00:00] [TRT] [E] [virtualMemoryBuffer.cpp::resizePhysical::154] Error Code 2: OutOfMemory")
        raise AssertionError("Engine building failed, please check the error log.")
    if fault == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault == "silent":
        sys.exit(1)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


if __name__ == "__main__":
    main()
