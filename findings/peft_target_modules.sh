#!/bin/bash
# peft 0.21.2 drops trained matrices whose module target_modules does not name, without a word.
#
# An adapter is trained on q_proj and v_proj; then adapter_config.json names q_proj alone, as after an edit by hand or by
# another tool. Its safetensors file still holds both. Seen on 2026-11-28 (torch 2.13.0, transformers 5.14.1):
# PeftModel.from_pretrained loads it with no warning and the matrices of v_proj have no effect, so the logits differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.14.1 peft==0.21.2
"$folder/venv/bin/python" - "$folder/adapter" <<'PYTHON'
import json
import sys
import warnings
from pathlib import Path

import peft
import torch
import transformers

folder = Path(sys.argv[1])
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}


def base():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()


def loaded():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(base(), folder)
        return model(input_ids=torch.arange(6)[None]).logits.detach(), [str(each.message) for each in caught]


model = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
for name, parameter in model.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(parameter)
model.save_pretrained(folder)
whole, _ = loaded()
config = json.loads((folder / "adapter_config.json").read_text())
(folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
part, said = loaded()
difference = float((whole - part).abs().max())
print(f"peft {peft.__version__}: logits differ by {difference:.3f}; warnings: {said}")
if said or difference < 0.01:
    sys.exit("The behaviour has changed.")
PYTHON
