#!/bin/bash
# openvino_genai 2026.4.1.0 samples from another distribution as soon as there is a draft model.
#
# Speculative decoding promises the target model's own distribution (arXiv:2211.17192); a draft model may only change the
# speed. Two random Llamas over 16 tokens, exported by optimum-intel, sampling at temperature 1: the second token of 1,500
# answers is compared with the exact probabilities that Transformers computes. Seen on 2026-11-30 (optimum-intel 2.2.0,
# transformers 5.5.4, torch 2.13.0): alone, the total variation distance is 0.05, which is chance; with the other model as
# draft it is 0.38, more than between the two models (0.28). Greedy answers are the target's own. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.5.4 'optimum-intel[openvino]==2.2.0' \
  openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision 2> /dev/null || true # may be of another torch, and is not needed
cat > "$folder/sample.py" <<'PYTHON'
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import torch
import transformers
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB, REQUESTS, PROMPT = 16, 1500, [1, 2, 3, 4]
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
folder = Path(sys.argv[1])
letters = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate("abcdefghijklmnop")}, merges=[]))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="p")


def make(name, seed):
    """Export a random Llama, and return its probabilities of the next token after each of some texts."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SHAPE, initializer_range=0.15, eos_token_id=15, bos_token_id=15)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / f"{name}-hf")
    tokenizer.save_pretrained(folder / f"{name}-hf")
    OVModelForCausalLM.from_pretrained(folder / f"{name}-hf", export=True, load_in_8bit=False).save_pretrained(folder / name)
    for part, graph in zip(("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True)):
        ov.save_model(graph, folder / name / f"openvino_{part}.xml")
    return lambda texts: model(torch.tensor(texts)).logits[:, -1].double().softmax(-1).detach().numpy()


def scheduler():
    config = genai.SchedulerConfig()
    config.cache_size, config.num_kv_blocks, config.max_num_seqs = 0, 256, 8
    return config


def second_token(draft, sampling=True):
    """Return the shares of the tokens that came second."""
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    if draft:
        options["draft_model"] = genai.draft_model(str(folder / "draft"), "CPU", scheduler_config=scheduler())
    pipeline = genai.ContinuousBatchingPipeline(str(folder / "target"), scheduler(), "CPU", options)
    counts = np.zeros(VOCAB)
    for seed in range(REQUESTS if sampling else 1):
        config = genai.GenerationConfig(max_new_tokens=4, ignore_eos=True, do_sample=sampling, rng_seed=seed)
        if draft:
            config.num_assistant_tokens = 2
        handle = pipeline.add_request(seed, ov.Tensor(np.array([PROMPT])), config)
        while handle.get_status() == genai.GenerationStatus.RUNNING:
            pipeline.step()
        counts[handle.read_all()[0].generated_ids[1]] += 1
    return counts / counts.sum()


def distance(one, other):
    return float(np.abs(one - other).sum() / 2)


target, draft = make("target", 0), make("draft", 1)
first, texts = target([PROMPT])[0], [[*PROMPT, token] for token in range(VOCAB)]
exact = first @ target(texts)
alone, guessed = (distance(second_token(with_draft), exact) for with_draft in (False, True))
models_apart = distance(exact, first @ draft(texts))
greedy = np.array_equal(second_token(False, sampling=False), second_token(True, sampling=False))
print(f"openvino_genai {genai.__version__}: distance from the target model {alone:.2f} alone, {guessed:.2f} with a draft")
print(f"the models themselves: {models_apart:.2f}; greedy answers are equal: {greedy}")
if alone > 0.1 or guessed < 0.2 or not greedy:
    sys.exit("The behaviour has changed.")
PYTHON
"$folder/venv/bin/python" "$folder/sample.py" "$folder" 2> "$folder/log" || { tail -3 "$folder/log"; exit 1; }
