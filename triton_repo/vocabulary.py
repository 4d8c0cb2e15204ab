"""The vocabulary file that xgrammar needs in TensorRT-LLM's backend.

Source: TensorRT-LLM `examples/generate_xgrammar_tokenizer_info.py` @7ed07f0 and `_xgrammar_tokenizer_info` in
`tensorrt_llm/tokenizer/tokenizer.py`: tokens by id as the tokenizer writes them, the tokenizer itself (xgrammar reads
from it how tokens become text), and the token that ends an answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines.checkpoint.tokenizer import opened
from pipelines.domain.errors import UserError


def tokenizer_info(folder: Path) -> dict[str, Any]:
    """Content of the file for a Hugging Face tokenizer.

    Args:
        folder: with tokenizer.json and tokenizer_config.json.

    Returns:
        encoded_vocab (tokens in the order of their ids; an id without a token is ""), tokenizer_str, stop_token_ids.

    Raises:
        UserError: there is no tokenizer.json, or no end token is named.
    """
    found = opened(folder, "triton.guided_decoding_backend=xgrammar")
    by_token: dict[str, int] = found.tokenizer.get_vocab(with_added_tokens=True)
    vocabulary = [""] * (max(by_token.values()) + 1)
    for token, number in by_token.items():
        vocabulary[number] = token
    if not found.end_ids:
        raise UserError(
            f"triton.guided_decoding_backend=xgrammar: '{folder}' names no end token among its {len(by_token)} tokens.",
            todo="Set eos_token in tokenizer_config.json, or give the file: "
            "triton.xgrammar_tokenizer_info_path=/its/path",
        )
    return {
        "encoded_vocab": vocabulary,
        "tokenizer_str": found.tokenizer.to_str(),
        "stop_token_ids": list(found.end_ids),
    }


def write(folder: Path, path: Path) -> None:
    """Write the file."""
    path.write_text(json.dumps(tokenizer_info(folder)), encoding="utf-8")
