"""Run a CPU engine at full load in a separate process and print the memory it used.

python -m tests.support.engine_memory ENGINE PRECISION KV_BLOCKS LENGTHS   ->  {"resident": ..., "kv_blocks": ...}
"""

import json
import sys
from pathlib import Path

import numpy as np

from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.memory import KV_BLOCK_TOKENS
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions, kv_block_bytes, kv_blocks, kv_precision
from pipelines.engines.openvino.serving_stats import resident_bytes
from pipelines.engines.port import SamplingParams

NEW_TOKENS = 2
TURNS = 2
"""Rounds of filling the pool: finished prompts stay cached, so each round uses blocks that earlier ones left unused."""
FULL_ITERATIONS = 6
"""Approximate number of different iteration sizes (in tokens) that occur while the pool is filled."""
SHORTEST = 8
ALONE_TOKENS = 8
"""Output tokens of one request alone, twice: in float32, the plugin then packs 16-bit weights a second time."""


def prompts(folder: EngineFolder, blocks: int, turn: int) -> list[list[int]]:
    """Return prompts without a cached prefix, as many as fit in the pool at once."""
    numbers = np.random.default_rng(turn)
    length = folder.limits.max_input_len - NEW_TOKENS - 1
    count = blocks * KV_BLOCK_TOKENS // folder.limits.max_input_len
    return [numbers.integers(5, folder.config.vocab_size, length).tolist() for _ in range(count)]


def mixed(vocabulary: int, lengths: int) -> list[list[int]]:
    """Return prompts of `lengths` different lengths in tokens; run one by one, each is an iteration of another size."""
    numbers = np.random.default_rng(TURNS)
    return [numbers.integers(5, vocabulary, SHORTEST + extra).tolist() for extra in range(lengths)]


def own_bytes(pid: int | str = "self") -> int:
    """Return a process's resident memory without mapped files, which the kernel cannot reclaim."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def main(engine: Path, precision: str, blocks: int, lengths: int) -> None:
    """Fill the pool, run prompts of different lengths, and print the resulting memory."""
    folder = EngineFolder.load(engine)
    options = OpenVinoOptions(num_threads=1, inference_precision=precision)
    size = blocks * kv_block_bytes(folder.config, kv_precision(folder.config, options))
    options = OpenVinoOptions(num_threads=1, inference_precision=precision, kv_cache_bytes=size)
    with OpenVinoEngine(options).open(engine) as session:
        for turn in range(TURNS):
            session.generate(prompts(folder, blocks, turn), SamplingParams(max_new_tokens=NEW_TOKENS), SilentProgress())
        for _ in range(2):
            (alone,) = mixed(folder.config.vocab_size, 1)
            session.generate([alone], SamplingParams(max_new_tokens=ALONE_TOKENS), SilentProgress())
        for prompt in mixed(folder.config.vocab_size, lengths):
            session.generate([prompt], SamplingParams(max_new_tokens=1), SilentProgress())
        found = {"resident": resident_bytes(), "own": own_bytes(), "kv_blocks": kv_blocks(folder, options)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
