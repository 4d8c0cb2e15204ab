"""The three tokenizers: byte-level BPE in the styles of Llama 3 and Qwen, and Gemma style BPE with byte fallback.

Merges are learned on the world's own sentences, so every word of the world is one token. Any other
text still round-trips, byte by byte.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# The split pattern of Llama 3: words keep the single space before them, and newlines stay together.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen's is the same but for digits, each of which stands alone.
_QWEN_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPACE = "\u2581"  # SentencePiece writes a space as this character
_PRINTABLE = [chr(code) for code in range(33, 127)]
# Far more than the world needs: training stops by itself once every word is one token.
_MERGE_EVERYTHING = 100_000


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The names of a model's special tokens.

    ``unk`` is empty if bytes cover everything, ``bos`` if texts begin without a special token.
    """

    eos: str
    pad: str
    bos: str = ""
    unk: str = ""

    def named(self) -> dict[str, str]:
        """Return ``bos_token`` etc. for the tokenizer's JSON files."""
        tokens = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.pad, "unk_token": self.unk}
        return {name: token for name, token in tokens.items() if token}


LLAMA_SPECIALS = SpecialTokens(bos="<|begin_of_text|>", eos="<|end_of_text|>", pad="<|finetune_right_pad_id|>")
QWEN_SPECIALS = SpecialTokens(eos="<|endoftext|>", pad="<|endoftext|>")
GEMMA_SPECIALS = SpecialTokens(bos="<bos>", eos="<eos>", pad="<pad>", unk="<unk>")


def _prepend_bos(tokenizer: Tokenizer, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _as_added(tokens: Sequence[str]) -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in tokens]


def _byte_level(texts: Iterable[str], split: str, specials: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer in which every word of ``texts`` is one token."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MERGE_EVERYTHING,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(_as_added(specials))
    return tokenizer


def train_llama_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a Llama-3 style tokenizer; it begins a text with its special token."""
    tokenizer = _byte_level(texts, _LLAMA3_SPLIT, [LLAMA_SPECIALS.bos, LLAMA_SPECIALS.eos, LLAMA_SPECIALS.pad])
    tokenizer.post_processor = _prepend_bos(tokenizer, LLAMA_SPECIALS.bos)
    return tokenizer


def train_qwen_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a Qwen style tokenizer; it adds nothing to a text."""
    tokenizer = _byte_level(texts, _QWEN_SPLIT, [QWEN_SPECIALS.eos])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _learn_gemma_merges(texts: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the pieces in the order in which they were learned, and the merges."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", _SPACE)
    # Only during training: no piece may span two words, or a word and the punctuation next to it.
    words = Regex(rf"{_SPACE}?\p{{L}}+|\n+|[^\p{{L}}\n]")
    learner.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=_MERGE_EVERYTHING, min_frequency=1, initial_alphabet=[*_PRINTABLE, _SPACE, "\n"], show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    model: dict[str, Any] = json.loads(learner.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return pieces, [(left, right) for left, right in model["merges"]]


def train_gemma_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a Gemma style tokenizer: <pad> 0, <eos> 1, <bos> 2, <unk> 3, then the 256 bytes."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces, merges = _learn_gemma_merges(texts)
    order = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {piece: i for i, piece in enumerate(order)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    # As in Gemma's own tokenizer.json: after the normalizer no space is left, so nothing is split.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(_as_added(specials))
    tokenizer.post_processor = _prepend_bos(tokenizer, GEMMA_SPECIALS.bos)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, specials: SpecialTokens, out_dir: Path, *, max_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into ``out_dir``.

    ``PreTrainedTokenizerFast`` uses tokenizer.json unchanged, in transformers 4 and 5.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        **specials.named(),
    }
    tokenizer.save(str(out_dir / "tokenizer.json"))
    for name, value in (("tokenizer_config.json", config), ("special_tokens_map.json", specials.named())):
        (out_dir / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
