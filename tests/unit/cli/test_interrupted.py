"""Ctrl-C, or a closed terminal, ends a command with 130 wherever it comes."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest
from pydantic import BaseModel, field_serializer
from pydantic_core import SchemaError

from pipelines.cli.main import main
from pipelines.settings.base import Group


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


class InnerGroup(Group):
    """Ctrl-C comes while this is written out as a part of another group, where pydantic keeps no cause."""

    value: str = ""

    @field_serializer("value")
    def comes(self, _value: str) -> str:
        raise KeyboardInterrupt


class OuterGroup(Group):
    """As `Settings` have their groups."""

    inner: InnerGroup = InnerGroup()


@pytest.mark.parametrize("write", [OuterGroup().model_dump, OuterGroup().model_dump_json], ids=["python", "json"])
def test_while_pydantic_writes_out_a_group_in_a_group(monkeypatch, capsys, write):
    monkeypatch.setattr("pipelines.run.config_command.config", lambda _: write())
    assert main(["config"]) == 130
    assert "Interrupted. Finished stages are kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cause", "code"), [("KeyboardInterrupt: ", 130), ("TypeError: KeyboardInterrupt: none", None)]
)
def test_while_pydantic_makes_a_class(monkeypatch, capsys, cause, code):
    """An import that Ctrl-C ends; pydantic-core keeps the text of the cause alone."""

    def config(_words):
        raise SchemaError(f'Error building "model" validator:\n  SchemaError: Field "inner":\n  {cause}')

    monkeypatch.setattr("pipelines.run.config_command.config", config)
    if code is None:
        with pytest.raises(SchemaError):
            main(["config"])
        return
    assert main(["config"]) == code
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


HELD = """
import os, signal, sys, time
from pipelines.cli.main import main
import pipelines.run.config_command as command

def work(_):
    try:
        print("works", flush=True)
        time.sleep(0.3 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 60)
    finally:
        os.kill(os.getpid(), signal.SIGHUP)  # the shell's and then the kernel's
        print("cleaned up", flush=True)
    return 0

command.config = work
sys.exit(main(["config"]))
"""


@pytest.mark.parametrize(
    ("before", "code", "said"),
    [(signal.SIG_DFL, 130, "Interrupted. Finished stages are kept"), (signal.SIG_IGN, 0, "")],
    ids=["terminal", "nohup"],
)
def test_a_closed_terminal_is_a_ctrl_c_unless_the_command_is_to_outlive_it(before, code, said):
    process = subprocess.Popen(
        [sys.executable, "-c", HELD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, before),
    )
    assert process.stdout.readline() == "works\n"
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out == "cleaned up\n"
    assert said in err
