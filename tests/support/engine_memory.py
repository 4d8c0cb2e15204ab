"""Runs a CPU engine at full load in a process of its own and tells what it came to.

python -m tests.support.engine_memory ENGINE PRECISION KV_BLOCKS   ->  {"resident": ..., "kv_blocks": ...}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.runtime import EngineFolder, kv_block_bytes, kv_blocks, kv_precision
from pipelines.engines.openvino.serving_stats import resident_bytes
from pipelines.engines.port import SamplingLimits


def prompts(folder: EngineFolder, blocks: int) -> list[list[int]]:
    """Prompts that no cached prefix shortens and that fill the pool."""
    numbers = np.random.default_rng(len(str(folder.path)))
    length = folder.limits.max_input_len - 1
    return [numbers.integers(5, folder.config.vocab_size, length).tolist() for _ in range(1 + 32 * blocks // length)]


def main(engine: Path, precision: str, blocks: int) -> None:
    """Fill the pool twice: what the second time adds is what the first one left untouched."""
    folder = EngineFolder.load(engine)
    options = OpenVinoOptions(num_threads=1, inference_precision=precision)
    size = blocks * kv_block_bytes(folder.config, kv_precision(folder.config, options))
    options = OpenVinoOptions(num_threads=1, inference_precision=precision, kv_cache_bytes=size)
    with OpenVinoEngine(options).open(engine) as session:
        for _ in range(2):
            session.generate(prompts(folder, blocks), SamplingLimits(max_new_tokens=2), SilentProgress())
        found = {"resident": resident_bytes(), "kv_blocks": kv_blocks(folder, options)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
