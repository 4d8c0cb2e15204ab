"""A bad configuration is refused by key and value on one screen, and a good one is planned: a part of the campaign."""

import pytest

from tests.support.configurations import bad, bad_cases, good, good_cases, known
from tests.torture.configurations import judge

pytestmark = pytest.mark.thorough

SEEDS, BAD, GOOD = range(20, 25), 20, 10
"""Parts, so that no test takes long on a busy machine: 100 bad and 50 good ones together."""
PARTS = 6
"""Of all settings alone: 2,100 bad values and 900 good ones."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def test_the_generator_knows_every_setting():
    """Values of both kinds exist for almost all; the others are texts, lists and mappings that take anything."""
    assert len(known()) > 350
    assert sum(bool(bad_cases(leaf)) for leaf in known()) > 330
    assert sum(bool(good_cases(leaf)) for leaf in known()) > 280


@pytest.mark.parametrize("part", range(PARTS))
def test_each_value_alone_is_refused_by_name_or_planned(store, part):
    cases = [case for leaf in known()[part::PARTS] for case in (*bad_cases(leaf), *good_cases(leaf))]
    wrong = [verdict for case in cases if (verdict := judge(case, store)).faults]
    assert not wrong, "\n".join(f"{verdict.case.words}: {verdict.faults}" for verdict in wrong)


@pytest.mark.parametrize("seed", SEEDS)
def test_bad_configurations_are_refused_by_name(store, seed):
    wrong = [verdict for case in bad(seed, BAD) if (verdict := judge(case, store)).faults]
    assert not wrong, f"{wrong[0].case.words}: {wrong[0].faults}"


@pytest.mark.parametrize("seed", SEEDS)
def test_good_configurations_are_planned(store, seed):
    wrong = [verdict for case in good(seed, GOOD) if (verdict := judge(case, store)).faults]
    assert not wrong, f"{wrong[0].case.words}: {wrong[0].faults}"
