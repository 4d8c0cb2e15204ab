"""Programs on PATH that answer as the real ones do."""

import os
from pathlib import Path

import pytest

SMI_LIST = "NVIDIA H100 80GB HBM3, 9.0, 81559, 590.44.01"
SMI_TABLE = "| NVIDIA-SMI 590.44.01   Driver Version: 590.44.01   CUDA Version: 13.1 |"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A function that puts a shell script of some name on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def add(name: str, script: str) -> Path:
        file = folder / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return file

    return add


@pytest.fixture
def gpu(programs, monkeypatch):
    """A machine with one H100, as nvidia-smi shows it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    programs("nvidia-smi", f'case "$1" in --query*) echo "{SMI_LIST}";; *) echo "{SMI_TABLE}";; esac')
