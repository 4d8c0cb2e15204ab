"""Error rates of the verdict: populations of real answers with a known loss, draws from them, and the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eval.exact import Changed, PlannedInterim, p_below, planned_interims
from eval.verdict import USUAL, Criteria, Verdict
from pipelines.nightly.accuracy import unpack_bits

ANSWERS = Path(__file__).parent / "answers.json"
"""Whether each question was answered right, by format: four evaluations of a bundled model, as bits."""
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
BEGIN, END = "<!-- rates: written by python -m scripts.verdict_rates --write -->", "<!-- end of rates -->"

MODEL = "tiny_llama"
FORMATS = ("none", "fp8", "int4_wo", "magnitude_2_4")
BASES = {"few answers change": ("none", "fp8"), "many answers change": ("int4_wo", "magnitude_2_4")}
"""Pairs of formats of nearly equal accuracy; the second pair answers one question in twelve differently."""
LOSSY = ("none", "int4_wo")
"""A pair that loses 5 points: a share of the questions is drawn from it, so that the true loss is the one wanted."""

LOSSES = (0.0, 0.005, 0.01, 0.02, 0.03)
SIZES = (1104, 7021)
"""Questions: all of mini_mmlu, and half of MMLU."""
MOST = (400, 1104, 7021, 14042)
"""Questions at most where asking stops early: eval=quick, all of mini_mmlu, half of MMLU, and all of it."""
DRAWS = 10_000
SEED = 20261123

Rates = tuple[float, float]
"""P(lost) and P(gained) of one question drawn at random."""


@dataclass(frozen=True, slots=True)
class Row:
    """Verdicts on `DRAWS` draws.

    Attributes:
        base: which answers were drawn.
        questions: in each draw, at most.
        loss: the true loss, a fraction.
        changing: share of all questions that is lost or gained, a fraction.
        counts: draws by verdict.
        asked: questions on average; fewer than `questions` where asking stops early.
    """

    base: str
    questions: int
    loss: float
    changing: float
    counts: dict[Verdict, int]
    asked: float


def measured(
    draws: int = DRAWS, sizes: tuple[int, ...] = SIZES, criteria: Criteria = USUAL, *, stops: bool = False
) -> list[Row]:
    """Draw every case and return a row each.

    Args:
        draws: of each case.
        sizes: numbers of questions.
        criteria: of the verdict.
        stops: whether asking stops as soon as the verdict is known.
    """
    return list(_cases(draws, sizes, criteria, stops))


def _cases(draws: int, sizes: tuple[int, ...], criteria: Criteria, stops: bool) -> Iterator[Row]:
    rng = np.random.default_rng(SEED)
    for questions in sizes:
        interims = planned_interims(questions) if stops else (PlannedInterim(questions, 1.0),)
        verdicts = [
            Decided(interim.questions, replace(criteria, false_go=criteria.false_go * interim.share))
            for interim in interims
        ]
        for base in BASES:
            for loss in LOSSES:
                lost, gained = rates_at(base, loss)
                counts, questions_asked = _asked(rng, draws, [lost, gained, 1 - lost - gained], verdicts)
                yield Row(base, questions, loss, lost + gained, counts, questions_asked / draws)


def _asked(
    rng: np.random.Generator, draws: int, rates: list[float], verdicts: list[Decided]
) -> tuple[dict[Verdict, int], int]:
    """Ask until each draw is decided or nothing is left; return draws by verdict, and all questions asked."""
    counts, total, before = dict.fromkeys(Verdict, 0), 0, 0
    changes = np.zeros((draws, 3), dtype=np.int64)
    for verdict in verdicts:
        # Drawing questions one by one with replacement gives counts with a multinomial distribution.
        changes = changes + rng.multinomial(verdict.questions - before, rates, size=len(changes))
        total, before = total + (verdict.questions - before) * len(changes), verdict.questions
        results, place = np.unique(changes, axis=0, return_inverse=True)
        words = np.array([verdict(int(a), int(b)) for a, b, _ in results])[place.reshape(-1)]
        for word in (Verdict.GO, Verdict.NO_GO):
            counts[word] += int((words == word).sum())
        changes = changes[words == Verdict.UNDECIDED]
    counts[Verdict.UNDECIDED] = len(changes)
    return counts, total


def rates_at(base: str, loss: float) -> Rates:
    """Return P(lost) and P(gained) of a mixture of two pairs of real results, whose loss is the one wanted."""
    first, second = _rates(*BASES[base]), _rates(*LOSSY)
    share = (loss - first[0] + first[1]) / ((second[0] - second[1]) - (first[0] - first[1]))
    if not 0 <= share <= 1:
        raise ValueError(f"a loss of {loss} is not between those of the two pairs")
    lost, gained = ((1 - share) * a + share * b for a, b in zip(first, second, strict=True))
    return lost, gained


def _rates(before: str, after: str) -> Rates:
    stored = json.loads(ANSWERS.read_text(encoding="utf-8"))
    one, other = (np.array(unpack_bits(stored["right"][name], stored["questions"])) for name in (before, after))
    return float((one & ~other).mean()), float((other & ~one).mean())


class Decided:
    """The verdict for each result of a number of questions, by the same p-values as `eval.verdict.judge`.

    More gained answers never make a result worse, so for each number of lost answers there is a least number of gained
    ones for GO and a greatest for NO-GO. They are searched near those of the nearest number already known.
    """

    def __init__(self, questions: int, criteria: Criteria) -> None:
        self.questions, self._margin, self._level = questions, criteria.margin, criteria.false_go
        self._go: dict[int, int] = {}
        self._no_go: dict[int, int] = {}

    def __call__(self, lost: int, gained: int) -> Verdict:
        """Return the verdict."""
        if gained >= self._least(self._go, lost, self._is_go):
            return Verdict.GO
        return Verdict.UNDECIDED if gained >= self._least(self._no_go, lost, self._is_not_no_go) else Verdict.NO_GO

    def _is_go(self, lost: int, gained: int) -> bool:
        return p_below(Changed(self.questions, lost, gained), self._margin) <= self._level

    def _is_not_no_go(self, lost: int, gained: int) -> bool:
        return p_below(Changed(self.questions, gained, lost), -self._margin) > self._level

    def _least(self, least: dict[int, int], lost: int, holds: Callable[[int, int], bool]) -> int:
        """Return the least number of gained answers for which something holds, at this number of lost ones."""
        if lost not in least:
            nearest = min(least, key=lambda other: abs(other - lost), default=lost)
            at = min(max(least.get(nearest, 0) + lost - nearest, 0), self.questions - lost)
            while at > 0 and holds(lost, at - 1):
                at -= 1
            while at <= self.questions - lost and not holds(lost, at):
                at += 1
            least[lost] = at
        return least[lost]


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    titles = ("questions", "asked on average", "answers", "true loss, points", "answers that change, %",
              *(f"{word}, %" for word in Verdict))  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        total = sum(row.counts.values())
        shares = (f"{100 * row.counts[word] / total:.2f}" for word in Verdict)
        questions, population = (f"{row.questions:,}", f"{row.asked:,.0f}"), (row.base, f"{100 * row.loss:g}")
        lines.append(f"| {' | '.join((*questions, *population, f'{100 * row.changing:.1f}', *shares))} |")
    return "\n".join(lines)


def tables() -> str:
    """Draw everything, and return what the page shows."""
    at_once, until_known = table(measured()), table(measured(sizes=MOST, stops=True))
    return (
        f"All questions are asked before anyone interims at the answers:\n\n{at_once}\n\n"
        f"Asking stops as soon as the verdict is known (`questions`: at most):\n\n{until_known}"
    )


def written(page: str, text: str) -> str:
    """Return the page with its table replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
