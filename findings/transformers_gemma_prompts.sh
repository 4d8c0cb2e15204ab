#!/bin/bash
# A prompt that peft tuned for Gemma under Transformers 4 is another prompt under Transformers 5.4 and later, without a warning.
#
# Gemma multiplies embeddings by the square root of the hidden size. 4.57.6 does it to whatever it is given, `inputs_embeds`
# too; 5.14.1 does it in the embedding of token ids alone (as does the source of 5.4.0; that of 5.3.0 does not). Texts have
# the same logits in both, but the rows of peft's prompt tuning, which are `inputs_embeds`, count sqrt(hidden) times less: 45
# times for Gemma 2B. Seen on 2026-12-01 (peft 0.18.0, torch 2.13.0) of Gemma and Gemma 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/load.py" <<'PYTHON'
import sys
from pathlib import Path

import peft
import torch
import transformers

folder, kind = Path(sys.argv[1]) / sys.argv[2], sys.argv[2]
if not folder.exists():
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
             "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": None}
    made = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape))
    made.save_pretrained(folder)
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(made, tuning).save_pretrained(folder / "prompt")
base = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.inference_mode():
    text = float(base(torch.arange(8)[None]).logits[0, -1, 0])
    tuned = peft.PeftModel.from_pretrained(base, folder / "prompt").eval()
    first = tuned(input_ids=torch.arange(8)[None], output_hidden_states=True).hidden_states[0][0, 0]
    row = tuned.prompt_encoder.default.embedding.weight[0]
print(f"transformers {transformers.__version__}, {kind}: text {text:.3f}, rows times {float((first / row).mean()):.0f}")
PYTHON
for transformers in 4.57.6 5.14.1; do
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$transformers" peft==0.18.0
  for kind in Gemma Gemma2; do
    "$folder/venv/bin/python" "$folder/load.py" "$folder" "$kind" 2>> "$folder/$transformers.log" | tee -a "$folder/seen"
  done
  rm -r "$folder/venv"
done
grep -iE 'warn.*(scale|embed|prompt)' "$folder/5.14.1.log" && { echo "5.14.1 warns now."; exit 1; }
[ "$(sed 's/.*text \(.*\),.*/\1/' "$folder/seen" | sort -u | wc -l)" -le 2 ] || { echo "Texts differ too."; exit 1; }
sed 's/text .*, //' "$folder/seen" | diff - <(printf 'transformers %s\n' '4.57.6, Gemma: rows times 8' \
  '4.57.6, Gemma2: rows times 8' '5.14.1, Gemma: rows times 1' '5.14.1, Gemma2: rows times 1') \
  || { echo "The behaviour has changed."; exit 1; }
