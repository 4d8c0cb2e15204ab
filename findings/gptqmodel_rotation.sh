#!/bin/bash
# Transformers 5.24.0 reads a folder that GPTQModel 7.7.0 rotated as if it were not, without a word.
#
# `QuantizeConfig(rotation="hadamard")` multiplies the weights of down_proj by a Hadamard matrix, and GPTQModel's own
# loader does the same to their inputs. The folder says so in `rotation` of quantization_config alone, with
# `quant_method: gptq` and the tensors of any GPTQ folder. Transformers' GPTQConfig and optimum drop the key, and load the
# linears by GPTQModel without the transform. Seen on 2026-11-30 with a random Llama in 8 bits: logits of GPTQModel's loader
# differ from the unquantized model's by 3 %, those of Transformers by 134 %, and hardly any next token is the same.
# GPTQModel computes the rotation on CUDA alone and loads rotated folders anywhere: here `.cuda()` stays on the CPU.
# Needs 9 GB of disk.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gptqmodel==7.7.0 torch==2.14.1 transformers==5.24.0 optimum==2.3.0
cd "$folder"
GPTQMODEL_CPU_WORKERS=2 "$folder/venv/bin/python" - <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
torch.Tensor.cuda = lambda tensor, *_, **__: tensor
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=512, num_key_value_heads=2, initializer_range=0.15, **sizes)
LlamaForCausalLM(config).save_pretrained("model")
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, "w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained("model")
texts = [" ".join(f"w{number}" for number in torch.randint(2, 512, (64,)).tolist()) for _ in range(64)]
tokens = torch.randint(2, 512, (4, 64))


def logits(model):
    with torch.no_grad():
        return model(tokens).logits.float()


settings = QuantizeConfig(bits=8, group_size=32, desc_act=False, rotation="hadamard")
quantized = GPTQModel.load("model", settings, device="cpu", dtype=torch.float16)
quantized.quantize(texts, batch_size=8, backend=BACKEND.TORCH)
quantized.save("out")
original = logits(AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32))
readers = {
    "GPTQModel": GPTQModel.load("out", device="cpu", dtype=torch.float16, backend=BACKEND.TORCH).model,
    "Transformers": AutoModelForCausalLM.from_pretrained("out", dtype=torch.float16, device_map="cpu"),
}
print("rotation in config.json:", json.loads(Path("out/config.json").read_text())["quantization_config"]["rotation"])
error = {}
for name, model in readers.items():
    found = logits(model)
    error[name] = ((found - original).norm() / original.norm()).item()
    same = (found.argmax(-1) == original.argmax(-1)).float().mean().item()
    print(f"{name} {version(name.lower())}: logits differ by {error[name]:.2f}, {same:.1%} of next tokens are the same")
if not error["GPTQModel"] < 0.1 < 0.8 < error["Transformers"]:
    sys.exit("The behaviour has changed.")
PYTHON
