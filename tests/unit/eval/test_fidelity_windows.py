"""How texts become windows of token ids, and that ids with two meanings are refused."""

import pytest

from eval.fidelity.measure import cut, noise_parts, refuse_other_tokens
from pipelines.domain.errors import UserError


class Letters:
    """A tokenizer of single characters; 0 is BOS."""

    def __init__(self, bos_token_id=0, tokens="abcdefgh\n"):
        self.bos_token_id = bos_token_id
        self._tokens = tokens

    def encode(self, text, *, add_special_tokens, verbose):
        assert (add_special_tokens, verbose) == (False, False)
        return [self._tokens.index(each) + 1 for each in text]

    def get_vocab(self):
        return {token: number + 1 for number, token in enumerate(self._tokens)}


def windows(texts, tokenizer=None, *, length=4, tokens=6, observed=0):
    read = []

    def source():
        for text in texts:
            read.append(text)
            yield text

    return cut("user", source, tokenizer or Letters(), length=length, tokens=tokens, observed=observed), read


def test_each_window_begins_as_a_prompt_does():
    """Two windows of 4 predict 3 tokens each; the texts follow each other, and no more of them are read than needed."""
    found, read = windows(["abcd", "efgh", "never"])
    assert found.rows == ((0, 1, 2, 3), (0, 4, 9, 9))
    assert (found.tokens, read) == (6, ["abcd", "efgh"])


def test_without_bos_all_ids_are_of_the_text():
    found, _ = windows(["abcdefgh"], Letters(None))
    assert found.rows == ((1, 2, 3, 4), (5, 6, 7, 8))


def test_a_short_text_is_one_short_window():
    found, _ = windows(["ab"])
    assert (found.rows, found.tokens) == (((0, 1, 2),), 2)


def test_texts_that_calibration_observed_are_left_out_if_the_others_are_enough():
    found, _ = windows(["aaa", "bcd", "efg"], observed=1)
    assert (found.rows[0], found.unseen) == ((0, 2, 3, 4), True)
    found, _ = windows(["aaa", "b"], observed=1)
    assert (found.rows[0], found.unseen) == ((0, 1, 1, 1), False)


def test_a_text_that_predicts_nothing_is_refused():
    with pytest.raises(UserError, match="The text 'user' has 1 tokens, so that nothing is predicted"):
        windows(["a"], Letters(None))


def test_other_tokens_are_refused_with_the_first_that_differs():
    ours, theirs = Letters(), Letters(tokens="abXdefgh\n")
    with pytest.raises(UserError, match="token 3 is 'c' in mine and 'X' in original, so their probabilities are not"):
        refuse_other_tokens(ours, theirs, model="mine", reference="original")
    with pytest.raises(UserError, match="token 10 is no token in mine and 'z' in original"):
        refuse_other_tokens(ours, Letters(tokens="abcdefgh\nz"), model="mine", reference="original")
    refuse_other_tokens(ours, Letters(), model="mine", reference="original")


@pytest.mark.parametrize(
    ("windows_of_texts", "expected"),
    [
        ([8, 4, 1], [2, 1, 1]),  # a quarter
        ([32], [8]),  # 16,384 tokens: a quarter is 4,096
        ([32, 32], [4, 4]),
        ([40, 30, 2], [5, 4, 1]),  # 4,096 of 36,864 tokens are a ninth
    ],
)
def test_the_noise_is_measured_on_the_beginnings(windows_of_texts, expected):
    texts = [[tuple(range(513))] * count for count in windows_of_texts]
    assert [len(rows) for rows in noise_parts(texts)] == expected
