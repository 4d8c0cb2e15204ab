#!/bin/bash
# peft 0.21.2 saves rank_pattern and alpha_pattern in another order than it trained with, and the first match counts.
#
# Two patterns match a module; get_peft_model takes the first of them. save_pretrained() sorts the keys of
# adapter_config.json, so PeftModel.from_pretrained takes the other one. Seen on 2026-11-30 (torch 2.13.0, transformers
# 5.14.1): the reloaded adapter has another scaling (16 instead of 1 in layer 0) and other logits, with no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.14.1 peft==0.21.2
"$folder/venv/bin/python" - "$folder/adapter" <<'PYTHON'
import sys
import warnings

import peft
import torch
import transformers

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}


def base():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()


def seen(model):
    scaling = model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"]
    return scaling, model.eval()(input_ids=torch.arange(6)[None]).logits.detach()


alphas = {"q_proj": 2, "layers.0.self_attn.q_proj": 32}
trained = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["q_proj"], alpha_pattern=alphas))
for name, parameter in trained.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(parameter)
before, expected = seen(trained)
trained.save_pretrained(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    after, found = seen(peft.PeftModel.from_pretrained(base(), sys.argv[1]))
said = [str(each.message) for each in caught]
difference = float((found - expected).abs().max())
print(f"peft {peft.__version__}: scaling of layer 0 {before:g}, reloaded {after:g}; logits differ by {difference:.3f}")
print(f"warnings: {said}")
if said or before == after or difference < 0.01:
    sys.exit("The behaviour has changed.")
PYTHON
