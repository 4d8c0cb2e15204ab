"""The Dockerfiles: what hadolint says, and the promises a linter does not know."""

import fnmatch
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.conftest import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
BIN = Path(sys.executable).parent


def instructions(path: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) with continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def of(path: Path, word: str) -> list[str]:
    return [rest for name, rest in instructions(path) if name == word]


def everyone(test):
    return pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])(test)


def test_there_is_one_for_each_flavour():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.gpu"]


@everyone
def test_hadolint_finds_nothing(path):
    tool = shutil.which("hadolint", path=BIN) or shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [tool, "--no-color", "--config", ROOT / "docker" / "hadolint.yaml", path], capture_output=True, text=True
    )
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


@everyone
def test_the_base_has_a_tag_and_room_for_a_digest(path):
    assert of(path, "FROM") == ["${BASE_IMAGE}"]
    arguments = of(path, "ARG")
    assert re.fullmatch(r"BASE_TAG=[a-z0-9./-]+:[A-Za-z0-9._-]+", arguments[0])
    assert arguments[1:3] == ["BASE_DIGEST=", "BASE_IMAGE=${BASE_TAG}${BASE_DIGEST:+@${BASE_DIGEST}}"]


def test_the_gpu_base_is_the_last_line_with_tensorrt_engines():
    """Triton's compatibility table: 26.04 to 26.07 hold TensorRT-LLM 1.2.1; the flavour must be -trtllm-python-py3."""
    tag = of(ROOT / "docker" / "Dockerfile.gpu", "ARG")[0].partition(":")[2]
    assert tag in {f"26.0{month}-trtllm-python-py3" for month in (4, 5, 6, 7)}


@everyone
def test_it_runs_as_a_user_with_a_number_that_is_not_root(path):
    assert of(path, "USER")[-1] == "${UID}:${GID}"
    assert {"UID=1000", "GID=1000"} <= set(of(path, "ARG"))


@everyone
def test_signals_reach_the_program(path):
    """The exec form has no shell in between, which would swallow SIGTERM."""
    for word in ("ENTRYPOINT", "CMD"):
        assert json.loads(of(path, word)[-1])
    assert json.loads(of(path, "ENTRYPOINT")[-1])[-3:] == ["python3", "-m", "pipelines"]
    assert of(path, "STOPSIGNAL") == ["SIGTERM"]
    health = of(path, "HEALTHCHECK")[0].partition(" CMD ")[2]
    assert json.loads(health) == ["python3", "/opt/trtllm-pipelines/docker/healthcheck.py"]


@everyone
def test_no_secret_can_end_up_in_a_layer(path):
    for word in ("ARG", "ENV", "COPY"):
        assert not [rest for rest in of(path, word) if re.search("token|secret|password|pip.conf|netrc", rest, re.I)]
    assert [rest for rest in of(path, "RUN") if "--mount=type=secret,id=pip" in rest]


@everyone
def test_what_is_downloaded_stays_out_of_the_layers(path):
    for command in of(path, "RUN"):
        if "pip install" in command:
            assert "--mount=type=cache,target=/root/.cache/pip" in command
            assert "--constraint /tmp/pip/constraints.txt" in command
        if "apt-get" in command:
            assert "--no-install-recommends" in command
            assert "--mount=type=cache,target=/var/lib/apt" in command


@everyone
def test_the_image_has_the_extras_of_make_setup(path):
    """But for what only a checkout does: launchers of sweeps and the tools of developers."""
    makefile = re.search(r"-e '\.\[(.*?)\]'", (ROOT / "Makefile").read_text())
    step = next(rest for rest in of(path, "RUN") if "pip install" in rest)
    installed = re.search(r"requirements\.py /tmp/pip (.*?) \$\{DEV:\+dev\}", step)
    usual = set(makefile[1].split(",")) - {"cpu", "sweep", "dev"}
    assert set(installed[1].split()) == usual | {path.suffix[1:]}


def test_the_gpu_image_fails_to_build_when_anything_of_nvidias_changed():
    step = next(rest for rest in of(ROOT / "docker" / "Dockerfile.gpu", "RUN") if "pip install" in rest)
    assert "comm -23 /tmp/before /tmp/after | tee /tmp/changed; test ! -s /tmp/changed;" in step
    assert "--upgrade" not in step


def ignored(name: str) -> bool:
    """What .dockerignore does with a top-level name: the last line that matches decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            out = not line.startswith("!") if fnmatch.fnmatch(name, line.lstrip("!")) else out
    return out


@everyone
def test_every_copied_path_exists_and_reaches_the_builder(path):
    for copied in of(path, "COPY"):
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert not (ignored(source.split("/")[0]) and ignored(source)), source


@pytest.mark.parametrize("name", [".git", ".env", "artifacts", "runs", "tests", "id_rsa", "token", ".venv"])
def test_nothing_else_of_the_checkout_reaches_the_builder(name):
    assert ignored(name)


REQUIREMENTS = runpy.run_path(str(ROOT / "docker" / "requirements.py"))
PROJECT = {
    "project": {
        "dependencies": ["pyyaml>=6"],
        "optional-dependencies": {"gpu": ["torch>=2.9", "numpy<2"], "serve": ["PyYAML>=6", "uvloop>=0.19"]},
    }
}
CONTAINER = {"torch": "2.10.0a0+b4e4ee81d3.nv25.12", "numpy": "1.26.4", "pyyaml": "6.0.1"}


def test_what_the_container_has_is_not_installed_again():
    """NVIDIA's torch is a development version with a local part; it counts as 2.10."""
    wanted = REQUIREMENTS["wanted"](PROJECT, ["gpu", "serve"])
    assert REQUIREMENTS["to_install"](wanted, CONTAINER) == ["uvloop>=0.19"]


def test_a_package_of_the_container_that_does_not_fit_ends_the_build():
    wanted = REQUIREMENTS["wanted"](PROJECT, ["gpu"])
    with pytest.raises(SystemExit, match=r"numpy 2\.1\.0 is installed, but the project needs <2; torch 2\.5\.0 is"):
        REQUIREMENTS["to_install"](wanted, {**CONTAINER, "numpy": "2.1.0", "torch": "2.5.0"})


def test_an_extra_that_does_not_exist_ends_the_build():
    with pytest.raises(SystemExit, match=r"gpus: no such extra in pyproject\.toml\. Known: gpu, serve"):
        REQUIREMENTS["wanted"](PROJECT, ["gpus"])


def test_installed_versions_replace_the_tested_ones_in_the_constraints():
    tested = "# comment\nPyYAML==6.0.3\ntorch==2.13.0\nuvloop==0.22.1\n"
    assert REQUIREMENTS["constraints"](tested, CONTAINER) == [
        "numpy==1.26.4",
        "pyyaml==6.0.1",
        "torch==2.10.0a0+b4e4ee81d3.nv25.12",
        "uvloop==0.22.1",
    ]


def test_an_old_setuptools_of_the_base_image_is_no_constraint(monkeypatch):
    """python:3.11-slim has 65.5.1; modelopt 0.47 needs 80, and pip found no way out."""

    class Setuptools:
        metadata, version = MappingProxyType({"Name": "setuptools"}), "65.5.1"

    monkeypatch.setattr("importlib.metadata.distributions", lambda: [Setuptools])
    assert REQUIREMENTS["installed"]() == {}


def test_the_container_set_satisfies_the_gpu_extra():
    """The versions that TensorRT-LLM 1.2.1 pins and its container ships, against our own pyproject.toml."""
    import tomllib

    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = {
        "torch": "2.10.0a0+b4e4ee81d3.nv25.12", "transformers": "4.57.3", "nvidia-modelopt": "0.37.0",
        "numpy": "1.26.4", "datasets": "3.1.0", "accelerate": "1.7.0", "pydantic": "2.9.1", "fastapi": "0.120.1",
    }  # fmt: skip
    left = REQUIREMENTS["to_install"](REQUIREMENTS["wanted"](ours, ["gpu", "serve", "report", "size"]), shipped)
    assert not {re.split("[<>=\\[]", line)[0] for line in left} & set(shipped)
    assert "hydra-core<1.4,>=1.3" in left
    assert not any(line.startswith(("openvino", "nvidia-pytriton")) for line in left)


NVIDIAS = {
    "torch": "2.10.0a0+b4e4ee81d3.nv25.12", "transformers": "4.57.3", "nvidia-modelopt": "0.37.0", "numpy": "1.26.4",
    "datasets": "3.1.0", "huggingface-hub": "0.36.2", "fastapi": "0.121.3", "scipy": "1.17.1", "dill": "0.3.8",
}  # fmt: skip
CONTAINERS = {
    "26.04": {"pandas": "3.0.2", "pyarrow": "24.0.0", "protobuf": "7.34.1", "grpcio": "1.80.0"},
    "26.05": {"pandas": "3.0.3", "pyarrow": "24.0.0", "protobuf": "7.35.0", "grpcio": "1.80.0"},
    "26.07": {"pandas": "3.0.5", "pyarrow": "25.0.0", "protobuf": "7.35.1", "grpcio": "1.83.0"},
}
"""What pip chose for the open requirements of tensorrt_llm 1.2.1 on 2026-04-27, 05-27 and 07-27."""
CLIENTS = {"26.04": "tritonclient==2.71.0", "26.05": "tritonclient==2.71.0", "26.07": "tritonclient==2.73.0"}
"""2.73 ends at import with grpcio below 1.81.1, which generated it; 2.71 came from 1.67.1."""


@pytest.mark.parametrize("tag", CONTAINERS)
def test_every_container_takes_the_gpu_image(tag):
    """Nothing of the container is refused, asked for again, or pulled down by tritonclient's protobuf<7."""
    import tomllib

    ours, here = tomllib.loads((ROOT / "pyproject.toml").read_text()), {**NVIDIAS, **CONTAINERS[tag]}
    tested = (ROOT / "constraints.txt").read_text()
    wanted = REQUIREMENTS["to_install"](REQUIREMENTS["wanted"](ours, ["gpu", "serve", "report", "size"]), here)
    lines, no_deps = REQUIREMENTS["without_bounds"](wanted, tested, here)
    names = {re.split(r"[<>=\[]", line)[0] for line in lines}
    assert not names & ({*here} | {"tritonclient"})
    assert {"python-rapidjson", "urllib3"} <= names
    assert no_deps == [CLIENTS[tag]]
    assert f"protobuf=={here['protobuf']}" in REQUIREMENTS["constraints"](tested, here)


def test_a_bare_python_takes_the_client_with_its_dependencies():
    lines = ["tritonclient[grpc]>=2.55", "uvloop>=0.19"]
    assert REQUIREMENTS["without_bounds"](lines, "tritonclient==2.73.0", {"pyyaml": "6.0"}) == (lines, [])


def test_a_client_of_the_container_stays():
    assert REQUIREMENTS["without_bounds"](["uvloop>=0.19"], "tritonclient==2.73.0", CONTAINERS["26.07"]) == (
        ["uvloop>=0.19"],
        [],
    )


def test_a_grpcio_that_no_client_takes_ends_the_build():
    with pytest.raises(SystemExit, match=r"grpcio 1\.60\.0 is installed, tritonclient needs >=1\.67\.1"):
        REQUIREMENTS["client_version"]("tritonclient==2.73.0", "1.60.0")


def test_the_gpu_tests_make_their_checkpoint_without_openvino(monkeypatch, tmp_path):
    """The GPU image has OpenVINO only with image.dev=true."""
    from tests.gpu_trtllm.conftest import own_checkpoint

    monkeypatch.setitem(sys.modules, "openvino", None)
    assert {path.name for path in own_checkpoint(tmp_path / "out").iterdir()} == {"config.json", "rank0.safetensors"}
    assert "engine=openvino" not in (ROOT / "tests" / "gpu_trtllm" / "conftest.py").read_text()


def test_the_dev_image_can_hold_a_tensorrt_engine_against_the_cpu_engine():
    import tomllib

    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = {requirement.name for requirement in REQUIREMENTS["wanted"](ours, ["gpu", "dev"])}
    assert {"openvino", "openvino-genai", "pytest"} <= names


def test_the_health_check_follows_the_server(tmp_path):
    import http.server
    import threading

    class Ready(http.server.BaseHTTPRequestHandler):
        status = 200

        def do_GET(self):
            self.send_response(self.status if self.path == "/v2/health/ready" else 404)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def check() -> int:
        script = ROOT / "docker" / "healthcheck.py"
        env = {"HTTP_PORT": str(server.server_port)}
        return subprocess.run([sys.executable, "-I", script], env=env, capture_output=True).returncode

    assert check() == 0
    Ready.status = 503
    assert check() == 1
    server.shutdown()
    server.server_close()
    assert check() == 1
