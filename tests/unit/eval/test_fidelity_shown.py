"""Flips by direction, and a fidelity result kept and shown."""

import json
import math
from dataclasses import replace

import pytest

from eval.fidelity.divergence import FidelityResult, Figures, GreedyFidelity, LayerErrors, TextFidelity
from eval.fidelity.fidelity_text import fidelity_text
from eval.results import QuestionRecord, flips, margin
from pipelines.domain.errors import UserError
from tests.support.report_store import evaluation

NOISE = Figures(1_000, 1e-5, 1e-8, 2e-4, 0.01, 0.996, 4.0, 4.0001)
FOUND = Figures(4_000, 0.002, 5e-9, 0.03, 1.5, 0.97, 4.0, 4.2)


def result(**given):
    usual = {
        "model": "tiny", "qformat": "fp8", "engine": "openvino", "reference": "tiny", "arithmetic": "f32",
        "noise_arithmetic": "f32 rounded", "window": 512, "vocabulary": 1920, "overall": FOUND, "noise": NOISE,
        "texts": (TextFidelity("bundled", True, FOUND, NOISE), TextFidelity("user", True, FOUND, NOISE)),
        "greedy": GreedyFidelity(64, (None, 10, 3, 30)), "layers": None,
    }  # fmt: skip
    return FidelityResult(**{**usual, **given})


def record(index, logprobs, answer):
    choice = logprobs.index(max(logprobs))
    return QuestionRecord("letters", index, logprobs, choice, answer, choice == answer)


def answered(*logprobs):
    """An evaluation whose right choice is always the first."""
    records = tuple(record(index, each, 0) for index, each in enumerate(logprobs))
    return replace(evaluation("fp8", 0), records=records)


def test_flips_by_direction_with_the_margin_of_the_reference():
    sure, unsure = (math.log(0.8), math.log(0.1), math.log(0.1)), (math.log(0.5), math.log(0.3), math.log(0.2))
    wrong, other = (-9.0, -1.0, -2.0), (-9.0, -2.0, -1.0)
    found = flips(answered(sure, unsure, wrong, wrong), answered(sure, wrong, sure, other))
    assert (found.to_wrong, found.to_right, found.wrong_to_wrong, found.flipped) == (1, 1, 1, 3)
    assert margin(record(0, unsure, 0)) == pytest.approx(0.2)
    assert found.margin_kept == pytest.approx(0.7)  # 0.8 - 0.1, of the only answer that stayed
    text = fidelity_text(result(), found)
    assert "Flips: 3 answers of 4 changed: 1 from right to wrong, 1 from wrong" in text


def test_written_answers_flip_without_a_margin():
    """They have no probabilities of choices, and two right answers may be written differently."""
    texts = [("four", True, "4", True), ("four", True, "five", False), ("x", False, "y", False)]
    before, after = (
        tuple(QuestionRecord("sums", at, (), row[side], "4", row[side + 1]) for at, row in enumerate(texts))
        for side in (0, 2)
    )
    found = flips(replace(evaluation("none", 0), records=before), replace(evaluation("fp8", 0), records=after))
    assert (found.to_wrong, found.to_right, found.wrong_to_wrong, found.flipped) == (1, 0, 1, 2)
    assert (found.margin_kept, found.margin_flipped) == (None, None)
    assert "Flips: 2 answers of 3 changed" in fidelity_text(result(), found)


def test_a_result_is_read_back_as_it_was_written(tmp_path):
    layers = LayerErrors((0.1, 0.2), (0.01, 0.02), {"mlp.up_proj": (0.3, 0.4)}, scaled=True)
    for kept in (result(), result(layers=layers)):
        kept.save(tmp_path / "fidelity.json")
        back = FidelityResult.from_json(json.loads((tmp_path / "fidelity.json").read_text()), "it")
        assert back.overall == kept.overall
        assert fidelity_text(back, None) == fidelity_text(kept, None)


@pytest.mark.parametrize(("field", "value"), [("window", "wide"), ("greedy", None), ("overall", {"tokens": 1})])
def test_a_file_with_other_fields_is_refused(tmp_path, field, value):
    result().save(tmp_path / "fidelity.json")
    data = json.loads((tmp_path / "fidelity.json").read_text()) | {field: value}
    with pytest.raises(UserError, match="here is not a fidelity result"):
        FidelityResult.from_json(data, "here")


def test_what_is_within_the_noise_is_marked():
    text = fidelity_text(result(), None)
    row = next(line for line in text.splitlines() if line.startswith("user"))
    assert row.split() == ["user", "4,000", "0.002", "5e-09~", "0.03", "1.5", "97.00", "1.0500"]
    assert next(line for line in text.splitlines() if line.startswith("noise ")).split()[1:3] == ["1,000", "1e-05"]
    assert "1 of 4 are equal over 64 tokens; the others first differ after 10 (median)" in " ".join(text.split())


def test_a_mark_is_explained_only_where_a_figure_has_it():
    assert "~: within noise" in fidelity_text(result(), None)
    beyond = replace(FOUND, kl_median=2e-8)
    texts = (TextFidelity("bundled", True, beyond, NOISE),)
    assert "~" not in fidelity_text(result(overall=beyond, texts=texts), None)
