#!/bin/bash
# compressed-tensors 0.20.1 converts ModelOpt's NVFP4 with an FP8 KV cache into a folder whose cache scales nothing reads.
#
# A random Llama in ModelOpt's layout, with `k_proj.k_scale` and `v_proj.v_scale`, is converted by ModelOptNvfp4Converter
# with the `kv_cache_scheme` of these scales. Seen on 2026-11-30 (transformers 5.14.1, torch 2.13.0): the names are kept,
# but the library's own loader in Transformers looks for `self_attn.k_scale` and `self_attn.v_scale`. They are reported as
# missing and stay as the memory was. The converter also leaves ModelOpt's hf_quant_config.json in the folder, whose
# tensors now have other names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.14.1 compressed-tensors==0.20.1
"$folder/venv/bin/python" - "$folder" 2> /dev/null <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from compressed_tensors.entrypoints.convert import convert_checkpoint
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file

folder = Path(sys.argv[1])
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
torch.manual_seed(0)
transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).bfloat16().save_pretrained(folder / "modelopt")
tensors = {}
for name, weight in load_file(folder / "modelopt" / "model.safetensors").items():
    if not name.endswith("_proj.weight"):
        tensors[name] = weight
        continue
    linear, (out, width) = name.removesuffix(".weight"), weight.shape
    tensors[name] = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8)
    tensors[f"{linear}.weight_scale"] = torch.ones(out, width // 16).to(torch.float8_e4m3fn)
    tensors[f"{linear}.weight_scale_2"], tensors[f"{linear}.input_scale"] = torch.tensor(0.01), torch.tensor(0.01)
    if linear[-6] in "kv" and linear.endswith(("k_proj", "v_proj")):
        tensors[f"{linear}.{linear[-6]}_scale"] = torch.tensor(0.02)
save_file(tensors, folder / "modelopt" / "model.safetensors", metadata={"format": "pt"})
block = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
(folder / "modelopt" / "hf_quant_config.json").write_text(json.dumps({"quantization": block}))

cache = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
converter = ModelOptNvfp4Converter(ignore=["lm_head"], targets=[r"re:.*_proj$"], kv_cache_scheme=cache)
convert_checkpoint(str(folder / "modelopt"), str(folder / "converted"), converter, max_workers=1, device="cpu")
stored = [n for n in load_file(folder / "converted" / "model.safetensors") if ".0." in n and n.endswith("k_scale")]
config = transformers.utils.quantization_config.CompressedTensorsConfig(run_compressed=False)
_, report = transformers.AutoModelForCausalLM.from_pretrained(
    folder / "converted", dtype=torch.bfloat16, quantization_config=config, output_loading_info=True
)
missing = [name for name in report["missing_keys"] if ".0." in name and name.endswith("k_scale")]
left = sorted(path.name for path in (folder / "converted").glob("hf_quant_config.json"))
print(f"compressed-tensors {version('compressed-tensors')}: stored {stored}, missing {missing}, left {left}")
prefix = "model.layers.0.self_attn"
if (stored, missing, left) != ([f"{prefix}.k_proj.k_scale"], [f"{prefix}.k_scale"], ["hf_quant_config.json"]):
    sys.exit("The behaviour has changed.")
PYTHON
