"""`smallest` on a bundled model, with too few questions for any GO, so that one evaluation is enough."""

import re

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


def test_too_few_questions_for_any_mix_are_said_after_one_evaluation(cli):
    found = cli.run("smallest", "quant=auto", "quant.scoring_texts=4", "calibration.size=8", "eval.limit=6", code=3)
    assert "4 to 8 bits per weight, 9 bounds" in found
    assert "No mix is GO: with 8 bits, the most that is tried, the verdict is UNDECIDED" in found
    assert re.search(r"About \d[\d,]* questions would decide it", found)
