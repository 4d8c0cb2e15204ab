#!/bin/bash
# OpenVINO 2026.4.1 drops the condition of an If that is made from a node in Python.
#
# `if_op` takes its condition as a node or as an output of one. From an output it has one input; from a node it has
# none, and the first value that `set_input` adds becomes the condition. Where that is no boolean, an error about a
# rank or a type names it. Where it is one, nothing is said and the other branch is computed. Seen on 2026-11-30 on
# x86-64: with a condition that is true and a flag that is false, the output makes "then" of it, the node "else".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openvino==2026.4.1
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import openvino as ov
from openvino import opset13 as ops


def branch(number):
    inside = [ops.parameter([], np.bool_), ops.parameter([1], np.float32)]
    chosen = ops.select(inside[0], ops.multiply(inside[1], np.float32(0)), np.array([number], np.float32))
    return inside, ops.result(chosen)


found = {}
for kind in ("output", "node"):
    flag, value = ops.parameter([], np.bool_), ops.parameter([1], np.float32)
    condition = ops.greater(ops.reduce_sum(value, np.array([0]), keep_dims=False), np.float32(0))
    either = ops.if_op(condition.output(0) if kind == "output" else condition)
    before = either.get_input_size()
    then_inputs, then_result = branch(1)
    else_inputs, else_result = branch(2)
    either.set_then_body(ov.Model([then_result], then_inputs))
    either.set_else_body(ov.Model([else_result], else_inputs))
    for outside, one, other in zip((flag, value), then_inputs, else_inputs):
        either.set_input(outside.output(0), one, other)
    either.set_output(then_result, else_result)
    compiled = ov.compile_model(ov.Model([ops.result(either.output(0))], [flag, value]), "CPU")
    answer = compiled([np.array(False), np.array([5], np.float32)])[0]
    found[kind] = before, {1: "then", 2: "else"}[int(answer[0])]
    print(f"openvino {ov.get_version()}, If of a condition's {kind}: {before} input(s), branch {found[kind][1]}")

if found != {"output": (1, "then"), "node": (0, "else")}:
    sys.exit("The behaviour has changed.")
PYTHON
