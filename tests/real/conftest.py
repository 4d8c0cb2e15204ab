"""The command line on the real model, with a store that is kept, and the table of what came out."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.real.prepare import FOLDER, MODEL, ROOT

COLUMNS = ("format", "MiB", "KL", "top-1 %", "ppl ratio", "MMLU %", "95 %", "verdict", "ARC-Easy %", "95 %", "verdict")


@dataclass
class Real:
    """Runs commands on the model, shows what they print, and finds their results.

    Attributes:
        rows: of the table, by format.
    """

    store: Path = FOLDER / "artifacts"
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        chosen = [f"model.path={MODEL}"] if words[0] != "serve" or len(words) > 1 else []
        return [sys.executable, "-m", "pipelines", words[0], f"paths.store={self.store}", *chosen, *words[1:]]

    def start(self, *words: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "110"}
        return subprocess.Popen(
            self.command(*words), cwd=FOLDER, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *words: str) -> str:
        """Run to the end; a verdict has exit codes of its own, an error begins with "error:"."""
        sys.stdout.write(f"\n$ {' '.join(words)}\n")
        begun, lines = time.monotonic(), []
        with self.start(*words) as process:
            assert process.stdout
            for line in process.stdout:
                lines.append(line)
                sys.stdout.write(line)
        text = "".join(lines)
        assert "error:" not in text
        assert "Traceback" not in text
        sys.stdout.write(f"({time.monotonic() - begun:.0f} s)\n")
        return text

    def results(self, name: str, **wanted: Any) -> dict[str, Any]:
        """Return the newest result with these values."""
        files = sorted(self.store.rglob(name), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for file in files:
            found = json.loads(file.read_text())
            if all(found.get(key) == value for key, value in wanted.items()):
                return {**found, "folder": file.parent}
        raise AssertionError(f"no {name} with {wanted}")

    def table(self) -> str:
        rows = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *self.rows.values()]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


@pytest.fixture(scope="session")
def real() -> Iterator[Real]:
    made = Real()
    yield made
    if made.rows:
        (FOLDER / "table.md").write_text(made.table(), encoding="utf-8")
        sys.stdout.write(f"\n{made.table()}\nwritten to {FOLDER / 'table.md'}\n")
