#!/bin/bash
# Transformers 4.57.6 loads a model that Transformers 5 saved with RoPE's base 10,000, whatever the folder says.
#
# 5.14.1 writes the base into config.json as `rope_parameters` alone. 4.57.6, which TensorRT-LLM 1.2 pins, does not know
# that key and takes its default where `rope_theta` is missing. Seen on 2026-11-30 (torch 2.13.0): a random Llama with
# base 500,000, saved by 5.14.1, is loaded by 4.57.6 without a warning, with other frequencies and other logits. Text of a
# trained model stays fluent and becomes wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/load.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import transformers

folder = Path(sys.argv[1])
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
if not folder.exists():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, rope_parameters=rope)).save_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.inference_mode():
    logit = model(torch.arange(64)[None]).logits[0, -1, 0]
slowest = float(model.model.rotary_emb.inv_freq[-1])
print(f"transformers {transformers.__version__}: base {slowest ** (-16 / 14):,.0f}, a logit {logit:.4f}")
PYTHON
for transformers in 5.14.1 4.57.6; do
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$transformers"
  "$folder/venv/bin/python" "$folder/load.py" "$folder/model" 2> "$folder/$transformers.log" | tee -a "$folder/seen"
  rm -r "$folder/venv"
done
grep -i warn "$folder/4.57.6.log" && { echo "4.57.6 warns now."; exit 1; }
sed 's/, a logit.*//' "$folder/seen" | diff - <(printf '%s\n' \
  'transformers 5.14.1: base 500,000' 'transformers 4.57.6: base 10,000') || { echo "The behaviour has changed."; exit 1; }
