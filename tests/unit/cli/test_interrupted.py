"""Ctrl-C ends a command with 130 wherever it comes."""

import errno
import os
import shutil

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


def test_while_python_removes_a_folder(tmp_path, monkeypatch, capsys):
    """Python 3.11's rmtree closes the folder again: OSError, "Bad file descriptor"."""
    (tmp_path / "old" / "folder").mkdir(parents=True)
    usual = os.close

    def close(handle):
        usual(handle)
        monkeypatch.setattr(os, "close", usual)
        raise KeyboardInterrupt

    def remove(_):
        monkeypatch.setattr(os, "close", close)
        shutil.rmtree(tmp_path / "old")

    monkeypatch.setattr("pipelines.run.config_command.config", remove)
    assert main(["config"]) == 130
    assert "Interrupted. Finished stages are kept" in capsys.readouterr().err


def test_a_disk_that_is_full_in_the_clean_up_after_it_is_said(monkeypatch, capsys):
    def stop(_):
        try:
            raise KeyboardInterrupt
        finally:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "result.json")

    monkeypatch.setattr("pipelines.run.config_command.config", stop)
    assert main(["config"]) == 2
    said = capsys.readouterr().err
    assert "result.json" in said
    assert "Interrupted" not in said


def test_another_error_of_pydantic_stays_one(monkeypatch):
    monkeypatch.setattr("pipelines.run.config_command.config", lambda _: Settings(value="no such thing").model_dump())
    with pytest.raises(Exception, match="no such thing"):
        main(["config"])
