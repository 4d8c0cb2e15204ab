"""The tables: right numbers, every format, 80 columns."""

import json
import math
import re

import pytest

from eval.compare import alone_rows, alone_table, in_points, loss_rows, loss_table, verdict_sentence
from eval.results import Score
from eval.verdict import USUAL, Criteria

LONG = "magnitude_2_4-int4_awq-kv_fp8"


def rows_of(baseline, others, criteria=USUAL):
    return loss_rows([(baseline, other) for other in others], criteria)


@pytest.fixture
def sweep(result):
    """A baseline (12 of 20 right) and three formats of it: 6 lost, 1 lost, 6 gained."""
    baseline = result([1] * 12 + [0] * 8)
    return baseline, [
        result([0] * 6 + [1] * 6 + [0] * 8, qformat="int4_awq"),
        result([0] + [1] * 11 + [0] * 8, qformat="fp8"),
        result([1] * 18 + [0] * 2, qformat=LONG),
    ]


def test_rows_of_a_sweep(sweep) -> None:
    """Loss in percent of the baseline: 0.6 -> 0.3 is 50, -> 0.55 is 8.33, -> 0.9 is -50."""
    rows = rows_of(*sweep)
    assert [row["format"] for row in rows] == ["int4_awq", "fp8", LONG]
    assert [row["loss_percent"] for row in rows] == pytest.approx([50.0, 8.3333333, -50.0])
    assert [row["verdict"] for row in rows] == ["NO-GO", "UNDECIDED", "GO"]
    assert [(row["baseline_accuracy"], row["accuracy"]) for row in rows] == [(0.6, 0.3), (0.6, 0.55), (0.6, 0.9)]


def test_rows_are_json(sweep) -> None:
    """Rows survive JSON unchanged."""
    rows = rows_of(*sweep)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_table_text(sweep) -> None:
    """The whole text, read by a person once."""
    baseline, others = sweep
    assert loss_table(rows_of(baseline, others)).splitlines() == [
        "model       format                         base %  after  loss %  verdict",
        "tiny_llama  int4_awq                        60.00  30.00   50.00  NO-GO",
        "tiny_llama  fp8                             60.00  55.00    8.33  UNDECIDED",
        "tiny_llama  magnitude_2_4-int4_awq-kv_fp8   60.00  90.00  -50.00  GO",
        "",
        "format                        asked lost gained   loss at least at most      p",
        "int4_awq                         20    6      0 +30.00   +11.74  +50.78 0.0239",
        "fp8                              20    1      0  +5.00    -8.89  +21.61 0.6471",
        "magnitude_2_4-int4_awq-kv_fp8    20    0      6 -30.00   -50.78  -11.74 0.0185",
        "",
        "Loss % is in percent of the baseline's accuracy. GO: the loss is below 1 point;",
        "NO-GO: it is above; each is wrong in at most 5 % of cases. UNDECIDED: neither",
        "is proven. Lost, gained: right only before, only after. Loss in points, with",
        "bounds (at least, at most) that are each wrong in at most 5 % of cases. p:",
        "chance of answers as good (or bad) as these if the loss were the margin, from",
        "an exact paired test, corrected by Holm's method for all results of a model",
        "compared here.",
        "",
        "NO-GO: tiny_llama int4_awq loses at least 11.74 points (95 % sure); the margin",
        "is 1 point.",
        "UNDECIDED: the loss of tiny_llama fp8 is between -8.89 and +21.61 points; the",
        "margin is 1 point. 214 more questions would decide, with a probability of 80 %,",
        "if answers go on changing at this rate.",
        "GO: tiny_llama magnitude_2_4-int4_awq-kv_fp8 gains at least 11.74 points (95 %",
        "sure); the margin is 1 point.",
    ]


def test_tables_fit_80_columns(sweep) -> None:
    """Long names wrap instead of widening the table."""
    baseline, others = sweep
    text = loss_table(rows_of(baseline, others * 3))
    assert max(map(len, text.splitlines())) <= 80


def test_several_models_in_one_table(result) -> None:
    """Rows of different baselines may stand together."""
    rows = [
        *rows_of(result([1] * 6), [result([1] * 6, qformat="fp8")]),
        *rows_of(result([1] * 6, model="tiny_gemma"), [result([0] * 6, model="tiny_gemma", qformat="fp8")]),
    ]
    text = loss_table(rows)
    lines = [line.split() for line in text.splitlines()]
    assert ["tiny_llama", "fp8", "100.00", "100.00", "0.00", "UNDECIDED"] in lines
    assert ["tiny_gemma", "fp8", "100.00", "0.00", "100.00", "NO-GO"] in lines
    paired = lines[next(at for at, line in enumerate(lines) if line[:3] == ["model", "format", "asked"]) + 1 :]
    assert [line[:4] for line in paired[:2]] == [["tiny_llama", "fp8", "6", "0"], ["tiny_gemma", "fp8", "6", "6"]]


def test_results_of_several_tasks_stand_below_their_task(result) -> None:
    pairs = [
        (result([1] * 20, task=task), result([0] * 9 + [1] * 11, qformat="int4_awq", task=task))
        for task in ("mini_mmlu", "gsm8k")
    ]
    text = loss_table(loss_rows(pairs, USUAL))
    lines = text.splitlines()
    assert [lines[at] for at in (1, 3, 7, 9)] == ["mini_mmlu", "gsm8k", "mini_mmlu", "gsm8k"]
    assert lines[2].split() == lines[4].split() == ["tiny_llama", "int4_awq", "100.00", "55.00", "45.00", "NO-GO"]
    assert "NO-GO: tiny_llama int4_awq on gsm8k loses at least" in text
    alone = alone_table(alone_rows([pair[1] for pair in pairs])).splitlines()
    assert (alone[1], alone[3]) == ("mini_mmlu", "gsm8k")


def test_guessing_baseline_is_told(result) -> None:
    """25 of 100 right is chance: the table says that a loss could not show."""
    guess = result([1] * 25 + [0] * 75)
    assert "The baseline of tiny_llama does not beat guessing" in loss_table(rows_of(guess, [guess]))


def test_zero_baseline_shows_no_percent(result) -> None:
    """A percentage that does not exist is shown as a dash."""
    row = loss_table(rows_of(result([0, 0]), [result([0, 1], qformat="fp8")])).splitlines()[1]
    assert row.split() == ["tiny_llama", "fp8", "0.00", "50.00", "-", "NOT", "MEASURED"]


def test_nothing_to_compare() -> None:
    """A baseline alone is said to be alone."""
    assert loss_table([]) == "No compressed result to compare."


def test_the_baseline_is_not_judged_against_itself(result) -> None:
    """20 questions are too few to exclude a loss of one point, but there is nothing to decide."""
    baseline = result([1] * 20)
    rows = rows_of(baseline, [baseline, result([1] * 20, qformat="fp8")])
    assert [row["verdict"] for row in rows] == ["baseline", "UNDECIDED"]
    assert "eval.baseline=hugging_face compares it with the model itself" in " ".join(loss_table(rows).split())


def test_a_comparison_with_the_model_itself_states_the_distance(result) -> None:
    """One answer of 20 differs: its first two choices are 1 apart, so 2 of 80 distances are 1, the mean is 0.025."""
    original = result([1] * 20, qformat="hugging_face", engine="transformers")
    rows = rows_of(original, [result([0] + [1] * 19)])
    assert (rows[0]["logprob_shift_mean"], rows[0]["logprob_shift_max"]) == (0.025, 1.0)
    text = " ".join(loss_table(rows).split())
    assert "Baseline: the model itself, computed by Transformers in float32." in text
    assert (
        "tiny_llama none against Hugging Face: 1 of 20 answers differ, and the log probabilities of the choices by "
        "0.025 on average, 1 at most."
    ) in text
    assert "The 16-bit engine is the baseline" not in text


@pytest.mark.parametrize(
    ("limit", "lost", "said"),
    [
        (20, 0, "59 more questions would decide (eval.limit=25), if none of their answers changes either."),
        (20, 2, r"more questions would decide, with a .* at this rate; mini_mmlu has 864 more\."),
        (None, 9, r"more questions would decide, with a .* at this rate; mini_mmlu has no more\."),
        (None, 11, r"margin is 1 point\. About 47,000,000 more questions would decide, with a .* has no more\."),
    ],
)
def test_undecided_says_what_would_decide(result, limit, lost, said) -> None:
    """The number of questions, how to ask them, and whether the task has as many."""
    asked = 20 * 12 if limit else 1104
    after = result([0] * lost + [1] * (asked - lost), qformat="fp8", limit=limit)
    (row,) = loss_rows([(result([1] * asked, limit=limit), after)], USUAL)
    assert row["verdict"] == "UNDECIDED"
    assert re.search(said if lost else re.escape(said), verdict_sentence(row))


def test_more_questions_come_from_the_subjects_that_have_more(result) -> None:
    """30 of 57 subjects have more than the 100 asked; spread over all of them, too few were proposed (236)."""
    sizes = [100] * 30 + [90] * 27
    subjects = {str(number): Score(1.0, 0.0, size) for number, size in enumerate(sizes)}
    asked, lost = sum(sizes), 43
    base, after = (
        result([0] * gone + [1] * (asked - gone), task="mmlu", limit=100, subjects=subjects) for gone in (0, lost)
    )
    (row,) = loss_rows([(base, after)], USUAL)
    assert row["verdict"] == "UNDECIDED"
    limit = 100 + math.ceil((row["questions_needed"] - asked) / 30)
    assert limit > 300
    said = f"would decide (eval.limit={limit} or more, because its subjects differ in size), with a probability of"
    assert said in verdict_sentence(row)


def test_a_loss_equal_to_the_margin_has_no_number(result) -> None:
    """No number of questions is known to tell 1 point from 1 point."""
    (row,) = rows_of(result([1] * 200), [result([0] * 2 + [1] * 198)])
    assert (row["verdict"], row["questions_needed"]) == ("UNDECIDED", None)
    assert verdict_sentence(row).endswith(
        "How many questions would decide is unknown: the loss seen equals the margin."
    )


def test_more_formats_of_a_model_take_more_proof(result) -> None:
    """299 unchanged answers are GO for one format; of two formats, neither has p <= 0.05 / 2. Models are apart."""
    base, other = result([1] * 299), result([1] * 299, qformat="fp8")
    assert [row["verdict"] for row in rows_of(base, [other])] == ["GO"]
    rows = rows_of(base, [base, other, other])
    assert [(row["verdict"], row["compared"]) for row in rows] == [("baseline", 0), ("UNDECIDED", 2), ("UNDECIDED", 2)]
    said = "points; the margin is 1 point, but p = 0.0991, corrected for 2 results, is above 0.05. 78 more questions"
    assert said in verdict_sentence(rows[1])
    apart = [(result([1] * 299, model=name), result([1] * 299, model=name, qformat="fp8")) for name in ("a", "b")]
    assert [row["verdict"] for row in loss_rows(apart, USUAL)] == ["GO", "GO"]


def test_criteria_are_stated(result) -> None:
    """Another margin and level give another verdict, and both are said."""
    (row,) = rows_of(result([1] * 240), [result([1] * 240, qformat="fp8")], Criteria(2.5, 0.1))
    said = "GO: tiny_llama fp8 loses at most 0.95 points (90 % sure); the margin is 2.5 points."
    assert verdict_sentence(row) == said
    text = " ".join(loss_table([row]).split())
    assert "GO: the loss is below 2.5 points; NO-GO: it is above; each is wrong in at most 10 % of cases." in text
    assert in_points(0.01) == "1 point"
