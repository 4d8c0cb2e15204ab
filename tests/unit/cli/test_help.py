"""Help is made from the table of commands, fits the screen, and tells the truth."""

import importlib
import subprocess
import sys

import pytest

from pipelines import __version__
from pipelines.cli.commands import COMMANDS, SECTIONS
from pipelines.cli.main import command_help, main, overview
from pipelines.cli.words import overrides_of
from pipelines.settings.compose import load
from pipelines.settings.groups import groups
from pipelines.settings.root import Settings
from tests.conftest import ROOT

COMMANDS_OF_MANY = ("sweep", "compare")
"""They take lists, which no single configuration does."""


def test_every_command_is_listed_once():
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(COMMANDS)
    for name, command in COMMANDS.items():
        assert f"  {name}" in overview()
        assert command.summary.split()[0] in overview()


def test_every_command_leads_to_a_function(subtests):
    for name in COMMANDS:
        with subtests.test(name):
            module, _, function = COMMANDS[name].function.partition(":")
            assert callable(getattr(importlib.import_module(module), function))


def test_every_group_that_help_names_exists(subtests):
    for name in COMMANDS:
        with subtests.test(name):
            assert set(COMMANDS[name].groups) <= {*groups(), *Settings.model_fields, "hydra/launcher"}


EXAMPLES = [(name, example) for name, command in COMMANDS.items() for example in command.examples]


def test_every_example_composes(subtests):
    for name, example in EXAMPLES:
        with subtests.test(example):
            verb, *words = example.split()
            assert verb == name
            overrides = [each for each in overrides_of(verb, words) if not each.startswith("config=")]
            if overrides and "=" not in overrides[0]:
                overrides = overrides[1:]
            if name not in COMMANDS_OF_MANY:
                assert load(overrides)


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_the_screen(name, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = command_help(name) if name else overview()
    long = [line for line in text.splitlines() if len(line) > columns and len(line.split()) > 2]
    assert long == []


@pytest.mark.parametrize(
    "words", [["build", "--help"], ["--help", "build"], ["help", "build"], ["build", "quant=fp8", "-h"]]
)
def test_help_of_a_command(words, capsys):
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: trtllm-pipelines build [key=value ...]")
    assert "int4_awq" in text
    assert text.count("  trtllm-pipelines build ") == 3
    assert "130" in text


def test_exit_codes_of_nightly_are_its_own(capsys):
    main(["nightly", "--help"])
    assert "3   something got worse" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trtllm-pipelines {__version__}\n"


def test_help_and_refusals_need_the_standard_library_alone():
    """So that they work before `make setup`."""
    code = (
        "import sys; from pipelines.cli.main import main; main(['--help']); main(['build', '--help']); "
        "main(['build', 'int4_awq']); print(sorted({m.partition('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "quant=int4_awq" in done.stderr
    loaded = done.stderr.splitlines()[-1]
    assert not [name for name in ("hydra", "pydantic", "rich", "yaml") if f"'{name}'" in loaded]
