"""The wheel holds what runs: installed in an empty environment, outside any checkout, it plans, sizes and simulates."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.thorough


def run(*command, cwd, env=None):
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the files that git tracks, so that nothing left over in a work tree goes along."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = run("git", "ls-files", "-z", cwd=ROOT).split("\0")[:-1]
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", target, source, cwd=target)
    (built,) = target.glob("trtllm_pipelines-*.whl")
    return built


@pytest.fixture(scope="module")
def program(wheel, tmp_path_factory):
    """The installed command; its libraries are those of this environment, without the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--prefix", folder),
        *("--ignore-installed", wheel),
        cwd=folder,
    )
    # Lines of a .pth file only add folders: the .pth files in them, such as that of an editable install, are not read.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python", folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan", "quant=fp8"], "quantize"),
        (["size", "model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "sizing.average_rate=5"], "GPUs"),
        (["simulate", "benchmark.num_requests=20"], "picture:"),
    ],
    ids=["plan", "size", "simulate"],
)
def test_an_installed_wheel_runs_anywhere(program, tmp_path, words, expected):
    python, _ = program
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = run(python, "-c", "import pipelines; print(pipelines.__file__)", cwd=tmp_path, env=env)
    assert not Path(where.strip()).resolve().is_relative_to(ROOT)
    assert expected in run(python, "-m", "pipelines", *words, cwd=tmp_path, env=env)


def test_the_wheel_has_no_tests_and_no_scripts(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "pipelines/conf/config.yaml" in names
    assert "pipelines/bundled/models/tiny_llama/model.safetensors" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]
