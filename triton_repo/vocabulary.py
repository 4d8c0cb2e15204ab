"""The vocabulary file that xgrammar needs in TensorRT-LLM's backend.

Source: TensorRT-LLM `examples/generate_xgrammar_tokenizer_info.py` @7ed07f0 and `_xgrammar_tokenizer_info` in
`tensorrt_llm/tokenizer/tokenizer.py`: tokens by id as the tokenizer writes them, the tokenizer itself (xgrammar reads
from it how tokens become text), and the token that ends an answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.host.files import optional_object


def tokenizer_info(folder: Path) -> dict[str, Any]:
    """Content of the file for a Hugging Face tokenizer.

    Args:
        folder: with tokenizer.json and tokenizer_config.json.

    Returns:
        encoded_vocab (tokens in the order of their ids; an id without a token is ""), tokenizer_str, stop_token_ids.

    Raises:
        UserError: there is no tokenizer.json, or no end token is named.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"triton.guided_decoding_backend=xgrammar: '{folder}' has no tokenizer.json to make a vocabulary file of.",
            todo="Save the tokenizer with transformers' save_pretrained(), or give the file: "
            "triton.xgrammar_tokenizer_info_path=/its/path",
        )
    tokenizer = Tokenizer.from_file(str(path))
    by_token: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    vocabulary = [""] * (max(by_token.values()) + 1)
    for token, number in by_token.items():
        vocabulary[number] = token
    end = _end_token(folder)
    if end not in by_token:
        raise UserError(
            f"triton.guided_decoding_backend=xgrammar: '{folder}' names the end token {end!r}, which is none of its "
            f"{len(by_token)} tokens.",
            todo="Set eos_token in tokenizer_config.json.",
        )
    return {"encoded_vocab": vocabulary, "tokenizer_str": tokenizer.to_str(), "stop_token_ids": [by_token[end]]}


def write(folder: Path, path: Path) -> None:
    """Write the file."""
    path.write_text(json.dumps(tokenizer_info(folder)), encoding="utf-8")


def _end_token(folder: Path) -> str | None:
    """`eos_token` of tokenizer_config.json, which is a text or a mapping with one."""
    token = optional_object(folder / "tokenizer_config.json").get("eos_token")
    return token["content"] if isinstance(token, dict) else token
