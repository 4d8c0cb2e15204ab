#!/bin/bash
# tensorrt-edgellm 0.11.0 exports a model of a family that it does not know as if it were a Llama, without a word.
#
# A random Gemma (the first) is exported: GELU by tanh, norms that multiply by 1 + weight. Seen on 2026-11-28
# (torch 2.13.0, transformers 5.14.1): exit code 0, every tensor is loaded, and the graph has SiLU and Llama's norms.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'tensorrt-edgellm[export]==0.11.0'
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import sys
from pathlib import Path

import torch
import transformers

folder = Path(sys.argv[1])
torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}
config = transformers.GemmaConfig(**sizes, num_key_value_heads=2, vocab_size=512)
transformers.GemmaForCausalLM(config).half().save_pretrained(folder)
(folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
PYTHON
code=0
"$folder/venv/bin/tensorrt-edgellm-export" "$folder/model" "$folder/out" > "$folder/log" 2>&1 || code=$?
echo "tensorrt-edgellm 0.11.0: exit code $code; $(grep -o 'Loaded [0-9]* tensors, skipped [0-9]*' "$folder/log" || true)"
"$folder/venv/bin/python" - "$folder/out/llm/model.onnx" "$code" <<'PYTHON'
import sys

import onnx

operators = {node.op_type for node in onnx.load(sys.argv[1], load_external_data=False).graph.node} if sys.argv[2] == "0" else set()
print(f"operators of the activation: {sorted(operators & {'Sigmoid', 'Tanh', 'Erf', 'Gelu'})}")
if "Sigmoid" not in operators or operators & {"Tanh", "Erf", "Gelu"}:
    sys.exit("The behaviour has changed.")
PYTHON
