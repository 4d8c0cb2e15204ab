"""Triton model `preprocessing`: text to token ids, and words to the id lists that `tensorrt_llm` takes.

The same file serves the GPU and the CPU repository.
`tokenizer_folder.py` and `pictures.py` beside it are the project's reader of tokenizers and what prepares pictures.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from pictures import BadPictureError, Pictures  # type: ignore[import-not-found]
from tokenizer_folder import TokenizerFolder

Array = np.ndarray[Any, Any]

NO_OFFSET = -1
"""Fills the offsets row of a word list after the last word."""

WORD_INPUTS = {"BAD_WORDS_DICT": "BAD_WORDS_DICT (bad_words)", "STOP_WORDS_DICT": "STOP_WORDS_DICT (stop_words)"}
IMAGE_INPUTS = ("IMAGE_BYTES", "IMAGE_URL", "IMAGE_SIZES", "VIDEO_BYTES")


RESTARTS = "TRTLLM_PIPELINES_RESTARTS"
"""Variable that `make serve` sets: how often it has started this server again (pipelines/serving/process.py)."""

SHRINKING = 4
"""Margin for normalizers, which may drop or join characters before tokenization."""


class BadInputError(Exception):
    """An input of the client cannot be used; the message names it."""


class TritonPythonModel:
    """Python-backend entry point; one object per instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer.

        Parameters of config.pbtxt: `tokenizer_dir` (relative paths count from the repository), `add_special_tokens`.
        """
        parameters = json.loads(args["model_config"]).get("parameters", {})
        folder = _folder(parameters, args)
        self._add_special_tokens = _flag(parameters, "add_special_tokens", default=True)
        self._tokens = open_tokenizer(folder)
        self._pictures = _pictures(parameters, Path(args["model_repository"]).parent)
        self._max_input_len = _max_input_len(Path(args["model_repository"]).parent)
        self._metrics = _count_restarts(os.environ[RESTARTS]) if RESTARTS in os.environ else None
        gc.freeze()  # a full collection would walk through all that is imported, while requests wait

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request; a bad one gets its own error."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            tensors = self._outputs(request)
        except (BadInputError, BadPictureError) as fault:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(fault), pb_utils.TritonError.INVALID_ARG))
        wanted = set(request.requested_output_names())
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, values) for name, values in tensors.items() if name in wanted]
        )

    def _outputs(self, request: Any) -> dict[str, Array]:
        prompts = [self._encode(text, "QUERY (text_input)") for text in _texts(request, "QUERY")]
        pixels = self._pixels(request, prompts)
        batch = len(prompts)
        end_id = _given(request, "END_ID", self._tokens.end_id, batch)
        pad_id = _given(request, "PAD_ID", self._tokens.pad_id, batch)
        ids, lengths = _padded(prompts, pad_id)
        decoder_ids, decoder_lengths = _padded(self._decoder_prompts(request, pad_id), pad_id)
        return {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": decoder_ids,
            "REQUEST_DECODER_INPUT_LEN": decoder_lengths,
            "BAD_WORDS_IDS": self._word_lists(request, "BAD_WORDS_DICT", batch),
            "STOP_WORDS_IDS": self._word_lists(request, "STOP_WORDS_DICT", batch, self._more_ends(request)),
            "EMBEDDING_BIAS": self._bias(request, batch),
            "REQUEST_OUTPUT_LEN": _output_lengths(request, batch),
            "OUT_END_ID": end_id,
            "OUT_PAD_ID": pad_id,
            "OUT_PROMPT_TABLE_EXTRA_IDS": self._extra_ids(request, ids),
            "CANCELLATION_KEY": np.full((batch, 1), secrets.randbits(64), dtype=np.uint64),
            **({} if pixels is None else {"PIXEL_VALUES": pixels}),
        }

    def _pixels(self, request: Any, prompts: list[list[int]]) -> Array | None:
        """Return tiles of pictures [1, tiles, 3, side, side] and put their rows into the prompt; None without."""
        for name in IMAGE_INPUTS:
            if _input(request, name) is None or (self._pictures and name == "IMAGE_BYTES"):
                continue
            serves = "takes pictures as IMAGE_BYTES alone" if self._pictures else "serves a text model"
            raise BadInputError(f"{name} was given, but this repository {serves}; leave it out.")
        images = _input(request, "IMAGE_BYTES")
        if self._pictures is None:
            return None
        if images is None:
            for ids in prompts:
                self._pictures.check_places(ids, 0)
            return None
        if len(prompts) != 1:
            raise BadInputError(f"IMAGE_BYTES (image_bytes_input) came with {len(prompts)} prompts; send one prompt.")
        pixels: Array = self._pictures.prepare(images[0])[None]
        prompts[0] = self._pictures.places(prompts[0], [image.shape[:2] for image in images[0]])
        return pixels

    def _encode(self, raw: bytes, name: str) -> list[int]:
        text = self._text(raw, name)
        if not text:
            raise BadInputError(f"{name} is empty; a prompt needs at least one character.")
        ids = self._tokens.encode(text, self._add_special_tokens)
        if not ids:
            raise BadInputError(f"{name} gives no tokens; a prompt needs at least one.")
        return ids

    def _text(self, raw: Any, name: str) -> str:
        """Decode the text, and refuse what cannot fit before tokenizing it: megabytes take seconds."""
        text, limit = _decoded(raw, name), self._max_input_len
        if limit is not None and len(text) > limit * self._tokens.longest * SHRINKING:
            raise BadInputError(
                f"{name} has {len(text)} characters, more than any {limit} tokens hold; the engine was built with"
                f" max_input_len={limit}. Shorten it or build with a larger max_input_len."
            )
        return text

    def _decoder_prompts(self, request: Any, pad_id: Array) -> list[list[int]]:
        """Return the decoder's first token for encoder-decoder models; other models ignore this padding token."""
        texts = _texts(request, "DECODER_QUERY", optional=True)
        starts = [[int(row[0])] for row in pad_id]
        for row, text in enumerate(texts[: len(starts)]):
            if text:
                starts[row] = self._encode(text, "DECODER_QUERY (decoder_text_input)")
        return starts

    def _more_ends(self, request: Any) -> list[list[int]]:
        """Return the ends beside OUT_END_ID, as words; none where the client says what ends its answers."""
        return [[token] for token in self._tokens.end_ids[1:]] if _input(request, "END_ID") is None else []

    def _word_lists(self, request: Any, name: str, batch: int, more: Sequence[list[int]] = ()) -> Array:
        """Return [batch, 2, longest]: the ids of all words in a row, and below where each word ends."""
        tensor = _input(request, name)
        rows: list[list[list[int]]] = [[]] * batch
        if tensor is not None:
            rows = [self._words(row, name) for row in tensor.reshape(batch, -1)]
        rows = [[*row, *more] for row in rows]
        longest = max(1, max(sum(len(word) for word in words) for words in rows))
        lists = np.zeros((batch, 2, longest), dtype=np.int32)
        lists[:, 1] = NO_OFFSET
        for row, words in enumerate(rows):
            flat = [token for word in words for token in word]
            lists[row, 0, : len(flat)] = flat
            lists[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
        return lists

    def _words(self, row: Array, name: str) -> list[list[int]]:
        """Ids of every word of one prompt; an empty word, which clients send for "none", has none."""
        words = (self._tokens.encode(self._text(raw, WORD_INPUTS[name]), False) for raw in row)
        return [word for word in words if word]

    def _bias(self, request: Any, batch: int) -> Array:
        """Return [batch, vocabulary], or [batch, 0] when no bias is asked for."""
        words, weights = _input(request, "EMBEDDING_BIAS_WORDS"), _input(request, "EMBEDDING_BIAS_WEIGHTS")
        if words is None and weights is None:
            return np.zeros((batch, 0), dtype=np.float32)
        if words is None or weights is None or words.size != weights.size:
            raise BadInputError(
                "EMBEDDING_BIAS_WORDS and EMBEDDING_BIAS_WEIGHTS (embedding_bias_words, embedding_bias_weights) belong"
                f" together; {0 if words is None else words.size} words and"
                f" {0 if weights is None else weights.size} weights were given."
            )
        bias = np.zeros((batch, self._tokens.size), dtype=np.float32)
        rows = zip(words.reshape(batch, -1), weights.reshape(batch, -1), strict=True)
        for row, (names, values) in enumerate(rows):
            for raw, weight in zip(names, values, strict=True):
                word = self._text(raw, "EMBEDDING_BIAS_WORDS (embedding_bias_words)")
                bias[row, self._tokens.encode(word, False)] += weight
        return bias

    def _extra_ids(self, request: Any, ids: Array) -> Array:
        """Mark the virtual tokens of a prompt table (ids beyond the vocabulary), so that KV reuse separates tables."""
        table = _input(request, "PROMPT_TABLE_EXTRA_ID")
        extra = np.zeros(ids.shape, dtype=np.uint64)
        if table is not None:
            extra[ids >= self._tokens.size] = table.reshape(-1)[0]
        return extra


class Tokens:
    """A tokenizer, and which of its tokens end an answer."""

    def __init__(self, folder: Path) -> None:
        found = TokenizerFolder(folder)
        self._tokenizer = found.tokenizer
        self.size = int(self._tokenizer.get_vocab_size())
        self.longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))
        self.end_ids = found.end_ids
        self.end_id = -1 if found.end_id is None else found.end_id
        pad = found.id_of("pad_token")
        self.pad_id = max(0, self.end_id) if pad is None else pad

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the token ids of a text, with or without the tokens that start a prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)


def open_tokenizer(folder: Path) -> Tokens:
    """Open the tokenizer of a folder."""
    return Tokens(folder)


def _folder(parameters: dict[str, Any], args: dict[str, str]) -> Path:
    given = str(parameters.get("tokenizer_dir", {}).get("string_value", ""))
    folder = Path(args["model_repository"]).parent / given
    if not given or not folder.is_dir():
        raise pb_utils.TritonModelException(f"tokenizer_dir='{given}' of preprocessing: {folder} is not a folder.")
    return folder


def _pictures(parameters: dict[str, Any], repository: Path) -> Pictures | None:
    """Return how pictures are taken; None for a text model."""
    names = ("multimodal_model_path", "gpt_model_path", "max_num_images")
    given = [str(parameters.get(name, {}).get("string_value", "")) for name in names]
    return Pictures(repository / given[0], repository / given[1], int(given[2])) if all(given) else None


def _max_input_len(repository: Path) -> int | None:
    """Return the maximum number of prompt tokens, or None if the repository does not state it."""
    found = _read_json(repository / "repository.json").get("limits", {}).get("max_input_len")
    return None if found is None else int(found)


def _count_restarts(count: str) -> tuple[Any, Any]:
    """Show the count beside the server's own metrics; both objects must live as long as the metric is shown."""
    family = pb_utils.MetricFamily(
        name="trtllm_pipelines_server_restarts",
        description="How often this server was started again after it ended by itself",
        kind=pb_utils.MetricFamily.GAUGE,
    )
    metric = family.Metric(labels={})
    metric.set(float(count))
    return family, metric


def _flag(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    word = parameters.get(name, {}).get("string_value", "").lower()
    return word in ("true", "1") if word in ("true", "1", "false", "0") else default


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _input(request: Any, name: str) -> Array | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _texts(request: Any, name: str, *, optional: bool = False) -> list[bytes]:
    tensor = _input(request, name)
    if tensor is None:
        if optional:
            return []
        raise BadInputError(f"{name} is missing.")
    return [raw for raw in tensor.reshape(-1)]


def _decoded(raw: Any, name: str) -> str:
    try:
        return raw.decode("utf-8") if isinstance(raw, bytes) else str(raw)
    except UnicodeDecodeError as error:
        raise BadInputError(f"{name} is not valid UTF-8: {error}.") from error


def _given(request: Any, name: str, default: int, batch: int) -> Array:
    """Return [batch, 1]: what the client sent, or the tokenizer's own id."""
    tensor = _input(request, name)
    if tensor is None:
        return np.full((batch, 1), default, dtype=np.int32)
    return np.ascontiguousarray(np.broadcast_to(tensor.reshape(-1, 1), (batch, 1)), dtype=np.int32)


def _padded(rows: list[list[int]], pad_id: Array) -> tuple[Array, Array]:
    """Return ids [batch, longest] and lengths [batch, 1]."""
    lengths = np.array([[len(row)] for row in rows], dtype=np.int32)
    ids = np.repeat(pad_id, int(lengths.max()), axis=1)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return ids, lengths


def _output_lengths(request: Any, batch: int) -> Array:
    tensor = _input(request, "REQUEST_OUTPUT_LEN")
    if tensor is None:
        raise BadInputError("REQUEST_OUTPUT_LEN (max_tokens) is missing.")
    return np.ascontiguousarray(np.broadcast_to(tensor.reshape(-1, 1), (batch, 1)), dtype=np.int32)
