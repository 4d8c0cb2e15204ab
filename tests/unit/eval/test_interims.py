"""Asking until the verdict is known: how often it is wrong, by enumeration; the order of the questions; the bounds."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from eval.exact import Changed, Evidence, Interim, PlannedInterim, order, p_below, planned_interims
from eval.verdict import (
    Criteria,
    Verdict,
    go_is_possible,
    judge,
    least_for_go,
    least_to_stop,
    questions_needed,
    too_few,
)

SUBJECTS = {"law": 100, "botany": 33, "music": 7, "chess": 1}
SMALL = (PlannedInterim(8, 0.25), PlannedInterim(16, 0.25), PlannedInterim(32, 0.5))
MARGIN = 0.2


def spread(lost: int, gained: int, of: int) -> Evidence:
    """Evidence of answers that changed at an even rate, with all interims that are planned."""
    parts = [(interim, interim.questions / of) for interim in planned_interims(of)]
    found = [
        Interim(Changed(interim.questions, round(part * lost), round(part * gained)), interim.share)
        for interim, part in parts
    ]
    return Evidence(tuple(found), of)


def stopped_wrongly(rate: float, *, mirrored: bool, level: float, spends: bool = True) -> float:
    """Probability of a verdict at any of three interims, by adding up every course of 32 questions; loss = margin."""
    lost, gained = (rate + MARGIN, rate)
    chance, total, before = {(0, 0): 1.0}, 0.0, 0
    for interim in SMALL:
        n, share = interim.questions - before, interim.share if spends else 1.0
        steps = {
            (a, b): math.comb(n, a) * math.comb(n - a, b)
            * lost**a * gained**b * max(1 - lost - gained, 0.0) ** (n - a - b)
            for a in range(n + 1) for b in range(n - a + 1)
        }  # fmt: skip
        reached: Counter[tuple[int, int]] = Counter()
        for (a, b), so_far in chance.items():
            for (more, other), step in steps.items():
                reached[a + more, b + other] += so_far * step
        chance, before = {}, interim.questions
        for (a, b), p in reached.items():
            changed = Changed(interim.questions, a, b)
            p_value = p_below(changed.mirrored, -MARGIN) if mirrored else p_below(changed, MARGIN)
            if p_value <= level * share:
                total += p
            else:
                chance[a, b] = p
    return total


@pytest.mark.parametrize("mirrored", [False, True])
def test_verdicts_are_rarely_wrong_wherever_asking_stops(mirrored) -> None:
    """Every course of 32 questions judged after 8, 16 and 32, at a loss of the margin: at most 5 % GO or NO-GO."""
    rates = (0.0, 0.02, 0.1, 0.2, 0.3, 0.4)
    chances = [stopped_wrongly(rate, mirrored=mirrored, level=0.05) for rate in rates]
    assert 0.01 < max(chances) <= 0.05


def test_a_test_of_a_fixed_number_is_wrong_at_every_look() -> None:
    """The same interims without shares: what this module is for."""
    assert max(stopped_wrongly(rate, mirrored=False, level=0.05, spends=False) for rate in (0.05, 0.2)) > 0.05


def test_the_looks_share_the_probability_of_error() -> None:
    for questions in (1, 29, 60, 400, 1104, 7021, 14042):
        interims = planned_interims(questions)
        assert interims[-1].questions == questions
        assert math.fsum(interim.share for interim in interims) == pytest.approx(1)
        assert all(
            interim.share == pytest.approx(new / questions)
            for interim, new in zip(interims, _new(interims), strict=True)
        )
    assert [interim.questions for interim in planned_interims(400)] == [50, 100, 200, 400]


def _new(interims: tuple[PlannedInterim, ...]) -> list[int]:
    at = [interim.questions for interim in interims]
    return [n - m for n, m in zip(at, [0, *at[:-1]], strict=True)]


def test_every_beginning_has_its_share_of_each_subject() -> None:
    whole = order(SUBJECTS)
    assert Counter(subject for subject, _ in whole) == SUBJECTS
    assert len(set(whole)) == 141
    for length in range(1, 142):
        for subject, found in Counter(subject for subject, _ in whole[:length]).items():
            assert abs(found - length * SUBJECTS[subject] / 141) < 2
    assert order(SUBJECTS) == whole
    law = [index for subject, index in whole if subject == "law"]
    assert law != sorted(law)
    assert abs(np.corrcoef(law, range(100))[0, 1]) < 0.3  # random, not the order of the file


def test_the_p_value_is_the_least_over_the_looks_and_their_shares() -> None:
    interims = (Interim(Changed(40, 0, 0), 0.25), Interim(Changed(80, 1, 0), 0.25), Interim(Changed(160, 9, 0), 0.5))
    evidence = Evidence(interims, 160)
    assert evidence.p_below(0.1) == min(p_below(interim.changed, 0.1) / interim.share for interim in interims)
    assert evidence.mirrored.mirrored == evidence
    assert Evidence.once(Changed(40, 3, 1)).p_below(0.1) == p_below(Changed(40, 3, 1), 0.1)


def test_the_bounds_agree_with_the_verdict() -> None:
    for evidence in (spread(0, 0, 400), spread(40, 2, 400), spread(4, 4, 400), spread(300, 0, 400)):
        (found,) = judge([evidence], Criteria())
        words = [Verdict.GO] * (found.most < 0.01) or [Verdict.NO_GO] * (found.least > 0.01) or [Verdict.UNDECIDED]
        assert found.verdict is words[0]
        assert -1 <= found.least <= found.most <= 1


@pytest.mark.parametrize(("questions", "lost", "gained"), [(20, 5, 0), (1104, 40, 25), (10, 5, 0), (1000, 30, 20)])
def test_a_loss_that_is_not_excluded_is_never_go(questions, lost, gained) -> None:
    (found,) = judge([spread(lost, gained, questions)], Criteria())
    assert found.verdict is not Verdict.GO


def test_several_formats_are_corrected_by_holm() -> None:
    """400 unchanged answers are GO for one format and not for three; p of all interims is what is corrected."""
    one = spread(0, 0, 400)
    (alone,) = judge([one], Criteria())
    together = judge([one] * 3, Criteria())
    assert alone.verdict is Verdict.GO
    assert {each.verdict for each in together} == {Verdict.UNDECIDED}
    assert together[0].p_go == pytest.approx(min(1.0, 3 * alone.p_go))


def test_the_fewest_questions_where_asking_stops_early() -> None:
    """More than the 299 of a fixed number: at the last interim analysis half of the probability of error is left."""
    least = least_to_stop(Criteria())
    assert 367 <= least < 400  # 0.99^367 = 0.025; eval=quick asks 400
    assert least_for_go(Criteria()) < least
    assert go_is_possible(least, Criteria())
    assert not any(go_is_possible(n, Criteria()) for n in range(290, least))
    assert judge([spread(0, 0, least)], Criteria())[0].verdict is Verdict.GO
    assert judge([spread(0, 0, least - 1)], Criteria())[0].verdict is Verdict.UNDECIDED
    assert too_few(least - 1, Criteria(), stops=True).startswith(f"{least - 1} questions are too few for GO")
    assert not too_few(least, Criteria(), stops=True)
    assert too_few(1, Criteria(), stops=True).startswith("1 question is too few for GO")
    assert not go_is_possible(10**7, Criteria(margin_points=1e-7, false_go=0.001))


def test_the_questions_that_are_missing_allow_for_looking() -> None:
    seen = Changed(200, 3, 3)
    fixed = questions_needed(Evidence.once(seen), Criteria())
    stopping = questions_needed(replace(spread(3, 3, 200), of=200), Criteria())
    assert fixed is not None
    assert stopping is not None
    assert stopping > fixed
    unchanged = questions_needed(spread(0, 0, 200), Criteria())
    assert unchanged is not None
    assert judge([spread(0, 0, unchanged)], Criteria())[0].verdict is Verdict.GO
