"""Ctrl-C ends a command with 130 wherever it comes."""

import pytest
from pydantic import BaseModel, field_serializer

from pipelines import __main__ as program
from pipelines.cli.commands import COMMANDS, Command


class Settings(BaseModel):
    """Ctrl-C, or another error, comes while this is written out."""

    value: str = ""

    @field_serializer("value")
    def comes(self, value: str) -> str:
        if value:
            raise ValueError(value)
        raise KeyboardInterrupt


def test_while_pydantic_writes_settings_out(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "config", Command("", lambda _: Settings().model_dump()))
    assert program.main(["config"]) == 130
    assert "Interrupted. Finished stages are kept" in capsys.readouterr().err


def test_another_error_of_pydantic_stays_one(monkeypatch):
    monkeypatch.setitem(COMMANDS, "config", Command("", lambda _: Settings(value="no such thing").model_dump()))
    with pytest.raises(Exception, match="no such thing"):
        program.main(["config"])
