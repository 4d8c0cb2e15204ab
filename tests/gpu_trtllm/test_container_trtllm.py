"""What docker/Dockerfile.gpu and the manifests take for granted about NVIDIA's container."""

import runpy
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from pipelines.deploy.nodes import MPIRUN
from tests.conftest import ROOT

REQUIREMENTS = runpy.run_path(str(ROOT / "docker" / "requirements.py"))


def test_it_is_the_last_line_with_tensorrt_engines():
    assert metadata.version("tensorrt_llm").startswith("1.2.")
    assert sys.version_info[:2] == (3, 12)


def test_nothing_of_it_has_to_be_replaced():
    """The image installs around what is there; a package that does not fit would end its build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = REQUIREMENTS["wanted"](project, ["gpu", "serve", "report", "size"])
    left = REQUIREMENTS["to_install"](wanted, REQUIREMENTS["installed"]())
    assert not [line for line in left if line.startswith(("torch", "transformers", "nvidia-modelopt", "numpy"))]


def test_the_entry_point_and_mpirun_are_where_they_are_called():
    assert Path("/opt/nvidia/nvidia_entrypoint.sh").is_file()
    assert Path(MPIRUN).is_file(), f"mpirun is {shutil.which('mpirun')}, not {MPIRUN}"
