"""A number in a long text: as long as the engine takes, and counted right only where it is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from eval.adapter import load_tokenizer
from eval.harness import EvalResult, EvalSpec, evaluate
from eval.results import compare_pair
from eval.tasks.load import ANSWER_TOKENS, passkey_rows
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress, SilentProgress
from pipelines.engines.port import Generation, SamplingParams
from pipelines.settings.model import BUNDLED

MODEL = BUNDLED / "models" / "tiny_gemma"
FILLER = ["The moon of Truntes is sardun.", "Which star does Draxzil orbit? sonbas.", "The gas of Luxtril is trosron."]


@dataclass
class Reader:
    """An engine that answers with what a function finds in the prompt.

    Attributes:
        find: text of the prompt -> answer.
        lengths: tokens of each prompt.
    """

    find: Callable[[str], str]
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = load_tokenizer(MODEL)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def loglikelihood(self, pairs: Sequence[Any], progress: Progress) -> list[tuple[float, bool]]:
        raise AssertionError("nothing is scored")

    def generate(
        self, prompts: Sequence[Sequence[int]], limits: SamplingParams, progress: Progress
    ) -> list[Generation]:
        self.lengths += map(len, prompts)
        assert limits.max_new_tokens == ANSWER_TOKENS
        texts = [self.find(self.tokenizer.decode(prompt, skip_special_tokens=True)) for prompt in prompts]
        return [Generation(self.tokenizer.encode(text, add_special_tokens=False), "stop") for text in texts]


def hidden(text: str) -> str:
    """Return the number as a model that reads everything would write it."""
    (key,) = re.findall(r"The pass key is (\d+)\. Remember it\.", text)
    return f" {key}."


def ask(reader: Reader, **settings: Any) -> EvalResult:
    spec = EvalSpec(task="passkey", **{"max_length": 1024, "num_fewshot": 0, "limit": 5, **settings})
    found = evaluate(reader, MODEL, spec, SilentProgress(), model="m", qformat="none", engine="scripted")
    assert isinstance(found, EvalResult)
    return found


def test_who_reads_everything_is_always_right_up_to_the_engines_maximum() -> None:
    reader = Reader(hidden)
    found = ask(reader)
    assert (found.accuracy, found.questions, found.truncated) == (1.0, 15, 0)
    assert list(found.subjects) == ["252", "504", "1008"]
    longest = 1024 - ANSWER_TOKENS
    for share, part in ((4, reader.lengths[:5]), (2, reader.lengths[5:10]), (1, reader.lengths[10:])):
        assert all(longest // share - 16 <= length <= longest // share for length in part)


def test_an_engine_for_shorter_prompts_is_asked_shorter_ones() -> None:
    reader = Reader(hidden)
    assert ask(reader, max_prompt=800).accuracy == 1.0
    assert 784 <= max(reader.lengths) <= 800


def test_who_forgets_the_beginning_loses_what_stands_there() -> None:
    """Depths 0, 1/4, 1/2, 3/4, 1: the second half of a text has the number in 2 of 5, and 1/2 is at the border."""

    def late(text: str) -> str:
        half = text[len(text) // 2 :]
        return hidden(half) if "Remember it." in half and "The pass key is" in half.split("Remember it.")[0] else " ?"

    all_of_it, half = ask(Reader(hidden)), ask(Reader(late))
    pair = compare_pair(all_of_it, half)
    assert pair.gained == 0
    assert 6 <= pair.lost <= 9
    assert {record.index for record in half.records if not record.correct} >= {0, 1}


@pytest.mark.parametrize(
    ("answer", "right"), [(" {key}", True), (" {key}1", False), (" 1 {key}", False), (" none", False)]
)
def test_only_the_number_itself_is_right(answer: str, right: bool) -> None:
    found = ask(Reader(lambda text: answer.format(key=hidden(text).strip(" ."))), limit=1)
    assert {record.correct for record in found.records} == {right}


def test_the_same_engine_is_asked_the_same_and_another_length_is_another_text() -> None:
    tokenizer = load_tokenizer(MODEL)
    rows = passkey_rows(300, FILLER, tokenizer)
    assert rows == passkey_rows(300, FILLER, tokenizer)
    assert len({row["key"] for row in rows}) > 90
    assert rows[0]["key"] != passkey_rows(301, FILLER, tokenizer)[0]["key"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"max_length": 200}, r"this one takes 184"), ({"num_fewshot": 3}, r"eval\.num_fewshot=3 has no effect")],
)
def test_what_cannot_be_asked_is_refused(settings: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ask(Reader(hidden), **settings)


def test_other_prompts_are_cut_to_what_the_engine_takes() -> None:
    """A prompt of five examples is longer than 60 tokens; the engine sees its end, and the result says so."""
    reader = Reader(lambda _: " x")
    spec = EvalSpec(task="mini_answers", max_length=1024, limit=1, max_prompt=60)
    found = evaluate(reader, MODEL, spec, SilentProgress(), model="m", qformat="none", engine="scripted")
    assert max(reader.lengths) == 60
    assert found.truncated == found.questions == 12
