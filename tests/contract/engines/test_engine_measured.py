"""An engine by itself: every request is answered in full and timed; what is no engine is said."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from scripts.measure_engine import measure
from tests.contract.engines.conftest import Workshop

ROOT = Path(__file__).resolve().parents[3]


def test_rounds_are_timed_after_one_that_warms_up(workshop: Workshop) -> None:
    engine = workshop.engine(workshop.checkpoint("llama", QFormat.NONE))
    seconds = measure(engine, requests=4, isl=16, osl=8, rounds=2)
    assert len(seconds) == 2
    assert all(0 < each < 60 for each in seconds)


def test_a_request_beyond_the_engine_is_refused_with_its_limit(workshop: Workshop) -> None:
    engine = workshop.engine(workshop.checkpoint("llama", QFormat.NONE))
    with pytest.raises(UserError, match="max_input_len=512"):
        measure(engine, requests=1, isl=600, osl=8, rounds=1)


def test_the_command_line_names_what_is_no_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.measure_engine", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert f"error: '{tmp_path}' is not an engine folder" in done.stderr
