"""Preprocessing and postprocessing with the bundled tokenizers, without a server."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipelines.settings.model import BUNDLED
from tests.unit.models.conftest import Request, Response, texts

MODELS = BUNDLED / "models"
KINDS = ["tiny_gemma", "tiny_llama", "tiny_qwen"]
OUTPUTS = ["INPUT_ID", "REQUEST_INPUT_LEN", "STOP_WORDS_IDS", "EMBEDDING_BIAS", "OUT_END_ID", "OUT_PAD_ID"]


def opened(module: Any, kind: str, *, repository: Path = MODELS, **parameters: str) -> Any:
    """A model of a module, initialized for a bundled tokenizer."""
    model = module.TritonPythonModel()
    values = {"tokenizer_dir": kind, **parameters}
    config = {"parameters": {name: {"string_value": value} for name, value in values.items()}}
    model.initialize({"model_config": json.dumps(config), "model_repository": str(repository / "preprocessing")})
    return model


@pytest.fixture
def prepare(load: Callable[[str], Any]) -> Callable[..., Response]:
    """Run preprocessing of the bundled Gemma."""

    def run(*prompts: bytes, **inputs: Any) -> Response:
        length = np.full((len(prompts), 1), 4, dtype=np.int32)
        request = Request({"QUERY": texts(*prompts), "REQUEST_OUTPUT_LEN": length, **inputs}, OUTPUTS)
        answer: Response = opened(load("preprocessing"), "tiny_gemma").execute([request])[0]
        return answer

    return run


def test_prompts_of_a_batch_are_padded(prepare: Callable[..., Response]) -> None:
    """<bos> is 2 and <pad> is 0; "The" is one token."""
    found = prepare(b"The capital of", b"The").tensors
    assert found["REQUEST_INPUT_LEN"].tolist() == [[7], [2]]
    assert found["INPUT_ID"].tolist() == [[2, 388, 774, 340, 333, 514, 368], [2, 388, 0, 0, 0, 0, 0]]
    assert found["OUT_END_ID"].tolist() == [[1], [1]]
    assert found["OUT_PAD_ID"].tolist() == [[0], [0]]


def test_words_become_ids_and_their_ends(prepare: Callable[..., Response]) -> None:
    """The words: "The" is [388] and " of" is [368]; together "The of" has two tokens, so the ends are 1, 3."""
    words = np.array([[b"The", b"The of", b""]], dtype=object)
    found = prepare(b"a", STOP_WORDS_DICT=words).tensors["STOP_WORDS_IDS"]
    assert found.tolist() == [[[388, 388, 368], [1, 3, -1]]]


@pytest.mark.parametrize("words", [None, np.array([[b""]], dtype=object)])
def test_no_words_are_an_empty_list(prepare: Callable[..., Response], words: Any) -> None:
    """Curl sends an empty string for none."""
    inputs = {} if words is None else {"STOP_WORDS_DICT": words}
    assert prepare(b"a", **inputs).tensors["STOP_WORDS_IDS"].tolist() == [[[0], [-1]]]


def test_bias_stands_at_the_tokens_of_the_word(prepare: Callable[..., Response]) -> None:
    inputs = {
        "EMBEDDING_BIAS_WORDS": np.array([[b"The", b" of"]], dtype=object),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[2.5, -1.0]], dtype=np.float32),
    }
    bias = prepare(b"a", **inputs).tensors["EMBEDDING_BIAS"][0]
    assert {int(token): bias[token] for token in np.flatnonzero(bias)} == {388: 2.5, 368: -1.0}
    assert prepare(b"a").tensors["EMBEDDING_BIAS"].shape == (1, 0)


@pytest.mark.parametrize(
    ("prompt", "inputs", "said"),
    [
        (b"", {}, r"QUERY \(text_input\) is empty"),
        (b"\xff", {}, r"QUERY \(text_input\) is not valid UTF-8"),
        (b"a", {"EMBEDDING_BIAS_WORDS": texts(b"a")}, "1 words and 0 weights"),
        (b"a", {"IMAGE_URL": texts(b"x")}, "IMAGE_URL"),
        (b"a", {"BAD_WORDS_DICT": texts(b"\xc3")}, r"BAD_WORDS_DICT \(bad_words\) is not valid UTF-8"),
    ],
)
def test_bad_text_names_its_input(prepare: Callable[..., Response], prompt: bytes, inputs: Any, said: str) -> None:
    answer = prepare(prompt, **inputs)
    assert answer.error is not None
    with pytest.raises(ValueError, match=said):
        raise ValueError(answer.error.message)


def test_a_text_that_cannot_fit_is_refused_unread(load: Callable[[str], Any], tmp_path: Path) -> None:
    """The longest token has 11 characters: 16 tokens hold 176, with room for normalizers 4 x 176 = 704."""
    (tmp_path / "repository.json").write_text(json.dumps({"limits": {"max_input_len": 16}}))
    shutil.copytree(MODELS / "tiny_gemma", tmp_path / "tiny_gemma")
    model = opened(load("preprocessing"), "tiny_gemma", repository=tmp_path)
    length = np.array([[4]], dtype=np.int32)
    fits, refused = (
        model.execute([Request({"QUERY": texts(b"a" * count), "REQUEST_OUTPUT_LEN": length}, OUTPUTS)])[0]
        for count in (704, 705)
    )
    assert fits.error is None
    assert re.search("705 characters.*max_input_len=16", refused.error.message)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["The capital of Feltex is tenkun.", " of the", "snow ☃ and 語", "a\n\nb"])
def test_pieces_add_up_to_the_text(load: Callable[[str], Any], kind: str, text: str) -> None:
    """Cut anywhere between whole characters, decoded one by one."""
    decode = load("postprocessing").open_detokenizer(MODELS / kind, skip_special_tokens=True)
    ids = Tokenizer.from_file(str(MODELS / kind / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    for cut in range(1, len(ids)):
        pieces = [decode(ids[:cut]), decode(ids[cut:])]
        if "\ufffd" not in "".join(pieces):
            assert "".join(pieces) == text


def test_every_beam_has_its_text(load: Callable[[str], Any]) -> None:
    """Lengths cut the padding; ids that an engine added to the vocabulary have no text."""
    model = opened(load("postprocessing"), "tiny_gemma")
    tokens = np.array([[[2, 388, 1919], [388, 0, 0]]], dtype=np.int32)
    request = Request({"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": np.array([[3, 1]], dtype=np.int32)}, ["OUTPUT"])
    assert model.execute([request])[0].tensors["OUTPUT"].tolist() == [b"The", b"The"]


def test_a_missing_tokenizer_names_the_folder(load: Callable[[str], Any]) -> None:
    with pytest.raises(RuntimeError, match="tokenizer_dir='nowhere'"):
        opened(load("postprocessing"), "nowhere")
