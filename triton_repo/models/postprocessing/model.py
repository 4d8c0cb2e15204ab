"""Triton model `postprocessing`: token ids to text.

The same file serves the GPU and the CPU repository; see `preprocessing` for how tokenizers are opened.
"""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizer_folder import TokenizerFolder

ANCHOR = "a"
LEFT = "\0{:05x}"
"""Abstract socket where `tensorrt_llm` listens for the keys of requests whose clients are gone, by the number in the
response. No nested call: with tritonserver 2.51 those made here while a client leaves corrupted the server's heap."""


class TritonPythonModel:
    """Python-backend entry point; one object per instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer; parameters of config.pbtxt: `tokenizer_dir`, `skip_special_tokens`."""
        parameters = json.loads(args["model_config"]).get("parameters", {})
        given = parameters.get("tokenizer_dir", {}).get("string_value", "")
        folder = Path(args["model_repository"]).parent / given
        if not given or not folder.is_dir():
            raise pb_utils.TritonModelException(f"tokenizer_dir='{given}' of postprocessing: {folder} is not a folder.")
        word = parameters.get("skip_special_tokens", {}).get("string_value", "").lower()
        self._text = open_detokenizer(folder, skip_special_tokens=word not in ("false", "0"))
        self._left = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._left.setblocking(False)
        gc.freeze()  # a full collection would walk through all that is imported, while requests wait

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
        rows = zip(tokens.reshape(lengths.size, -1).tolist(), lengths.reshape(-1).tolist(), strict=True)
        key = pb_utils.get_input_tensor_by_name(request, "CANCELLATION_KEY")
        if key is not None and request.is_cancelled():
            self._tell(key.as_numpy())
        texts = np.array([self._text(row[:length]).encode("utf-8") for row, length in rows], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", texts)])

    def _tell(self, key: np.ndarray[Any, Any]) -> None:
        """Tell `tensorrt_llm` that a client is gone; `key` is [1, 2], the number of a socket and the request's key."""
        with suppress(OSError):  # it is told again with the next key
            self._left.sendto(key[0, 1].tobytes(), LEFT.format(int(key[0, 0])))


class Detokenizer:
    """Decodes token ids such that the parts of one answer, decoded one by one, add up to the whole.

    Decoders like SentencePiece's drop the space in front of the first token. That is right for a whole sequence, which
    opens with a special token, and wrong for a continuation: so a continuation is decoded after an anchor token, whose
    own text is then cut off.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], special: frozenset[int], anchor: list[int], *, size: int
    ) -> None:
        """Take what the tokenizer offers.

        Args:
            decode: ids to text.
            special: ids of special tokens; a sequence that opens with one is whole.
            anchor: ids of an ordinary word.
            size: entries of the vocabulary; engines pad it, and ids beyond have no text.
        """
        self._decode, self._special, self._anchor, self._size = decode, special, anchor, size
        self._cut = len(decode(anchor))

    def __call__(self, ids: list[int]) -> str:
        """Return the text of ids."""
        ids = [token for token in ids if 0 <= token < self._size]
        if not ids:
            return ""
        if ids[0] in self._special:
            return self._decode(ids)
        return self._decode(self._anchor + ids)[self._cut :]


def open_detokenizer(folder: Path, *, skip_special_tokens: bool) -> Detokenizer:
    """Open the tokenizer of a folder."""
    tokenizer = TokenizerFolder(folder).tokenizer
    special = frozenset(token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special)
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False).ids
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return Detokenizer(
        lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), special, anchor, size=size
    )
