"""What docs/sizing.md says is what parameters.json says, and what the code predicts."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
from pathlib import Path

import numpy as np
import pytest

from pipelines.predict.performance.physics import Parameters
from scripts.published.cases import PUBLISHED, case_of, read_rows
from scripts.published.predict import predict
from scripts.published_fit.accuracy import GOALS, VALIDATED, goals_of, verdict
from scripts.published_fit.crossvalidation import folds

PAGE = (Path(__file__).parents[3] / "docs" / "sizing.md").read_text(encoding="utf-8")
DOCUMENT = Parameters.load().document
ROWS = read_rows(PUBLISHED)


def validated():
    """Cross-validated predictions by case."""
    text = gzip.decompress(VALIDATED.read_bytes()).decode()
    return {row["case_id"]: row for row in csv.DictReader(io.StringIO(text))}


def test_the_parameters_are_fitted_to_the_measurements_that_are_here():
    assert DOCUMENT["data"]["sha256"] == hashlib.sha256(PUBLISHED.read_bytes()).hexdigest()


@pytest.mark.parametrize("goal", sorted(GOALS))
def test_the_page_says_what_cross_validation_found(goal):
    score = DOCUMENT["goals"][goal]
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {goal} |"))
    assert f"median {score['median']:.1f} %, MAPE {score['mape']:.1f} % (n = {score['n']})" in line
    assert line.endswith(f"| {verdict(GOALS[goal], score)} |")


@pytest.mark.parametrize("goal", [name for name in GOALS if "left out" not in name])
def test_goals_are_computed_from_predictions_of_rows_that_were_left_out(goal):
    """The scores follow from cross_validation.csv.gz, and reach the pass column."""
    found = validated()
    errors = [
        abs(float(found[row["case_id"]]["predicted"]) / float(row["value"]) - 1)
        for row in ROWS
        if row["case_id"] in found and goal in goals_of(case_of(row))
    ]
    score = DOCUMENT["goals"][goal]
    assert 100 * np.median(errors) == pytest.approx(score["median"], abs=0.05)
    assert 100 * np.mean(errors) == pytest.approx(score["mape"], abs=0.05)
    assert GOALS[goal].met("pass", score)


def test_every_table_of_the_page_is_in_the_parameters():
    """One line per source, mode, family and metric, with the same numbers."""
    for name, score in DOCUMENT["cross_validation"]["with_neighbours"].items():
        plain = DOCUMENT["cross_validation"]["formula"][name]
        shown = f"| {plain['median']:.1f} / {plain['mape']:.1f} | {score['median']:.1f} / {score['mape']:.1f} |"
        assert f"| {name.replace(' | ', ', ')} | {score['n']} {shown}" in PAGE


def test_predictions_are_those_that_were_documented():
    """A sample of closed-form rows: known measurements are met better than unknown ones, and intervals hold them."""
    rows = [row for row in ROWS if row["mode"] == "inflight_maxload"][::7]
    values = np.array([float(row["value"]) for row in rows])
    predictions = predict(rows)
    errors = np.abs(np.array([each.value for each in predictions]) / values - 1)
    assert 100 * np.median(errors) < DOCUMENT["goals"]["full load, TensorRT-LLM 0.10 to 0.15"]["median"]
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
