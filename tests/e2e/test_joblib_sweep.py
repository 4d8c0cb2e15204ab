"""`make sweep hydra/launcher=joblib`: cells at the same time, each in a process and a log of its own."""

import re

import pytest

pytestmark = pytest.mark.thorough


def test_cells_side_by_side_make_what_both_need_once(cli):
    words = ("sweep", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "quant=none", "eval.limit=1,2")
    text = cli.run(*words)
    assert "2 cells, 2 to run with joblib" in text
    for number in (1, 2):
        assert re.search(rf"\[{number}\] running on \S+: eval\.limit={number}, log \S+/cell-{number}\.log", text)
        assert re.search(rf"\[{number}\] done in .*: eval\.limit={number}", text)
    (folder,) = (cli.folder / "runs" / "sweeps").iterdir()
    logs = [(folder / f"cell-{number}.log").read_text() for number in (1, 2)]
    assert sum("build: made in" in log for log in logs) == 1
    assert sum("evaluate: made in" in log for log in logs) == 2
    assert "2 cells, 2 finished already, 0 to run with joblib" in cli.run(*words)
