#!/bin/bash
# Transformers computes Gemma 2 without its soft cap of attention by default, up to 5.14 at least.
#
# Gemma 2 caps the logits of attention: 50 tanh(x / 50) (attn_logit_softcapping). Only the eager implementation computes it;
# the default, sdpa, ignores the value without a warning. Seen on 2026-11-29: 4.57.6 and 5.14.1 give the logits of a model
# without the cap, 5.24.0 takes eager by default. A reference for Gemma 2 needs attn_implementation="eager".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.14.1 5.24.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version" torch==2.13.0
done
cat > "$folder/cap.py" <<'PYTHON'
import torch
import transformers


def logits(cap, **kind):
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_logit_softcapping=cap, pad_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, **kind).eval()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 20  # so that the cap decides
    with torch.no_grad():
        return model(torch.arange(2, 34)[None]).logits, model.config._attn_implementation


usual, name = logits(1.0)
capped, without = (logits(cap, attn_implementation="eager")[0] for cap in (1.0, None))
same = [what for what, other in (("capped", capped), ("not capped", without)) if torch.allclose(usual, other, atol=1e-4)]
print(transformers.__version__, name, *same)
PYTHON
expected='4.57.6 sdpa not capped
5.14.1 sdpa not capped
5.24.0 eager capped'
seen=$(for version in 4.57.6 5.14.1 5.24.0; do "$folder/$version/bin/python" "$folder/cap.py" 2> /dev/null; done)
echo "$seen"
[ "$seen" = "$expected" ] || { echo "The behaviour has changed."; exit 1; }
