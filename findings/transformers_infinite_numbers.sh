#!/bin/bash
# Transformers 5.14.1 writes infinity into config.json as an object, which 4.57.6 takes for the value itself.
#
# Mamba 2's default config has time_step_limit=(0, inf); Bamba's and others' have it too. Seen on 2026-11-29: 5.14.1 saves
# [0.0, {"__float__": "Infinity"}], so that the file is strict JSON, and reads it back. 4.57.6 loads such a folder without
# a warning, and the first forward pass of the model raises TypeError from torch.clamp. The other direction works:
# 4.57.6 writes the literal Infinity, and 5.14.1 reads it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.14.1 4.57.6; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version" torch==2.13.0
done
cat > "$folder/save.py" <<'PYTHON'
import sys

import transformers

sizes = dict(num_hidden_layers=1, hidden_size=64, num_heads=8, head_dim=16, n_groups=1, state_size=16, vocab_size=100)
transformers.Mamba2Config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(sys.argv[1])
PYTHON
cat > "$folder/load.py" <<'PYTHON'
import sys

import torch
import transformers

config = transformers.AutoConfig.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_config(config)
try:
    outcome = f"logits {tuple(model(torch.tensor([[1, 2, 3]])).logits.shape)}"
except TypeError:
    outcome = "TypeError"
print(list(config.time_step_limit), outcome)
PYTHON
expected='4.57.6 reads 4.57.6: [0.0, inf] logits (1, 3, 100)
4.57.6 reads 5.14.1: [0.0, {'"'__float__': 'Infinity'"'}] TypeError
5.14.1 reads 4.57.6: [0.0, inf] logits (1, 3, 100)
5.14.1 reads 5.14.1: [0.0, inf] logits (1, 3, 100)'
seen=$(for reader in 4.57.6 5.14.1; do
  for writer in 4.57.6 5.14.1; do
    saved="$folder/saved-by-$writer"
    "$folder/$writer/bin/python" "$folder/save.py" "$saved" 2> /dev/null
    echo "$reader reads $writer: $("$folder/$reader/bin/python" "$folder/load.py" "$saved" 2> /dev/null)"
  done
done)
echo "$seen"
[ "$seen" = "$expected" ] || { echo "The behaviour has changed."; exit 1; }
