"""The exact paired test against enumeration and published numbers, and what the three words may mean."""

import math
from itertools import product

import numpy as np
import pytest

from eval import exact
from eval.exact import Changed, Evidence, bounds, p_below, score
from eval.verdict import Criteria, Verdict, holm, judge, least_for_go, least_for_no_go, questions_needed

CAVO = Changed(161, 6, 16)
"""Complete response before and after consolidation therapy: Cavo et al. (2012), in Fagerland, Lydersen and Laake,
Statistical Analysis of Contingency Tables (2017), chapter 8; their results are those of R's `contingencytables`."""


def word(questions: int, lost: int, gained: int, **criteria: float) -> Verdict:
    (found,) = judge([Evidence.once(Changed(questions, lost, gained))], Criteria(**criteria))
    return found.verdict


def enumerated(changed: Changed, loss: float) -> float:
    """The p-value by adding up every result that is at least as good, for 4,000 values of P(gained)."""
    n = changed.questions
    observed = float(score(changed.lost, changed.gained, n, loss)) + 1e-9
    rates = np.linspace(max(0.0, -loss), (1 - loss) / 2, 4000)
    total = np.zeros_like(rates)
    for lost, gained in product(range(n + 1), repeat=2):
        if lost + gained <= n and score(lost, gained, n, loss) <= observed:
            ways = math.comb(n, lost) * math.comb(n - lost, gained)
            same = np.maximum(1 - 2 * rates - loss, 0.0) ** (n - lost - gained)
            total += ways * (rates + loss) ** lost * rates**gained * same
    return float(total.max())


@pytest.mark.parametrize(
    ("changed", "loss"),
    [
        (Changed(12, 1, 3), 0.05),
        (Changed(12, 5, 0), 0.1),
        (Changed(12, 0, 0), 0.2),
        (Changed(15, 3, 2), -0.1),
        (Changed(15, 2, 7), 0.0),
        (Changed(10, 9, 1), 0.9),
        (Changed(10, 0, 10), -0.95),
    ],
)
def test_the_p_value_is_the_sum_over_all_results_as_good(changed, loss) -> None:
    assert p_below(changed, loss) == pytest.approx(enumerated(changed, loss), rel=1e-3)


def test_the_exact_unconditional_test_of_a_textbook() -> None:
    """Two-sided P = 0.034053, of which 0.0001 is their error of the confidence set; at a loss of 0 it is symmetric."""
    assert 2 * p_below(CAVO, 0.0) == pytest.approx(0.034053 - 0.0001, abs=2e-6)


@pytest.mark.parametrize(("limit", "quantile"), [(-0.1240, 1.959964), (-0.0054, -1.959964)])
def test_the_score_interval_of_a_textbook(limit, quantile) -> None:
    """Tango's 95 % interval is -0.1240 to -0.0054: where the statistic is the normal quantile."""
    assert float(score(6, 16, 161, limit)) == pytest.approx(quantile, abs=3e-3)


def test_four_times_as_many_rates_change_nothing(monkeypatch) -> None:
    """The worst case of P(gained) is not missed between the values that are tried."""
    cases = [(Changed(1104, 40, 25), 0.02), (Changed(300, 0, 0), 0.01), (Changed(2000, 3, 9), 0.0), (CAVO, -0.01)]
    found = [p_below(*case) for case in cases]
    monkeypatch.setattr(exact, "GRID", 4 * exact.GRID)
    p_below.cache_clear()
    assert [p_below(*case) for case in cases] == pytest.approx(found, rel=5e-4)
    p_below.cache_clear()


def test_the_rate_of_false_verdicts_is_what_was_asked_for() -> None:
    """All results of 40 questions, enumerated: at a loss of the margin, GO and NO-GO are rarer than 5 % each."""
    n, margin = 40, 0.1
    results = [Changed(n, lost, gained) for lost, gained in product(range(n + 1), repeat=2) if lost + gained <= n]
    go = [each for each in results if p_below(each, margin) <= 0.05]
    no_go = [each for each in results if p_below(each.mirrored, -margin) <= 0.05]
    assert len(go) > 100
    assert len(no_go) > 100
    for rate in np.linspace(0, (1 - margin) / 2, 46):
        for wrong in (go, no_go):
            chance = sum(
                math.comb(n, each.lost) * math.comb(n - each.lost, each.gained)
                * (rate + margin) ** each.lost * rate**each.gained
                * max(1 - 2 * rate - margin, 0.0) ** (n - each.lost - each.gained)
                for each in wrong
            )  # fmt: skip
            assert chance <= 0.05


@pytest.mark.parametrize(
    ("questions", "lost", "gained"),
    [
        (20, 5, 0),  # 25 % lost, and yet McNemar's p is 0.06
        (1104, 40, 25),  # 1.4 points lost, and yet McNemar's p is 0.08
        (10, 5, 0),
        (1000, 30, 20),
        (300, 3, 0),
        (298, 0, 0),
        (1, 0, 0),
    ],
)
def test_a_loss_that_is_not_excluded_is_never_go(questions, lost, gained) -> None:
    """That a loss is not significant says nothing."""
    assert word(questions, lost, gained) is not Verdict.GO


@pytest.mark.parametrize(
    ("questions", "lost", "gained", "expected"),
    [
        (299, 0, 0, Verdict.GO),  # 0.99^299 = 0.0495
        (1104, 0, 0, Verdict.GO),
        (1104, 40, 25, Verdict.UNDECIDED),
        (1104, 218, 0, Verdict.NO_GO),
        (20, 5, 0, Verdict.NO_GO),
        (7021, 400, 390, Verdict.GO),
    ],
)
def test_verdicts(questions, lost, gained, expected) -> None:
    assert word(questions, lost, gained) is expected


def test_the_bounds_are_what_the_test_does_not_reject() -> None:
    """A reader who sees only the bounds comes to the same verdict; nothing leaves -100 to 100 points."""
    for n, lost, gained in [(20, 20, 0), (20, 0, 20), (1, 1, 0), (50, 3, 9), (240, 0, 0), (500, 4, 1), (1104, 31, 2)]:
        (found,) = judge([Evidence.once(Changed(n, lost, gained))], Criteria())
        assert -1 <= found.least <= (lost - gained) / n <= found.most <= 1
        words = [Verdict.GO] * (found.most < 0.01) or [Verdict.NO_GO] * (found.least > 0.01) or [Verdict.UNDECIDED]
        assert found.verdict is words[0]


def test_no_change_is_bounded_by_the_binomial() -> None:
    """0 of n: the loss L with (1 - L)^n = 0.05."""
    least, most = bounds(Changed(1104, 0, 0), 0.05)
    assert most == pytest.approx(1 - 0.05 ** (1 / 1104), rel=1e-3)
    assert least == pytest.approx(-most)


def test_holm() -> None:
    """R: p.adjust(c(0.03, 0.01, 0.04, 0.02), "holm")."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_fewest_questions_with_a_verdict() -> None:
    """GO needs 299 questions of which none changes; NO-GO needs 5 that are all lost."""
    assert least_for_go(Criteria()) == 299
    assert (word(298, 0, 0), word(299, 0, 0)) == (Verdict.UNDECIDED, Verdict.GO)
    assert least_for_no_go(Criteria()) == 5
    assert (word(4, 4, 0), word(5, 5, 0)) == (Verdict.UNDECIDED, Verdict.NO_GO)


def test_the_questions_that_would_decide_do_decide() -> None:
    """At the number said, answers that change at the rate seen give the verdict in about 80 % of draws."""
    rng = np.random.default_rng(7)
    for seen, expected in [(Changed(500, 5, 5), Verdict.GO), (Changed(100, 4, 1), Verdict.NO_GO)]:
        needed = questions_needed(Evidence.once(seen), Criteria())
        assert needed is not None
        rates = [seen.lost / seen.questions, seen.gained / seen.questions]
        drawn = rng.multinomial(needed, [*rates, 1 - sum(rates)], size=100)
        found = [Changed(needed, int(lost), int(gained)) for lost, gained, _ in drawn]
        if expected is Verdict.GO:
            hit = [p_below(each, 0.01) <= 0.05 for each in found]
        else:
            hit = [p_below(each.mirrored, -0.01) <= 0.05 for each in found]
        assert 0.65 <= sum(hit) / len(hit) <= 0.95


def test_no_number_decides_a_loss_of_the_margin() -> None:
    assert questions_needed(Evidence.once(Changed(200, 2, 0)), Criteria()) is None
