"""Every command of the features' files, of their guide and of docs/gpu.md is one that the configuration takes."""

import shlex
from pathlib import Path

import pytest

from pipelines.cli.commands import COMMANDS
from pipelines.settings.compose import load
from pipelines.settings.groups import CONF
from tests.conftest import ROOT

GROUPS = (
    "runtime",
    "reuse",
    "window",
    "lora",
    "speculative",
    "weights",
    "guided",
    "multimodal",
    "parallel",
    "sparsity",
)
FILES = sorted(path for group in GROUPS for path in (CONF / group).glob("*.yaml"))


def commands(path: Path) -> list[str]:
    """Commands of a file: after a comment's `make`, or indented in a guide."""
    start = "    make " if path.suffix == ".md" else "# "
    lines = [line for line in path.read_text().splitlines() if line.startswith(start) and "make " in line]
    return [line[line.index("make ") :].split("  ")[0] for line in lines]


GUIDES = (ROOT / "docs" / "models.md", ROOT / "docs" / "gpu.md")
NO_OVERRIDES = ("test-gpu", "setup-edge")
"""Targets of the Makefile that are no command of the program."""
ALL = sorted({line for path in (*FILES, *GUIDES) for line in commands(path)})


def test_the_command_composes(subtests: pytest.Subtests) -> None:
    for line in ALL:
        with subtests.test(line):
            _, target, *overrides = shlex.split(line)
            assert target in COMMANDS or (target in NO_OVERRIDES and not overrides)
            load(overrides)


def test_every_group_of_features_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "models.md").read_text()
    assert [group for group in GROUPS if f"{group}=" not in guide] == []
