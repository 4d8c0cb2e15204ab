#!/bin/bash
# nvidia-modelopt 0.47.0 exports AWQ with clipping ("awq_full") without the clipping of q, k, v, gate and up.
#
# awq_full finds scales for the inputs, as awq_lite does, and then clips the largest weights of each group where that
# makes the error smaller. Seen on 2026-12-01 (torch 2.13.0, transformers 5.14.1): export_hf_checkpoint gives linears
# that share an input one common scale and takes the scales of their weights anew from the largest of each group. The
# codes and scales of q_proj, k_proj, v_proj, gate_proj and up_proj are those of awq_lite, to the last bit; o_proj and
# down_proj keep the clipping. The model in memory, which is what one evaluates before the export, has it everywhere.
# Nothing is logged. Input: random weights with heavy tails, and random texts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.14.1 nvidia-modelopt==0.47.0 requests==2.32.5
"$folder/venv/bin/python" - "$folder" 2> /dev/null <<'PYTHON' | grep '_proj' | tee "$folder/seen"
import sys
from copy import deepcopy
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128}
torch.manual_seed(0)
config = transformers.LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
original = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
with torch.no_grad():
    for weight in original.model.layers.parameters():
        if weight.dim() == 2:
            weight.copy_(0.02 * torch.randn(weight.shape) * torch.exp(0.5 * torch.randn(weight.shape)))
texts = [torch.randint(0, 128, (4, 32)) for _ in range(4)]

memory, files = {}, {}
for way in ("awq_lite", "awq_full"):
    model = deepcopy(original)
    mtq.quantize(model, {**mtq.INT4_AWQ_CFG, "algorithm": way}, lambda m: [m(text) for text in texts])
    linears = {name: part for name, part in model.model.layers.named_modules() if name.endswith("_proj")}
    memory[way] = {name: float((one.weight_quantizer(one.weight) - one.weight).norm()) for name, one in linears.items()}
    out = Path(sys.argv[1]) / way
    export_hf_checkpoint(model, export_dir=out)
    files[way] = load_file(out / "model.safetensors")

for name in memory["awq_lite"]:
    smaller = memory["awq_full"][name] < 0.95 * memory["awq_lite"][name]
    parts = [f"model.layers.{name}.{part}" for part in ("weight", "weight_scale")]
    same = all(torch.equal(files["awq_lite"][part], files["awq_full"][part]) for part in parts)
    kind = name.rpartition(".")[2]
    print(f"{kind}: clipped in memory {smaller}, exported as awq_lite's {same}")
PYTHON
diff "$folder/seen" - <<'SEEN' || { echo "The behaviour has changed."; exit 1; }
q_proj: clipped in memory True, exported as awq_lite's True
k_proj: clipped in memory True, exported as awq_lite's True
v_proj: clipped in memory True, exported as awq_lite's True
o_proj: clipped in memory True, exported as awq_lite's False
gate_proj: clipped in memory True, exported as awq_lite's True
up_proj: clipped in memory True, exported as awq_lite's True
down_proj: clipped in memory True, exported as awq_lite's False
SEEN
