"""A Python without the project's packages is told so, in words."""

from __future__ import annotations

import sys

import pytest

from pipelines.cli.main import main


def test_a_python_without_hydra_is_named_with_the_way_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hydra", None)
    assert main(["plan", "model=tiny_llama"]) == 2
    said = capsys.readouterr().err
    assert "lacks the Python package 'hydra'" in said
    assert "make image, then make shell" in said


def test_a_missing_package_of_one_feature_is_not_mistaken_for_it(monkeypatch):
    """Only what every command needs is explained like that."""

    def run(_self, _words):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    from pipelines.cli.commands import COMMANDS

    monkeypatch.setattr(type(COMMANDS["plan"]), "run", run)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        main(["plan"])
