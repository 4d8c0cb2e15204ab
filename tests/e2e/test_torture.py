"""A minute of `make torture`: every campaign, shortened, survives everything it plants."""

import importlib

import pytest

from tests.torture.__main__ import CAMPAIGNS, main, table
from tests.torture.row import Row

pytestmark = pytest.mark.thorough

SEED, SECONDS = 1, 6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_everything_planted_is_survived(campaign):
    rows = importlib.import_module(f"tests.torture.{campaign}").run(seed=SEED, seconds=SECONDS)
    assert all(row.tried for row in rows), table(rows, SEED)
    assert all(row.survived == row.tried for row in rows), table(rows, SEED)


def test_the_table_says_what_fell_short():
    rows = [Row("zeros in an engine", 1000, 1000, 1.5), Row("a full disk", 20, 19, 0, "seed 7 lost a result")]
    assert table(rows, 3).splitlines() == [
        "seed 3",
        "planted              tried survived  worst s",
        "zeros in an engine   1,000    1,000     1.50",
        "a full disk             20       19        –  FELL SHORT",
        "  seed 7 lost a result",
    ]


@pytest.mark.parametrize(("survived", "code"), [(3, 0), (2, 1)])
def test_the_exit_code_says_whether_all_was_survived(monkeypatch, capsys, survived, code):
    module = type("Campaign", (), {"run": staticmethod(lambda **_: [Row("planted", 3, survived, 0.0)])})
    monkeypatch.setattr("importlib.import_module", lambda _: module)
    assert main(["rot"]) == code
    assert ("FELL SHORT" in capsys.readouterr().out) == bool(code)


def test_a_campaign_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["flood"])
    assert ended.value.code == 2
    assert "there is no campaign flood; allowed: rot, disks" in capsys.readouterr().err
