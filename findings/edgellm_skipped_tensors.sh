#!/bin/bash
# tensorrt-edgellm 0.11.0 exports a W4A8_AWQ checkpoint without most of its tensors, and ends with exit code 0.
#
# A random Llama is written as ModelOpt writes W4A8_AWQ: two INT4 in a byte, weight_scale, weight_scale_2, input_scale,
# pre_quant_scale. Seen on 2026-11-28 (torch 2.13.0, transformers 5.14.1): the exporter takes "W4A8_AWQ" for AutoAWQ's
# layout, logs "Loaded 7 tensors, skipped 70" and succeeds; the linears of the graph are zeros.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'tensorrt-edgellm[export]==0.11.0'
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

folder = Path(sys.argv[1])
torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).half().save_pretrained(folder)
tensors = {}
for name, weight in load_file(folder / "model.safetensors").items():
    if not name.endswith("_proj.weight"):
        tensors[name] = weight
        continue
    linear, (out, width) = name.removesuffix(".weight"), weight.shape
    tensors[name] = torch.randint(0, 256, (out // 2, width), dtype=torch.uint8)
    tensors[f"{linear}.weight_scale"] = torch.full((out, width // 128), 0.01)
    tensors[f"{linear}.weight_scale_2"] = tensors[f"{linear}.input_scale"] = torch.tensor(0.01)
    tensors[f"{linear}.weight_scale_2"] = tensors[f"{linear}.weight_scale_2"].clone()
    tensors[f"{linear}.pre_quant_scale"] = torch.ones(width).half()
save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
quantization = {"quant_algo": "W4A8_AWQ", "group_size": 128, "has_zero_point": False, "pre_quant_scale": True}
(folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
(folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
PYTHON
code=0
"$folder/venv/bin/tensorrt-edgellm-export" "$folder/model" "$folder/out" > "$folder/log" 2>&1 || code=$?
line=$(grep -o 'Loaded [0-9]* tensors, skipped [0-9]*' "$folder/log" || true)
echo "tensorrt-edgellm 0.11.0: exit code $code; ${line:-nothing was loaded}"
if [ "$code" -ne 0 ] || [[ "$line" == *"skipped 0" ]] || [ -z "$line" ]; then
  echo "The behaviour has changed."
  exit 1
fi
