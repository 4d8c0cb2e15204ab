"""What docs/sizing.md says is what the fit found, and what the code predicts."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.predict.performance.physics import Parameters
from scripts.published.cases import PUBLISHED, case_of, read_rows
from scripts.published.predict import VALIDATION, predict
from scripts.published_fit.accuracy import GOALS, UNSEEN, goals_of, validated, verdict
from scripts.published_fit.accuracy_docs import goal_scores, table_lines, transfer_lines
from scripts.published_fit.crossvalidation import folds

PAGE = (Path(__file__).parents[3] / "docs" / "sizing.md").read_text(encoding="utf-8")
DOCUMENT = Parameters.load().document
ROWS = read_rows(PUBLISHED)
TRANSFER = json.loads(VALIDATION.read_text(encoding="utf-8"))["transfer"]
SCORES = goal_scores(TRANSFER)


def test_the_parameters_are_fitted_to_the_measurements_that_are_here():
    assert DOCUMENT["data"]["sha256"] == hashlib.sha256(PUBLISHED.read_bytes()).hexdigest()


@pytest.mark.parametrize("goal", sorted(GOALS))
def test_the_page_says_what_cross_validation_found(goal):
    """The scores follow from predictions of rows that were left out, and reach the pass column."""
    score = SCORES[goal]
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {goal} |"))
    assert f"median {score['median']:.1f} %, MAPE {score['mape']:.1f} % (n = {score['n']})" in line
    assert line.endswith(f"| {verdict(GOALS[goal], score)} |")
    assert GOALS[goal].met("pass", score) or goal == UNSEEN


def test_the_page_has_every_line_of_the_tables():
    """One line per source, mode, family and metric, and the transfer to what was left out."""
    assert all(line in PAGE for line in [*table_lines(), *transfer_lines(TRANSFER)])


def test_scores_are_of_predictions_over_measurements():
    """Median and mean, computed anew from the file of predictions."""
    found, goal = validated(), "static tokens/s"
    pairs = [
        (float(found[row["case_id"]]["predicted"]), float(row["value"]))
        for row in ROWS
        if row["case_id"] in found and goal in goals_of(case_of(row))
    ]
    errors = [100 * abs(predicted / value - 1) for predicted, value in pairs]
    assert (np.median(errors), np.mean(errors)) == pytest.approx(
        (SCORES[goal]["median"], SCORES[goal]["mape"]), abs=0.01
    )


def test_predictions_are_those_that_were_documented():
    """A sample of closed-form rows: known measurements are met better than unknown ones, and intervals hold them."""
    rows = [row for row in ROWS if row["mode"] == "inflight_maxload"][::7]
    values = np.array([float(row["value"]) for row in rows])
    predictions = predict(rows)
    errors = np.abs(np.array([each.value for each in predictions]) / values - 1)
    assert 100 * np.median(errors) < SCORES["full load, TensorRT-LLM 0.10 to 0.15"]["median"]
    held = [each.low <= value <= each.high for each, value in zip(predictions, values, strict=True)]
    assert np.mean(held) >= 0.8


def test_no_group_is_in_two_folds():
    groups = [row["group_id"] for row in ROWS]
    of = folds(groups)
    assert {group: fold for group, fold in zip(groups, of, strict=True)} == dict(
        zip(reversed(groups), of[::-1], strict=True)
    )


def test_intervals_hold_about_80_percent():
    """In cross-validation, over all rows."""
    found = validated().values()
    held = [float(row["low"]) <= float(row["measured"]) <= float(row["high"]) for row in found]
    assert 0.77 <= np.mean(held) <= 0.83
