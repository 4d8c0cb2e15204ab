#!/bin/bash
# tensorrt-edgellm 0.11.0 drops the attention window of a model (sliding_window of config.json), without a word.
#
# A random Mistral (the first) with a window of 16 tokens is exported. Seen on 2026-11-28 (torch 2.13.0, transformers
# 5.14.1): exit code 0, and every AttentionPlugin of the graph has sliding_window_size=-1, which is none.
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
config = transformers.MistralConfig(**sizes, num_key_value_heads=2, vocab_size=512, sliding_window=16)
transformers.MistralForCausalLM(config).half().save_pretrained(folder)
(folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
PYTHON
code=0
"$folder/venv/bin/tensorrt-edgellm-export" "$folder/model" "$folder/out" > "$folder/log" 2>&1 || code=$?
echo "tensorrt-edgellm 0.11.0: exit code $code"
"$folder/venv/bin/python" - "$folder/out/llm/model.onnx" "$code" <<'PYTHON'
import sys

import onnx

nodes = onnx.load(sys.argv[1], load_external_data=False).graph.node if sys.argv[2] == "0" else []
found = {a.i for node in nodes if node.op_type == "AttentionPlugin" for a in node.attribute if a.name == "sliding_window_size"}
print(f"sliding_window_size of the attentions: {sorted(found)}; the model's is 16")
if found != {-1}:
    sys.exit("The behaviour has changed.")
PYTHON
