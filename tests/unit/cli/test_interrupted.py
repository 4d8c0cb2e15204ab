"""Ctrl-C ends a command with 130 wherever it comes."""

import pytest
from pydantic import BaseModel, field_serializer

from pipelines.cli.main import main


class Settings(BaseModel):
    """Ctrl-C, or another error, comes while this is written out."""

    value: str = ""

    @field_serializer("value")
    def comes(self, value: str) -> str:
        if value:
            raise ValueError(value)
        raise KeyboardInterrupt


def test_while_pydantic_writes_settings_out(monkeypatch, capsys):
    monkeypatch.setattr("pipelines.run.config_command.config", lambda _: Settings().model_dump())
    assert main(["config"]) == 130
    assert "Interrupted. Finished stages are kept" in capsys.readouterr().err


def test_another_error_of_pydantic_stays_one(monkeypatch):
    monkeypatch.setattr("pipelines.run.config_command.config", lambda _: Settings(value="no such thing").model_dump())
    with pytest.raises(Exception, match="no such thing"):
        main(["config"])
