#!/bin/bash
# Transformers 5.14.1 rebuilds a byte-level tokenizer where tokenizer_config.json names LlamaTokenizer.
#
# A folder has a byte-level tokenizer.json (as Llama 3, Qwen and SmolLM2 have) and a tokenizer_config.json whose
# tokenizer_class is LlamaTokenizer or LlamaTokenizerFast, as DeepSeek-R1-Distill-Llama's. Seen on 2026-11-28:
# AutoTokenizer keeps the vocabulary and replaces normalizer, pre-tokenizer and decoder by SentencePiece's, so that
# "of the" gives other ids than tokenizer.json itself, without a warning. With PreTrainedTokenizerFast they agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.14.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

folder, text = Path(sys.argv[1]), "the capital of the land of the rising sun"
made = Tokenizer(models.BPE())
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
made.train_from_iterator([text] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
made.save(str(folder / "tokenizer.json"))
same = {}
for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer"):
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    same[name] = ids == made.encode(text).ids
    print(f"{name:24} {ids}")
print(f"{'tokenizer.json':24} {made.encode(text).ids}\ntransformers {transformers.__version__}: {same}")
if same != {"PreTrainedTokenizerFast": True, "LlamaTokenizerFast": False, "LlamaTokenizer": False}:
    sys.exit("The behaviour has changed.")
PYTHON
