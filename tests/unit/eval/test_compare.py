"""The tables: right numbers, every format, 80 columns."""

from __future__ import annotations

import json

import pytest

from eval.compare import loss_rows, loss_table, subject_rows, subject_table
from pipelines.domain.errors import UserError

LONG = "magnitude_2_4-int4_awq-kv_fp8"


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
    rows = loss_rows(*sweep)
    assert [row["format"] for row in rows] == ["int4_awq", "fp8", LONG]
    assert [row["loss_percent"] for row in rows] == pytest.approx([50.0, 8.3333333, -50.0])
    assert [row["verdict"] for row in rows] == ["loses accuracy", "not decided", "gains"]
    assert [(row["baseline_accuracy"], row["accuracy"]) for row in rows] == [(0.6, 0.3), (0.6, 0.55), (0.6, 0.9)]


def test_rows_are_json(sweep) -> None:
    """Rows survive JSON unchanged."""
    rows = loss_rows(*sweep)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_table_text(sweep) -> None:
    """The whole text, read by a person once."""
    baseline, others = sweep
    assert loss_table(loss_rows(baseline, others)).splitlines() == [
        "model      format                        base % after loss % verdict",
        "tiny_llama int4_awq                       60.00 30.00  50.00 loses accuracy",
        "tiny_llama fp8                            60.00 55.00   8.33 not decided",
        "tiny_llama magnitude_2_4-int4_awq-kv_fp8  60.00 90.00 -50.00 gains",
        "",
        "format                        asked lost gained change   95 % interval      p",
        "int4_awq                         20    6      0 -30.00 -50.61 .. -9.39 0.0312",
        "fp8                              20    1      0  -5.00 -14.80 .. +4.80 1.0000",
        "magnitude_2_4-int4_awq-kv_fp8    20    0      6 +30.00 +9.39 .. +50.61 0.0312",
        "",
        "Loss is in percent of the baseline's accuracy, change and interval in points.",
        "lost, gained: questions right only before, only after. p: McNemar's exact test;",
        "below 0.05, accuracy changed. Above, 'no measurable loss' if the interval",
        "excludes a loss of 1 point, else 'not decided': ask more questions.",
    ]


def test_tables_fit_80_columns(sweep) -> None:
    """Long names wrap instead of widening the table."""
    baseline, others = sweep
    text = loss_table(loss_rows(baseline, others * 3)) + "\n" + subject_table(baseline, others * 3)
    assert max(map(len, text.splitlines())) <= 80


def test_several_models_in_one_table(result) -> None:
    """Rows of different baselines may stand together."""
    rows = [
        *loss_rows(result([1] * 6), [result([1] * 6, qformat="fp8")]),
        *loss_rows(result([1] * 6, model="tiny_gemma"), [result([0] * 6, model="tiny_gemma", qformat="fp8")]),
    ]
    text = loss_table(rows)
    lines = [line.split() for line in text.splitlines()]
    assert ["tiny_llama", "fp8", "100.00", "100.00", "0.00", "not", "decided"] in lines
    assert ["tiny_gemma", "fp8", "100.00", "0.00", "100.00", "loses", "accuracy"] in lines


def test_guessing_baseline_is_told(result) -> None:
    """25 of 100 right is chance: the table says that a loss could not show."""
    guess = result([1] * 25 + [0] * 75)
    assert "The baseline of tiny_llama does not beat guessing" in loss_table(loss_rows(guess, [guess]))


def test_zero_baseline_shows_no_percent(result) -> None:
    """A percentage that does not exist is shown as a dash."""
    row = loss_table(loss_rows(result([0, 0]), [result([0, 1], qformat="fp8")])).splitlines()[1]
    assert row.split() == ["tiny_llama", "fp8", "0.00", "50.00", "-", "not", "decided"]


def test_nothing_to_compare() -> None:
    """A baseline alone is said to be alone."""
    assert loss_table([]) == "No compressed result to compare."


def test_subject_rows(sweep) -> None:
    """One row overall, one per category, one per subject; the baseline first in each."""
    baseline, others = sweep
    rows = subject_rows(baseline, others)
    assert [(row["kind"], row["name"]) for row in rows] == [
        ("overall", "all questions"),
        ("categories", "humanities"),
        ("categories", "stem"),
        ("subjects", "law"),
        ("subjects", "botany"),
    ]
    assert rows[3]["accuracy"] == [1.0, 0.4, 0.9, 1.0]  # law: 10 questions, 6 and 1 lost, 0 lost
    assert rows[4]["accuracy"] == [0.2, 0.2, 0.2, 0.8]  # botany: 2 right, then 6 gained


def test_subject_table_of_many_formats(sweep) -> None:
    """Nine formats make two blocks, each opening with the baseline."""
    baseline, others = sweep
    blocks = subject_table(baseline, others * 3).split("\n\n")
    assert [block.count("(0)") for block in blocks] == [2, 2]
    assert blocks[1].splitlines()[-1].split() == ["botany", "10", "20.0", "20.0", "20.0", "80.0"]


def test_subject_table_refuses_other_questions(result) -> None:
    """Subjects are compared only when the same questions were asked."""
    with pytest.raises(UserError, match="prompts_sha256"):
        subject_table(result([1, 0]), [result([1, 0], prompts_sha256="cd")])


def test_the_baseline_is_not_judged_against_itself(result) -> None:
    """20 questions are too few to exclude a loss of one point, but there is nothing to decide."""
    baseline = result([1] * 20)
    rows = loss_rows(baseline, [baseline, result([1] * 20, qformat="fp8")])
    assert [row["verdict"] for row in rows] == ["baseline", "not decided"]
    assert "eval.baseline=hugging_face compares it with the model itself" in " ".join(loss_table(rows).split())


def test_a_comparison_with_the_model_itself_states_the_distance(result) -> None:
    """One answer of 20 differs: its first two choices are 1 apart, so 2 of 80 distances are 1, the mean is 0.025."""
    original = result([1] * 20, qformat="hugging_face", engine="transformers")
    rows = loss_rows(original, [result([0] + [1] * 19)])
    assert (rows[0]["logprob_shift_mean"], rows[0]["logprob_shift_max"]) == (0.025, 1.0)
    text = " ".join(loss_table(rows).split())
    assert "Baseline: the model itself, computed by Transformers in float32." in text
    assert (
        "tiny_llama none against Hugging Face: 1 of 20 answers differ, and the log probabilities of the choices by "
        "0.025 on average, 1 at most."
    ) in text
    assert "The 16-bit engine is the baseline" not in text
