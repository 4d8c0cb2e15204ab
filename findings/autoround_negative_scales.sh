#!/bin/bash
# AutoRound 0.16.1 writes signed scales into its symmetric W4A16 folders, which is its default.
#
# The weight of largest magnitude of a group gets the code -8, and its sign goes into the scale. Seen on 2026-11-28:
# about half of the scales in a folder of format auto_gptq are negative. The arithmetic (code - 8) * scale is exact;
# readers that take scales for magnitudes refuse such folders or read them wrongly. Needs 3 GB of disk.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet auto-round==0.16.1 torch==2.13.0 transformers==5.14.1
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)).save_pretrained("model")
words = {f"w{number}": number for number in range(64)}
PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0"))).save_pretrained("model")
AutoRound("model", scheme="W4A16", iters=0, disable_opt_rtn=True, device_map="cpu").quantize_and_save("out", format="auto_gptq")
scales = [
    tensor.flatten()
    for file in Path("out").rglob("*.safetensors")
    for name, tensor in load_file(file).items()
    if name.endswith("scales")
]
share = (torch.cat(scales) < 0).float().mean().item()
print(f"auto-round {version('auto-round')}: {share:.1%} of {torch.cat(scales).numel()} scales are negative")
if not 0.3 < share < 0.7:
    sys.exit("The behaviour has changed.")
PYTHON
