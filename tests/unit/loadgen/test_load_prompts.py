"""Prompts have exactly the tokens asked for, on the tokenizers of the bundled models."""

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from pipelines.domain.errors import UserError
from pipelines.loadgen.prompts import PromptMaker
from tests.support.load_settings import ROOT, TINY_LLAMA

LENGTHS = [2, 3, 17, 128, 129, 900]


@pytest.fixture(params=["tiny_llama", "tiny_gemma", "tiny_qwen"])
def folder(request: pytest.FixtureRequest) -> Path:
    return ROOT / "pipelines" / "bundled" / "models" / str(request.param)


def counts(folder: Path, texts: list[str], *, special: bool = True) -> list[int]:
    """Counted by the tokenizer itself."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [len(tokenizer.encode(text, add_special_tokens=special).ids) for text in texts]


def test_every_length_is_exact(folder: Path) -> None:
    """With the special token that the server puts in front."""
    assert counts(folder, PromptMaker(folder).make(LENGTHS, Random(1))) == LENGTHS


def test_without_special_tokens_the_words_fill_their_place(folder: Path) -> None:
    """Preprocessing may be set not to add them."""
    maker = PromptMaker(folder, add_special_tokens=False)
    assert maker.overhead == 0
    assert counts(folder, maker.make(LENGTHS, Random(1)), special=False) == LENGTHS


def test_prompts_differ_and_repeat_with_the_seed(folder: Path) -> None:
    """No accidental KV reuse, yet the same load for every server."""
    maker = PromptMaker(folder)
    first = maker.make([64] * 100, Random(5))
    assert len({text[:12] for text in first}) > 90
    assert first == maker.make([64] * 100, Random(5))
    assert first != maker.make([64] * 100, Random(6))


def test_a_shared_prefix_is_shared_by_tokens(folder: Path) -> None:
    """Half of 100 tokens: the first 50 words are the same everywhere, and no more."""
    texts = PromptMaker(folder).make([100] * 8, Random(2), prefix_share=0.5)
    assert counts(folder, texts) == [100] * 8
    words = [text.split() for text in texts]
    assert len({tuple(line[:50]) for line in words}) == 1
    assert len({line[50] for line in words}) > 4


def test_a_later_turn_begins_with_all_before(folder: Path) -> None:
    """So that a server may reuse what it has."""
    maker = PromptMaker(folder)
    (first,) = maker.make([30], Random(1))
    later = maker.extend(first, 90, Random(2))
    assert later.startswith(first)
    assert counts(folder, [later]) == [90]


def test_text_that_merges_is_repaired(folder: Path) -> None:
    """Words chosen to be anything but one token each still end at the right count."""
    maker = PromptMaker(folder)
    for length in (5, 40, 41):
        text = maker._repaired("", "zqxj kk\u00e9 qq  " * 10, length, Random(3))
        assert counts(folder, [text]) == [length]


def test_a_prompt_needs_room_for_a_word() -> None:
    """One token is the special one alone: an empty prompt."""
    with pytest.raises(UserError, match=r"workload.isl=1 leaves no room"):
        PromptMaker(TINY_LLAMA).make([1], Random(1))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """And so is a file that is none."""
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        PromptMaker(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        PromptMaker(tmp_path)
