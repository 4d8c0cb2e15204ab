"""Draft models for speculative decoding: check that one fits, and prepare its folder for openvino_genai."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.build import MODEL_FILE
from pipelines.engines.openvino.runtime import EngineFolder

TOKENIZER_FILE = "openvino_tokenizer.xml"


def check_draft(target: EngineFolder, draft: EngineFolder) -> None:
    """Reject a draft model that does not fit this engine.

    Raises:
        UserError: its vocabulary differs, or its sequences are shorter.
    """
    ours, theirs = target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise UserError(
            f"The draft engine {draft.path} has a vocabulary of {theirs} tokens; the engine's is {ours}.",
            allowed="A draft model must have the same tokenizer.",
        )
    if draft.limits.max_seq_len < target.limits.max_seq_len:
        raise UserError(
            f"The draft engine {draft.path} was built with max_seq_len={draft.limits.max_seq_len}.",
            allowed=f"It must be at least the engine's {target.limits.max_seq_len}.",
        )


def with_tokenizer(engine_dir: Path, folder: Path) -> Path:
    """Create a folder with links to an engine's files and a tokenizer.

    openvino_genai compares how both tokenizers encode a sentence before it accepts a draft model, even if it will only
    get token ids. Engine folders hold no tokenizer (`check_draft` makes sure that the vocabularies are equal), so it
    gets one that turns any text into a single token.
    """
    folder.mkdir()
    for file in (MODEL_FILE, Path(MODEL_FILE).with_suffix(".bin").name):
        (folder / file).symlink_to((engine_dir / file).resolve())
    text = op.parameter(ov.PartialShape([-1]), ov.Type.string)
    shape = op.concat([op.shape_of(text), np.array([1], dtype=np.int64)], 0)
    results = []
    for name, value in (("input_ids", 0), ("attention_mask", 1)):
        result = op.result(op.broadcast(np.int64(value), shape))
        result.get_output_tensor(0).set_names({name})
        results.append(result)
    ov.save_model(ov.Model(results, [text], "tokenizer"), folder / TOKENIZER_FILE)
    return folder
