"""A bad configuration is refused by key and value on one screen, and a good one is planned: a part of the campaign."""

import pytest

from tests.support.configurations import bad, good, known, right_values, wrong_values
from tests.torture.configurations import judge

SEED, BAD, GOOD = 20, 100, 50


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def test_the_generator_knows_every_setting():
    """Values of both kinds exist for almost all; the others are texts, lists and mappings that take anything."""
    assert len(known()) > 350
    assert sum(bool(wrong_values(leaf)) for leaf in known()) > 330
    assert sum(bool(right_values(leaf)) for leaf in known()) > 280


def test_bad_configurations_are_refused_by_name(store):
    wrong = [verdict for case in bad(SEED, BAD) if (verdict := judge(case, store)).faults]
    assert not wrong, f"{wrong[0].case.words}: {wrong[0].faults}"


def test_good_configurations_are_planned(store):
    wrong = [verdict for case in good(SEED, GOOD) if (verdict := judge(case, store)).faults]
    assert not wrong, f"{wrong[0].case.words}: {wrong[0].faults}"
