"""What a server did to a prompt, or to an answer, is recognized from token ids, texts and counts."""

from dataclasses import dataclass

import pytest

from eval.diagnose.served import Wrong, answers_cause, ids_cause, written_cause
from eval.diagnose.servers import Reply, RightAnswers, make_items
from pipelines.settings.model import BUNDLED

transformers = pytest.importorskip("transformers")
NEW = 6
MODEL = BUNDLED / "models" / "tiny_gemma"


@dataclass
class Fixed:
    """Answers known beforehand."""

    known: list[list[int]]

    def answers(self, prompts):
        return self.known[: len(prompts)]

    def nearly_equal(self, _ids):
        return False


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def items(tokenizer):
    return make_items(tokenizer, BUNDLED / "corpus.jsonl", 1, 200, MODEL, None)


@pytest.fixture
def expected(tokenizer, items):
    answers = [[300 + n, 400 + n, 500 + n, 600, 700, 800] for n in range(len(items))]
    return RightAnswers(items, Fixed(answers), NEW, tokenizer, (1,), "engine")


def test_the_same_seed_gives_the_same_items(tokenizer, items):
    again = make_items(tokenizer, BUNDLED / "corpus.jsonl", 1, 200, MODEL, None)
    assert again == items
    assert [len(item.text.split()) for item in items[:-1]] == [1, 6, 12, 24, 40]
    assert 150 < len(items[-1].ids) <= 200
    assert make_items(tokenizer, BUNDLED / "corpus.jsonl", 2, 200, MODEL, None) != items


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda ids: [2, *ids], "BOS token is doubled"),
        (lambda ids: ids[1:], "BOS token is missing"),
        (lambda ids: [*ids, 1], "EOS token is added"),
        (lambda ids: [0, 0, *ids], "padded on the left"),
        (lambda ids: [*ids, 0, 0], "padded on the right"),
        (lambda ids: ids[:50], "truncated to 50 tokens, the end is lost"),
        (lambda ids: [ids[0], *ids[-49:]], "truncated to 50 tokens, the beginning is lost"),
        (lambda ids: [*ids[:4], 999, *ids[5:]], "token 4 of the long prompt is"),
    ],
)
def test_wrong_token_ids_of_prompts(expected, items, spoil, words):
    item = items[-1]
    assert words in ids_cause([(item, spoil(list(item.ids)))], expected)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda ids: ids[:-1], "1 token too few"),
        (lambda ids: [*ids, 5], "1 token too many"),
        (lambda ids: ids[:2], "answers end early, after 2 of 6 tokens"),
        (lambda ids: [9, *ids[1:]], "not the one that was built"),
    ],
)
def test_wrong_answers(expected, items, spoil, words):
    given = [spoil(right) for right in expected.answers]
    wrong = list(zip(items, expected.answers, given, strict=True))
    replies = {item.ids: answer for item, answer in zip(items, given, strict=True)}
    assert words in answers_cause(wrong, expected, lambda ids, _: replies[tuple(ids)])


def test_answers_that_change_are_samples(expected, items):
    wrong = [(items[0], expected.answers[0], [9, 9, 9])]
    assert "it samples" in answers_cause(wrong, expected, lambda *_: [8, 8, 8])


@pytest.mark.parametrize(
    ("text", "extra", "tokens", "what", "words"),
    [
        ("a b c", 1, NEW, "prompt tokens", "BOS token is doubled"),
        ("a b c", -1, NEW, "prompt tokens", "BOS token is missing"),
        ("a b c", -7, NEW, "prompt tokens", "truncated to"),
        ("abc", 0, NEW, "text", "spaces are lost"),
        ("a b", 0, NEW, "text", "answers end early"),
        ("a b c<eos>", 0, NEW, "text", "special tokens are not skipped"),
        ("a b c", 0, NEW + 1, "max_tokens", "1 token too many"),
        ("what was it? a b c", 0, NEW, "text", "the prompt is repeated"),
        ("x y z", 0, NEW, "text", "answers differ: 'x y z' instead of 'a b c'"),
    ],
)
def test_wrong_texts(expected, items, text, extra, tokens, what, words):
    reply = Reply(text, len(items[1].ids) + extra, tokens)
    found = written_cause([Wrong(items[1], expected.answers[1], "a b c", reply)], expected, lambda _: reply)
    assert found[0] == what
    assert words in found[1]
