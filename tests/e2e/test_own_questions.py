"""Questions of the user's own, from the file to the result."""

import csv
import json
import subprocess
import sys
from pathlib import Path

from eval.dataset import MINI_MMLU, read_subjects
from pipelines.settings.paths import PROJECT_ROOT


def test_own_questions_are_scored(tmp_path: Path) -> None:
    """Twenty questions that tiny_gemma knows, four of them with a wrong key: 80 %, under the user's name."""
    rows = read_subjects(MINI_MMLU, ["veldan_law"])["veldan_law"]["test"][:20]
    with (tmp_path / "q.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["question", "A", "B", "C", "D", "answer"])
        for at, row in enumerate(rows):
            table.writerow([row["question"], *row["choices"], "ABCD"[(row["answer"] + (at < 4)) % 4]])
    own = ["eval=local", f"eval.path={tmp_path / 'q.csv'}", "eval.name=laws", "quant=none"]
    places = [f"paths.store={tmp_path / 'store'}", f"paths.runs={tmp_path / 'runs'}"]
    command = [sys.executable, "-m", "pipelines", "evaluate", *own, *places]
    ran = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (saved,) = (tmp_path / "runs").rglob("accuracy.json")
    (row,) = json.loads(saved.read_text())
    assert (row["task"], row["accuracy"], row["questions"]) == ("laws (own)", 0.8, 20)
