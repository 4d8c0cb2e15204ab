#!/bin/bash
# xgrammar 0.1.32, which TensorRT-LLM 1.2.1 pins, lets integers outside `minimum` and `maximum` through; it and 0.2.9
# leave out `not`, `if`, `contains`, `uniqueItems`, `dependentRequired` and whatever stands beside `$ref`, `anyOf` or
# `enum`, without an error or a warning.
#
# Seen on 2026-11-30, judged by jsonschema 4.26.0: with 18 <= integer <= 120, 0.1.32 takes 121 to 129; with integer >= 3
# it takes 1 and 2, and with integer >= -5 it refuses -5 to -1. 0.2.9 has all of these right. 0.1.32 also leaves out
# `multipleOf`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.14.1 pydantic==2.13.5 jsonschema==4.26.0
for version in 0.1.32 0.2.9; do
  "$folder/venv/bin/pip" install --quiet --no-compile --no-deps --upgrade "xgrammar==$version" apache-tvm-ffi==0.1.11
  "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/said"
import json
import sys
from importlib.metadata import version

import jsonschema
import xgrammar

END = 256
VOCABULARY = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)] + [b"</s>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END]
)
COMPILER = xgrammar.GrammarCompiler(VOCABULARY, max_threads=1)
INTEGER = {"type": "integer"}
PAIR = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False}
LEFT_OUT = [
    ({"type": "string", "not": {"const": "no"}}, "no"),
    ({**PAIR, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}),
    ({"type": "array", "items": INTEGER, "contains": {"const": 3}}, [1]),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, [1, 1]),
    ({**PAIR, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ({"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": INTEGER}}, 1),
    ({"anyOf": [INTEGER], "minimum": 3}, 1),
    ({"enum": [1, 2], "type": "integer", "minimum": 2}, 1),
]
BOUNDS = [{"minimum": 18, "maximum": 120}, {"minimum": 3}, {"minimum": -5}]


def matcher(schema):
    return COMPILER.compile_grammar(xgrammar.Grammar.from_json_schema(json.dumps(schema)))


def takes(compiled, value):
    state = xgrammar.GrammarMatcher(compiled)
    return state.accept_string(json.dumps(value, separators=(",", ":"))) and state.accept_token(END)


installed = version("xgrammar")
old = installed == "0.1.32"
for schema, value in [*LEFT_OUT, *([({**INTEGER, "multipleOf": 5}, 7)] if old else [])]:
    assert not jsonschema.Draft202012Validator(schema).is_valid(value)
    print(f"xgrammar {installed} takes {json.dumps(value)} for {json.dumps(schema)}: {takes(matcher(schema), value)}")
    if not takes(matcher(schema), value):
        sys.exit("The behaviour has changed.")
wrong = []
for bounds in BOUNDS:
    schema = {**INTEGER, **bounds}
    judge, compiled = jsonschema.Draft202012Validator(schema), matcher(schema)
    wrong.append([n for n in range(-20, 400) if takes(compiled, n) != judge.is_valid(n)])
    print(f"xgrammar {installed}, {bounds}: judged wrongly {wrong[-1]}")
if wrong != ([list(range(121, 130)), [1, 2], [-5, -4, -3, -2, -1]] if old else [[], [], []]):
    sys.exit("The behaviour has changed.")
PYTHON
  if grep -v "^$" "$folder/said"; then
    echo "It said something: the behaviour has changed."
    exit 1
  fi
done
