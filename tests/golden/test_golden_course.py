"""docs/sizing.md shows what its commands really print."""

import re
import shlex

from pipelines.cli.main import main
from tests.conftest import ROOT
from tests.unit.conftest import PLACEHOLDER

PAGE = ROOT / "docs" / "sizing.md"
STEP = re.compile(
    r"^    make (?P<words>.+)\n\n(?P<how>prints|begins with):\n\n(?P<shown>(?:    .*\n|\n(?=    ))+)", re.M
)
LAST = re.compile(r"^  +rests on|^rests on", re.M)
"""What follows it on the screen is explained in docs/sizing.md."""


def test_every_command_of_the_course_prints_what_the_page_shows(tmp_path, capsys, request, monkeypatch):
    monkeypatch.setattr("pipelines.document.canvas._saved", lambda _, form: PLACEHOLDER[form])
    folders = [f"paths.runs={tmp_path}/runs", f"paths.store={tmp_path}/store"]

    def run_again(step: re.Match[str]) -> str:
        command, *words = shlex.split(step["words"])
        report = [f"report.folder={tmp_path}/reports"] if command == "size" else []
        assert main([command, *words, *folders, *report]) == 0
        printed = re.split(r"^(?:written|numbers):", capsys.readouterr().out, flags=re.M)[0]
        if step["how"] == "begins with":
            printed = LAST.split(printed)[0]
        lines = "".join(f"    {line}\n" if line else "\n" for line in printed.strip("\n").split("\n"))
        return f"    make {step['words']}\n\n{step['how']}:\n\n{lines}"

    page = PAGE.read_text()
    assert len(STEP.findall(page)) == 5
    fresh = STEP.sub(run_again, page)
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(fresh)
    assert fresh == PAGE.read_text()
