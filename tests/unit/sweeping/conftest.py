"""Slurm's commands as small programs of our own, where what they answer is what is tested."""

from pathlib import Path

import pytest


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put a program on PATH, where nothing else is: `programs("squeue", "echo 17|RUNNING|None")`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return put
