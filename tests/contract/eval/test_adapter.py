"""The adapter's tokens, windows and generation are those of lm-eval's `hf` model."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress

TEXTS = [
    ("What is the river?\nAnswer:", " A"),
    ("What is the river?\nAnswer:", " B"),
    ("ends with spaces  ", "stone"),
    ("ends with a newline\n", "maple"),
    ("<bos>brings its own BOS", " tiger"),
    ("ünïcode 数学 \U0001f600", " é"),
]


@pytest.fixture(scope="module")
def pair(checkpoint: tuple[Any, Any, Path], torch_session: Any) -> tuple[Any, Any]:
    """(ours, lm-eval's) over the same weights, fed 64 tokens at most."""
    from lm_eval.models.huggingface import HFLM

    from eval.adapter import EngineLM, load_tokenizer

    model, tokenizer, folder = checkpoint
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu", max_length=64)
    return EngineLM(torch_session(model), load_tokenizer(folder), 64, SilentProgress()), theirs


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """lm-eval's request records."""
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in arguments]


def close(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> bool:
    """Scores within 1e-3 and the same greedy flags."""
    same_scores = [a for a, _ in ours] == pytest.approx([a for a, _ in theirs], abs=1e-3)
    return same_scores and [b for _, b in ours] == [b for _, b in theirs]


@pytest.mark.parametrize(("context", "continuation"), TEXTS)
def test_tokens_equal_stock_hf(pair: tuple[Any, Any], context: str, continuation: str) -> None:
    """BOS, moved spaces and odd characters fall where `hf` puts them, encoded together or alone."""
    ours, theirs = pair
    expected = theirs._encode_pair(context, continuation)
    assert ours._encode_pair(context, continuation) == expected
    with ours._encoded_together(requests("loglikelihood", TEXTS)):
        assert ours._encode_pair(context, continuation) == expected


def test_each_text_is_encoded_once(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four choices of one question: one context and four continuations, five texts in one call."""
    ours, _ = pair
    batches: list[int] = []
    inner = ours.tokenizer

    class Counting:
        def __getattr__(self, name: str) -> Any:
            assert name != "encode", "a text was encoded by itself"
            return getattr(inner, name)

        def __call__(self, texts: list[str], **settings: Any) -> Any:
            batches.append(len(texts))
            return inner(texts, **settings)

    monkeypatch.setattr(ours, "tokenizer", Counting())
    ours.loglikelihood(requests("loglikelihood", [("Question?\nAnswer:", f" {letter}") for letter in "ABCD"]))
    assert batches == [5]


def test_loglikelihood_equals_stock_hf(pair: tuple[Any, Any]) -> None:
    """Scores and greedy flags, an empty context and one that is too long among them."""
    ours, theirs = pair
    asked = [*TEXTS, ("", " river"), ("stone " * 200, "tiger")]
    assert close(
        ours.loglikelihood(requests("loglikelihood", asked)),
        theirs.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True),
    )


def test_rolling_equals_stock_hf(pair: tuple[Any, Any]) -> None:
    """Texts of one and of several windows."""
    ours, theirs = pair
    asked = [("What is the river?",), ("copper violin harbor " * 40,)]
    expected = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", asked), disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests("loglikelihood_rolling", asked)) == pytest.approx(expected, abs=1e-2)


def test_generation_equals_stock_hf(pair: tuple[Any, Any]) -> None:
    """Greedy text, cut at the stop string, in the order asked though settings differ."""
    ours, theirs = pair
    asked = [
        ("What is the river", {"until": ["\n"], "max_gen_toks": 8}),
        ("What is the stone", {"until": ["e"], "max_gen_toks": 8}),
        ("What is the maple", {"until": ["\n"], "max_gen_toks": 8}),
    ]
    expected = theirs.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", asked)) == expected


def test_unknown_generation_setting_is_named(pair: tuple[Any, Any]) -> None:
    """A setting the engine has no word for is refused, not dropped."""
    with pytest.raises(UserError, match="generate_until does not support num_beams"):
        pair[0].generate_until(requests("generate_until", [("x", {"until": [], "num_beams": 4})]))


def test_no_room_for_a_prompt_is_told(pair: tuple[Any, Any]) -> None:
    """64 new tokens in 64."""
    with pytest.raises(UserError, match="max_gen_toks=64 leaves no room for a prompt in max_length=64"):
        pair[0].generate_until(requests("generate_until", [("x", {"until": [], "max_gen_toks": 64})]))


def test_continuation_longer_than_the_model_is_told(pair: tuple[Any, Any]) -> None:
    """A continuation is never cut: its score would be another text's."""
    with pytest.raises(UserError, match=r"continuation of \d+ tokens does not fit max_length=64"):
        pair[0].loglikelihood(requests("loglikelihood", [("x", " stone" * 200)]))
