#!/bin/bash
# nvidia-modelopt 0.47.0 declares INT4 without AWQ as AWQ with scales for the inputs, which it does not write.
#
# INT4_BLOCKWISE_WEIGHT_ONLY_CFG rounds weights in groups and scales no inputs. Seen on 2026-11-30 (torch 2.13.0,
# transformers 5.14.1): export_tensorrt_llm_checkpoint writes quant_algo W4A16_AWQ with pre_quant_scale true, as it does
# for INT4_AWQ_CFG, but no prequant_scaling_factor is among the tensors. TensorRT-LLM makes a linear with that tensor
# where the configuration says true.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.14.1 nvidia-modelopt==0.47.0 requests==2.32.5
"$folder/venv/bin/python" - "$folder" 2> /dev/null <<'PYTHON' | grep '^INT4' | tee "$folder/seen"
import json
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_tensorrt_llm_checkpoint
from safetensors import safe_open

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
for name in ("INT4_AWQ_CFG", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    tokens = torch.randint(0, 256, (2, 32))
    mtq.quantize(model, getattr(mtq, name), lambda m: m(tokens))
    out = Path(sys.argv[1]) / name
    with torch.inference_mode():
        export_tensorrt_llm_checkpoint(
            model, "llama", torch.float16, out, inference_tensor_parallel=1, inference_pipeline_parallel=1
        )
    block = json.loads((out / "config.json").read_text())["quantization"]
    with safe_open(out / "rank0.safetensors", "pt") as file:
        scales = sum(key.endswith("prequant_scaling_factor") for key in file.keys())
    print(f"{name}: {block['quant_algo']}, pre_quant_scale={block['pre_quant_scale']}, {scales} such tensors")
PYTHON
diff "$folder/seen" - <<'SEEN' || { echo "The behaviour has changed."; exit 1; }
INT4_AWQ_CFG: W4A16_AWQ, pre_quant_scale=True, 10 such tensors
INT4_BLOCKWISE_WEIGHT_ONLY_CFG: W4A16_AWQ, pre_quant_scale=True, 0 such tensors
SEEN
