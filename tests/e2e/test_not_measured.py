"""A model that guesses, or is asked nothing: no command says GO of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.settings.paths import PROJECT_ROOT
from tests.support.small_models import write_untrained

pytestmark = pytest.mark.thorough


def test_a_guessing_model_is_not_measured(tmp_path: Path) -> None:
    """Terminal, exit code, JSON, report and model card; asking in turns gives the same word."""
    model = write_untrained(tmp_path / "guesser")
    words = [f"model.path={model}", f"paths.store={tmp_path / 'store'}", f"paths.runs={tmp_path / 'runs'}"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pipelines", *more, *words]
        return subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)

    ask = ("eval=mini_mmlu", "eval.limit=8", "quant=fp8", "eval.num_fewshot=0")
    alone = run("evaluate", "quant=fp8", "fidelity.tokens=512")
    assert alone.returncode == 4, alone.stdout + alone.stderr
    said = " ".join(alone.stdout.split())
    assert "questions: none, and the verdict is NOT MEASURED, because there is no mmlu here" in said
    assert "guesser fp8 against guesser in 16 bit: text tokens mean KL" in said
    assert "NOT MEASURED: guesser fp8 answered no questions" in said
    assert "GO:" not in said
    (saved,) = (tmp_path / "runs").rglob("accuracy.json")
    assert json.loads(saved.read_text())[0]["verdict"] == "NOT MEASURED"
    saved.unlink()
    table = run("sweep", "quant=fp8", "fidelity.tokens=512")
    assert table.returncode == 4, table.stdout + table.stderr
    assert "NOT MEASURED: guesser fp8 answered no questions" in " ".join(table.stdout.split())
    for written in (tmp_path / "runs").rglob("accuracy.json"):
        written.unlink()
    evaluated = run("evaluate", *ask)
    assert evaluated.returncode == 4, evaluated.stdout + evaluated.stderr
    assert "NOT MEASURED: the baseline of guesser fp8" in " ".join(evaluated.stdout.split())
    (saved,) = (tmp_path / "runs").rglob("accuracy.json")
    (row,) = json.loads(saved.read_text())
    assert (row["verdict"], row["loss_percent"], row["questions"]) == ("NOT MEASURED", None, 96)
    assert row["p_guessing"] > row["false_go"]
    in_turns = run("sweep", *ask, "eval.sequential=true")
    assert in_turns.returncode == 4, in_turns.stdout + in_turns.stderr
    assert "NOT MEASURED: the baseline" in " ".join(in_turns.stdout.split())
    folder = tmp_path / "report"
    made = run("report", f"report.folder={folder}")
    assert made.returncode == 0, made.stderr
    written = [file for file in folder.rglob("*.md") if file.name in ("report.md", "README.md")]
    assert written
    for file in written:
        text = " ".join(file.read_text().split())
        assert "NOT MEASURED: the baseline of guesser fp8" in text, file
        assert "GO: guesser" not in text, file
