"""NOT MEASURED: the exact test, and the word in every place where a verdict stands."""

from itertools import product
from math import prod

import pytest

from eval.compare import bound_cells, loss_rows, loss_table, verdict_sentence
from eval.exact import Answered
from eval.verdict import USUAL, Verdict, least_for_go
from pipelines.cli.commands import COMMANDS
from pipelines.report.plots import _VERDICT_COLOURS, CONVENTIONS


def test_p_value_is_that_of_all_courses() -> None:
    """Three questions of two choices and two of four: every one of the 32 courses is enumerated."""
    chances = [0.5, 0.5, 0.5, 0.25, 0.25]
    for right in range(6):
        exact = sum(
            prod(p + 0.01 if hit else 0.99 - p for hit, p in zip(course, chances, strict=True))
            for course in product((0, 1), repeat=5)
            if sum(course) >= right
        )
        assert Answered(right, ((0.25, 2), (0.5, 3))).p_above(0.01) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("right", "chances", "measured"),
    [
        (311, ((0.25, 1104),), False),  # chance + margin is 287.04, and 1.645 standard deviations more are 311.02
        (312, ((0.25, 1104),), True),
        (200, ((0.25, 1104),), False),  # far below chance
        (0, ((0.0, 1319),), False),  # written answers, none right
        (5, ((0.0, 1319),), False),  # 0.4 %, less than the margin
        (40, ((0.0, 1319),), True),
        (6, ((0.25, 6),), True),
        (1, ((0.25, 1),), False),
    ],
)
def test_what_counts_as_measured(right, chances, measured) -> None:
    """At a margin of 1 point and a level of 5 %."""
    assert (Answered(right, chances).p_above(0.01) <= 0.05) is measured


@pytest.mark.parametrize(("right", "asked", "stops"), [(439, 1755, False), (877, 3510, True), (1000, 3510, False)])
def test_hopeless(right, asked, stops) -> None:
    """Of all of MMLU a guessing baseline is given up after a quarter, one at 28.5 % is not."""
    assert Answered(right, ((0.25, asked),)).is_hopeless(14042, 0.01, 0.05, 0.5) is stops


def pair(result, word: Verdict):
    """A baseline and a format that get this word."""
    n = least_for_go(USUAL)
    strong, weak = [1] * n, [1, 0, 0, 0] * 100
    after = {Verdict.GO: strong, Verdict.NO_GO: [0] * n, Verdict.UNDECIDED: [0, *strong[1:]]}
    before = weak if word is Verdict.NOT_MEASURED else strong
    return result(before), result(after.get(word, weak), qformat="fp8")


@pytest.mark.parametrize("word", Verdict)
def test_every_word_in_every_place(result, word) -> None:
    """Row, table, sentence, plot, glossary; loss and bounds are not known where nothing was measured."""
    (row,) = loss_rows([pair(result, word)], USUAL)
    assert row["verdict"] == word
    unknown = word is Verdict.NOT_MEASURED
    assert (row["loss_percent"] is None, bound_cells(row) == ("-", "-", "-")) == (unknown, unknown)
    assert verdict_sentence(row).startswith(f"{word}: ")
    assert f"{word}:" in " ".join(loss_table([row]).split())
    assert word in _VERDICT_COLOURS
    assert any(f"{word}: " in text for _, text in CONVENTIONS)


@pytest.mark.parametrize(
    ("right", "asked", "todo"),
    [(1, 1, "ask more, or others that the model answers"), (1, 4, "that the model can answer")],
)
def test_the_sentence_advises_by_the_score(right, asked, todo, result) -> None:
    """A model with every answer right needs more questions, not easier ones."""
    answers = [1] * right + [0] * (asked - right)
    (row,) = loss_rows([(result(answers), result(answers, qformat="fp8"))], USUAL)
    assert row["verdict"] == "NOT MEASURED"
    assert todo in verdict_sentence(row)


def test_the_sentence_states_the_test(result) -> None:
    """100 of 400 right where 26 % are expected at the margin."""
    (row,) = loss_rows([pair(result, Verdict.NOT_MEASURED)], USUAL)
    assert verdict_sentence(row).startswith(
        "NOT MEASURED: the baseline of tiny_llama fp8 answers 25.00 % of 400 questions of mini_mmlu right, and "
        "guessing 25.00 %. That it beats guessing by more than the margin of 1 point is not shown (exact one-sided "
        "binomial test: p = 0.69"
    )


def test_exit_code_is_in_the_help() -> None:
    """Each command that judges a loss names code 4."""
    judging = ("evaluate", "all", "sweep", "compare", "smallest", "stage", "nightly")
    assert {name for name, command in COMMANDS.items() if 4 in command.exits} == set(judging)
