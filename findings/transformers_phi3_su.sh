#!/bin/bash
# Transformers 5 cannot load a Phi-3 whose rope_scaling has the type "su", although its class still renames it to longrope.
#
# The first 128k folders of Phi-3 were published with {"type": "su", "short_factor": [...], "long_factor": [...]} and
# original_max_position_embeddings beside it. Seen on 2026-11-29: 4.57.6 loads such a config.json as longrope. 5.14.1 and
# 5.24.0 raise KeyError, because the number is copied into the block only for the names longrope, llama3 and yarn, and
# "su" is renamed after that. With "yarn", another old name of the same, all three load it as longrope.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.14.1 5.24.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version"
done
cat > "$folder/load.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers

folder = Path(sys.argv[1])
for kind in ("longrope", "yarn", "su"):
    block = {"type": kind, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4,
        "vocab_size": 64, "pad_token_id": None, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "rope_scaling": block,
    }
    (folder / "config.json").write_text(json.dumps(config))
    try:
        read = transformers.AutoConfig.from_pretrained(folder)
        outcome = read.rope_parameters["rope_type"] if hasattr(read, "rope_parameters") else read.rope_scaling["type"]
    except KeyError:
        outcome = "KeyError"
    print(f"{transformers.__version__} {kind}: {outcome}")
PYTHON
expected='4.57.6 longrope: longrope
4.57.6 yarn: longrope
4.57.6 su: longrope
5.14.1 longrope: longrope
5.14.1 yarn: longrope
5.14.1 su: KeyError
5.24.0 longrope: longrope
5.24.0 yarn: longrope
5.24.0 su: KeyError'
mkdir "$folder/model"
seen=$(for version in 4.57.6 5.14.1 5.24.0; do "$folder/$version/bin/python" "$folder/load.py" "$folder/model" 2> /dev/null; done)
echo "$seen"
[ "$seen" = "$expected" ] || { echo "The behaviour has changed."; exit 1; }
