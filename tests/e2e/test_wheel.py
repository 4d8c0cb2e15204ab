"""The wheel holds what runs: installed in an empty environment, outside any checkout, it does what the README shows."""

import json
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


def test_a_project_folder_does_the_readmes_first_example(program, tmp_path):
    python, _ = program
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(python, "-m", "pipelines", "init", "model=tiny_llama", "quant=int4_awq", cwd=tmp_path, env=env)
    (tmp_path / "below").mkdir()
    # short loads, for it is the way that is tested here
    words = ["benchmark.concurrency=[1,4]", "benchmark.num_requests=8", "eval=quick"]
    said = run(python, "-m", "pipelines", "all", *words, cwd=tmp_path / "below", env=env)
    (report,) = (tmp_path / "below").rglob("report.html")
    assert f"report: {report.relative_to(tmp_path / 'below')}" in said
    assert "int4_awq" in report.read_text(encoding="utf-8")


def test_the_notebook_runs(program, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (make packages)")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (make packages)")
    import nbformat

    python, _ = program
    kernel = tmp_path / "jupyter" / "kernels" / "wheel"
    kernel.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "wheel", "language": "python"}))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook = nbformat.read(ROOT / "docs/notebook.ipynb", as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="wheel", resources=place).execute()
    nbformat.validate(notebook)
    values = [
        out["data"] for cell in notebook.cells for out in cell.get("outputs", []) if out.output_type == "execute_result"
    ]
    assert [sorted(each) for each in values].count(["text/html", "text/plain"]) == 4
    verdicts = next(
        each["text/plain"] for each in values if "int4_wo" in each["text/plain"] and "NO-GO" in each["text/plain"]
    )
    assert "'int8_sq': ('GO', 0.0" in verdicts
