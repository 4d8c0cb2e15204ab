#!/bin/bash
# OpenVINO 2026.4.1 recognizes a mixture of experts by the number of inputs of its Swish.
#
# The CPU plugin replaces the block "all tokens times all experts" (as optimum-intel exports it) by its node GatherMatmul,
# which multiplies only the rows of the chosen experts. Its pattern is a Swish with one input. The Python function
# `swish` always writes a second one, beta = 1, which is the default and means the same. Seen on 2026-11-30 on x86-64:
# three GatherMatmul and the same numbers with one input; with two, none, and every token is multiplied by every expert.
# Nothing is said, and a mixture of 128 experts, 8 of them chosen, takes 16 times the products.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openvino==2026.4.1
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from collections import Counter

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory

EXPERTS, CHOSEN, HIDDEN, INNER, TOKENS = 8, 2, 64, 32, 5
numbers = np.random.default_rng(0)
WEIGHTS = [numbers.standard_normal(shape, dtype=np.float32) / 8
           for shape in ((EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))]
ROUTER = numbers.standard_normal((EXPERTS, HIDDEN), dtype=np.float32)
INPUT = numbers.standard_normal((1, TOKENS, HIDDEN), dtype=np.float32)


def ints(*values):
    return np.array(values, dtype=np.int64)


def block(swish):
    hidden = ops.parameter([1, -1, HIDDEN], np.float32)
    rows = ops.reshape(hidden, ints(-1, HIDDEN), False)
    best = ops.topk(ops.softmax(ops.matmul(rows, ROUTER, False, True), -1), np.int64(CHOSEN), -1, "max", "value", "i64")
    share = ops.divide(best.output(0), ops.reduce_sum(best.output(0), ints(-1), keep_dims=True))
    tiled = ops.reshape(ops.tile(rows, ints(EXPERTS, 1)), ints(EXPERTS, -1, HIDDEN), False)
    gate, up, down = map(ops.constant, WEIGHTS)
    inner = ops.multiply(swish(ops.matmul(tiled, gate, False, True)), ops.matmul(tiled, up, False, True))
    every = ops.reshape(ops.matmul(inner, down, False, True), ints(EXPERTS, 1, -1, HIDDEN), False)
    count = ops.gather(ops.shape_of(rows), ints(0), np.int64(0))
    empty = ops.broadcast(np.float32(0), ops.concat([count, ops.constant(ints(EXPERTS))], 0))
    spread = ops.transpose(ops.scatter_elements_update(empty, best.output(1), share, np.int64(1)), ints(1, 0))
    weight = ops.unsqueeze(ops.reshape(spread, ints(EXPERTS, 1, -1), False), np.int64(3))
    return ov.Model([ops.reduce_sum(ops.multiply(every, weight), ints(0), keep_dims=False)], [hidden])


found = {}
for inputs, swish in (
    (1, lambda x: NodeFactory("opset13").create("Swish", [x], {})),
    (2, lambda x: ops.swish(x)),
):
    compiled = ov.Core().compile_model(block(swish), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = Counter(node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ops())
    found[inputs] = kinds["GatherMatmul"], compiled(INPUT)[0].copy()
    print(f"openvino {ov.get_version()}, Swish with {inputs} input(s): {found[inputs][0]} GatherMatmul")
print(f"largest difference of the outputs: {np.abs(found[1][1] - found[2][1]).max():.1e}")
if (found[1][0], found[2][0]) != (3, 0) or not np.allclose(found[1][1], found[2][1], atol=1e-4):
    sys.exit("The behaviour has changed.")
PYTHON
