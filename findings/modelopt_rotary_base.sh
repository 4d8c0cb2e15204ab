#!/bin/bash
# nvidia-modelopt 0.47.0 exports a TensorRT-LLM checkpoint without RoPE's base and scaling if Transformers is 5.
#
# A random Llama with the positions of Llama 3.1 (base 500,000, scaling "llama3") is quantized to FP8 and exported by
# export_tensorrt_llm_checkpoint. Seen on 2026-11-30 (torch 2.13.0): with Transformers 4.57.6 config.json has
# rotary_base 500000.0 and the scaling; with 5.14.1, which keeps both in `rope_parameters`, it has null for both, and no
# warning names them. TensorRT-LLM's Llama takes 10,000 where the base is not stated.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/export.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_tensorrt_llm_checkpoint

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 512}
if transformers.__version__.startswith("5"):
    rope = {"rope_parameters": SCALING | {"rope_theta": 500000.0}}
else:
    rope = {"rope_theta": 500000.0, "rope_scaling": SCALING}
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, max_position_embeddings=4096, **rope)).eval()
tokens = torch.randint(0, 256, (2, 32))
mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda m: m(tokens))
with torch.inference_mode():
    export_tensorrt_llm_checkpoint(
        model, "llama", torch.float16, sys.argv[1], inference_tensor_parallel=1, inference_pipeline_parallel=1
    )
config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
scaling = config.get("rotary_scaling") or {}
print(f"transformers {transformers.__version__}: rotary_base={config.get('rotary_base')} factor={scaling.get('factor')}")
PYTHON
for transformers in 4.57.6 5.14.1; do
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$transformers" nvidia-modelopt==0.47.0 requests==2.32.5
  "$folder/venv/bin/python" "$folder/export.py" "$folder/$transformers" 2> /dev/null | grep '^transformers' | tee -a "$folder/seen"
  rm -r "$folder/venv"
done
diff "$folder/seen" - <<'SEEN' || { echo "The behaviour has changed."; exit 1; }
transformers 4.57.6: rotary_base=500000.0 factor=8.0
transformers 5.14.1: rotary_base=None factor=None
SEEN
