"""The measured error rates of the verdict: what the page states, and a short form of the measurement."""

import math

import numpy as np
import pytest

from eval.exact import Changed, Evidence
from eval.verdict import USUAL, Verdict, judge
from scripts.verdict_rates import rates


def stated() -> list[tuple[int, int, float, float, float]]:
    """Rows of the page's tables: questions, asked on average, true loss, GO and NO-GO in percent."""
    text = rates.PAGE.read_text(encoding="utf-8").partition(rates.BEGIN)[2].partition(rates.END)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and line[2].isdigit()]
    cells = [[cell.strip().replace(",", "") for cell in line.strip("|").split("|")] for line in lines]
    return [(int(n), int(asked), float(loss), float(go), float(no)) for n, asked, _, loss, _, go, no, _ in cells]


def test_the_page_states_rates_that_keep_the_promise() -> None:
    """False GO at most 5 %; false NO-GO within the counting error of 5 %; power of 80 % with half of MMLU."""
    rows = stated()
    assert len(rows) == (len(rates.SIZES) + len(rates.MOST)) * len(rates.BASES) * len(rates.LOSSES)
    counting = 3 * 100 * math.sqrt(0.05 * 0.95 / rates.DRAWS)
    for questions, asked, loss, go, no_go in rows:
        assert asked <= questions
        assert loss < 1 or go <= 5  # also where asking stops early
        assert loss > 1 or no_go <= 5 + counting
        if questions == 7021 and loss != 1:
            assert loss > 0 or go >= 80
            assert loss < 2 or no_go >= 80


@pytest.mark.parametrize("stops", [False, True])
def test_a_short_measurement_keeps_it_too(stops) -> None:
    draws = 2000
    counting = 3 * math.sqrt(0.05 * 0.95 / draws)
    rows = rates.measured(draws, (400,), stops=stops)
    for row in rows:
        assert row.asked <= 400
        assert stops or row.asked == 400
        assert sum(row.counts.values()) == draws
        assert row.loss < 0.01 or row.counts[Verdict.GO] / draws <= 0.05 + counting
        assert row.loss > 0.01 or row.counts[Verdict.NO_GO] / draws <= 0.05 + counting
    assert rates.measured(draws, (400,), stops=stops) == rows  # seeded


@pytest.mark.parametrize("base", list(rates.BASES))
@pytest.mark.parametrize("loss", rates.LOSSES)
def test_the_population_has_the_loss_that_is_stated(base, loss) -> None:
    lost, gained = rates.rates_at(base, loss)
    assert lost - gained == pytest.approx(loss, abs=1e-12)


def test_a_loss_that_the_answers_cannot_give_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a loss of 0\.2 is not between"):
        rates.rates_at("few answers change", 0.2)


def test_the_search_finds_the_verdict_of_an_evaluation() -> None:
    """The boundary that the script walks along is that of `judge`."""
    decided = rates.Decided(500, USUAL)
    rng = np.random.default_rng(1)
    for lost, gained in rng.integers(0, 25, size=(40, 2)):
        (found,) = judge([Evidence.once(Changed(500, int(lost), int(gained)))], USUAL)
        assert decided(int(lost), int(gained)) is found.verdict


def test_only_the_table_of_the_page_is_replaced() -> None:
    page = f"before\n{rates.BEGIN}\nold\n{rates.END}\nafter\n"
    assert rates.written(page, "new") == f"before\n{rates.BEGIN}\n\nnew\n\n{rates.END}\nafter\n"
