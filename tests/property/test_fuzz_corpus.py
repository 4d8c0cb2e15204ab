"""What fuzzing has found stays found: every input of the corpus is taken, or refused in our own words."""

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.thorough

CORPUS = Path(__file__).resolve().parent.parent / "fuzz" / "corpus"
CASES = [pytest.param(path, id=f"{path.parent.name}/{path.name}") for path in sorted(CORPUS.glob("*/*"))]


def test_every_target_has_a_corpus():
    assert {path.name for path in CORPUS.iterdir()} == TARGETS.keys()


@pytest.mark.parametrize("path", CASES)
def test_an_input_is_taken_or_refused(path):
    TARGETS[path.parent.name](path.read_bytes())
