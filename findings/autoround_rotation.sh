#!/bin/bash
# AutoRound 0.16.1 drops `rotation_config` where it rounds to nearest without loading the model, without a word.
#
# Plain rounding (`iters=0, disable_opt_rtn=True`) of a model on disk takes the model-free route by itself. Seen on
# 2026-11-30 with a random Llama and W4A16: with `rotation_config="hadamard"` the folder has the same bytes as without,
# and config.json has no `rotation_config`; with `disable_model_free=True` it has one. Needs 3 GB of disk.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet auto-round==0.16.1 torch==2.13.0 transformers==5.14.1
cd "$folder"
cat > run.py <<'PYTHON'
import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from auto_round import AutoRound
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def made(name, **options):
    """Return the digest of the weights, and the rotation that config.json declares."""
    settings = {"scheme": "W4A16", "group_size": 64, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    texts = {"dataset": "texts.json", "nsamples": 8, "seqlen": 32}
    rounder = AutoRound("model", enable_torch_compile=False, **texts, **settings, **options)
    rounder.quantize_and_save(name, format="auto_round")
    (weights,) = Path(name).rglob("model*.safetensors")
    (config,) = Path(name).rglob("config.json")
    block = json.loads(config.read_text())["quantization_config"]
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:12], block.get("rotation_config")


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)).save_pretrained("model")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("model")
    texts = [" ".join(f"w{number}" for number in torch.randint(64, (64,)).tolist()) for _ in range(16)]
    Path("texts.json").write_text(json.dumps([{"text": text} for text in texts]))
    plain = made("plain")
    rotated = made("rotated", rotation_config="hadamard")
    loaded = made("loaded", rotation_config="hadamard", disable_model_free=True)
    print(f"auto-round {version('auto-round')}: plain {plain}, rotated {rotated}, with the model loaded {loaded}")
    if rotated != plain or plain[1] is not None or not loaded[1]:
        sys.exit("The behaviour has changed.")
PYTHON
"$folder/venv/bin/python" run.py
