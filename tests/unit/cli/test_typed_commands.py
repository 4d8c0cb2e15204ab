"""Messages name commands as the person types them: with make in a checkout, with the console script elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.cli.commands import COMMANDS
from pipelines.cli.main import _without_make
from pipelines.doctor.versions import Diagnosis, render
from pipelines.document import blocks
from pipelines.document.canvas import write_document
from pipelines.host import screen
from tests.conftest import ROOT


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The words of a package that pip installed."""
    monkeypatch.setattr(screen, "_typed", _without_make(tmp_path))


def said(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pipelines", *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    return " ".join(done.stderr.split())


def test_each_place_has_its_own_words(tmp_path: Path) -> None:
    missing = ("plan", f"config={tmp_path}/none.yaml")
    assert "To write one: trtllm-pipelines init" in said(tmp_path, *missing)
    assert "To write one: make init" in said(tmp_path, "--from-make", *missing)
    assert "To write one: make init" in said(ROOT, *missing)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("Write one: make repository", "Write one: trtllm-pipelines repository"),
        ("`make plan` shows which do.", "`trtllm-pipelines plan` shows which do."),
        ("runs here: make all", "runs here: trtllm-pipelines all"),
        ("`make help build` lists", "`trtllm-pipelines help build` lists"),
        ("make all quant=fp8", "trtllm-pipelines all quant=fp8"),
        ("It can make all others. We make plans, make time, remake build.", None),
        ("Run: make setup", "Run: pip install 'trtllm-pipelines[cpu,serve,report,size,sweep]'"),
        ("Run: make setup-edge", "Run: make -C CLONE setup-edge"),
        ("inside NVIDIA's container (make shell)", "inside NVIDIA's container (make -C CLONE shell)"),
    ],
)
def test_a_text_of_an_installed_package(text: str, typed: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    screen.say(text)
    assert capsys.readouterr().out == f"{typed or text}\n"
    assert screen.wrapped(text, room=200) == (typed or text)
    assert screen.table([["a", "b"], ["1", text]], left=2)[1].split(maxsplit=1)[1] == (typed or text)


@pytest.mark.usefixtures("installed")
def test_a_command_and_a_page_of_an_installed_package(tmp_path: Path) -> None:
    assert screen.command_lines(["make", "build", "model.path='a b'"]) == ["trtllm-pipelines build model.path='a b'"]
    assert screen.command_lines(["(cd 'make build'", "&&", "ls)"]) == ["(cd 'make build' && ls)"]
    page = blocks.Document("t", "s", (), (blocks.Text("Not measured: `make evaluate`."),), ())
    paths = write_document(page, tmp_path)
    for path in (paths.markdown, paths.html):
        assert "trtllm-pipelines evaluate" in path.read_text()
        assert "make evaluate" not in path.read_text()


@pytest.mark.usefixtures("installed")
def test_the_last_line_of_doctor() -> None:
    assert render(Diagnosis({}, [])).endswith("runs here: trtllm-pipelines all\n")


def test_what_only_a_checkout_has_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed = _without_make(ROOT)
    assert typed["setup"] == f"make -C {ROOT} setup"
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    own = {name for name, words in typed.items() if words.startswith("make")}
    assert own - {"image", "shell"} <= targets
    assert own | targets >= {"setup", "setup-edge"}
    assert set(COMMANDS) <= set(typed)
