"""`make image` and `make shell`: the exact command lines, and what is said when nothing can run them."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from pipelines import __version__
from pipelines.deploy import containers
from pipelines.deploy.config import ImageSettings
from pipelines.deploy.containers import (
    Checkout,
    SharedFolders,
    build_command,
    build_image,
    checkout,
    find_tool,
    flavour_of,
    open_shell,
    reference,
    shell_command,
)
from pipelines.domain.errors import UserError
from pipelines.host.machine import GpuFacts, Machine, git
from pipelines.settings.compose import load
from tests.conftest import ROOT

SOURCE = Checkout(Path("/src"), "0123456789ab", 1700000000)
PLACES = SharedFolders(Path("/src/artifacts"), Path("/data/runs"), Path("/home/me/.cache/huggingface"), "1234:1234")
CPU = Machine(2, 2**34, (), "nvidia-smi is not installed", has_tensorrt_llm=False, platform="test")
DIGEST = "sha256:" + "0a" * 32


def test_the_gpu_image_is_built_on_the_pinned_container():
    command = build_command("docker", ImageSettings(), "gpu", SOURCE)
    assert command == (
        "docker", "build", "--file=/src/docker/Dockerfile.gpu", f"--tag=trtllm-pipelines:{__version__}-gpu",
        "--build-arg=BASE_TAG=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3",
        "--build-arg=UID=1000", "--build-arg=GID=1000", f"--build-arg=VERSION={__version__}",
        "--build-arg=REVISION=0123456789ab", "--build-arg=SOURCE_DATE_EPOCH=1700000000", "/src",
    )  # fmt: skip


def test_everything_that_can_be_set_reaches_the_builder(tmp_path):
    pip = tmp_path / "pip.conf"
    pip.write_text("[global]\n")
    settings = ImageSettings(
        name="registry.example.com:5000/team/llm", tag="v1", digest=DIGEST, uid=2000, gid=3000, pip_config=pip,
        no_cache=True, dev=True, torch_index="https://mirror.example.com/cpu", base_cpu="python:3.12-slim",
    )  # fmt: skip
    assert build_command("podman", settings, "cpu", Checkout(Path("/src"))) == (
        "podman", "build", "--file=/src/docker/Dockerfile.cpu", "--tag=registry.example.com:5000/team/llm:v1",
        "--format=docker", "--no-cache",
        "--build-arg=BASE_TAG=python:3.12-slim", f"--build-arg=BASE_DIGEST={DIGEST}",
        "--build-arg=TORCH_INDEX=https://mirror.example.com/cpu", "--build-arg=DEV=1",
        "--build-arg=UID=2000", "--build-arg=GID=3000",
        f"--build-arg=VERSION={__version__}", "--build-arg=REVISION=unknown", f"--secret=id=pip,src={pip}", "/src",
    )  # fmt: skip


def test_the_shell_gets_gpus_shared_memory_the_checkout_and_the_token_by_name():
    assert shell_command("docker", ImageSettings(), "gpu", SOURCE, PLACES) == (
        "docker", "run", "--rm", "--interactive", "--tty", "--gpus=all", "--ulimit=memlock=-1",
        "--ulimit=stack=67108864", "--shm-size=8g", "--network=host", "--user=1234:1234",
        "--mount=type=bind,source=/src,target=/opt/trtllm-pipelines",
        "--mount=type=bind,source=/data/runs,target=/data/runs",
        "--mount=type=bind,source=/home/me/.cache/huggingface,target=/cache/huggingface",
        "--env=HF_TOKEN", "--env=HF_ENDPOINT", "--env=HF_HUB_OFFLINE",
        "--workdir=/opt/trtllm-pipelines", "--entrypoint=/bin/bash", f"trtllm-pipelines:{__version__}-gpu",
    )  # fmt: skip


def test_podman_keeps_the_user_and_takes_gpus_by_their_device_name():
    command = shell_command("podman", ImageSettings(shm_size="16g"), "gpu", SOURCE, PLACES, terminal=False)
    assert {"--device=nvidia.com/gpu=all", "--userns=keep-id", "--security-opt=label=disable"} <= set(command)
    assert "--shm-size=16g" in command
    assert "--tty" not in command
    assert not any(word.startswith("--gpus") for word in command)


def test_the_cpu_shell_asks_for_no_gpu():
    command = " ".join(shell_command("docker", ImageSettings(), "cpu", SOURCE, PLACES))
    assert "gpu" not in command
    assert "ulimit" not in command


def test_a_path_with_a_comma_is_refused():
    places = SharedFolders(Path("/a,b"), Path("/runs"), Path("/hf"), "1:1")
    with pytest.raises(UserError, match="'/a,b' has a comma"):
        shell_command("docker", ImageSettings(), "cpu", SOURCE, places)


@pytest.mark.parametrize(
    ("engine", "gpus", "flavour"),
    [
        ("openvino", True, "cpu"),
        ("tensorrt_llm", False, "gpu"),
        ("tensorrt_llm_llmapi", False, "gpu"),
        ("auto", True, "gpu"),
        ("auto", False, "cpu"),
    ],
)
def test_the_engine_decides_which_image(engine, gpus, flavour):
    assert flavour_of(engine, gpus=gpus) == flavour


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("image.digest=sha256:123", "image.digest='sha256:123' is not valid"),
        ("image.uid=0", "image.uid='0' is not valid"),
        ("image.name=Team/LLM", "image.name='Team/LLM' is not valid"),
        ("image.shm_size=8", "image.shm_size='8' is not valid"),
        ("image.base_gpu=nvcr.io/nvidia/tritonserver", "'nvcr.io/nvidia/tritonserver' names no version"),
        ("image.base_cpu=python:latest", "'python:latest' names no version"),
        ("image.base_cpu='python@sha256:1'", "carries a digest: give it as image.digest"),
        ("image.pip_config=/no/such/pip.conf", "'/no/such/pip.conf' is not a file"),
        ("image.tool=buildah", "image.tool='buildah' is not known"),
    ],
)
def test_settings_that_cannot_work_are_refused(override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load([override])


def fake_tool(folder: Path, name: str, script: str) -> None:
    """A program on PATH that stands for docker or podman."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_without_a_container_engine_the_command_to_run_elsewhere_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"docker and podman are not installed.*docker build --tag=x \.$"):
        find_tool("auto", ("docker", "build", "--tag=x", "."))
    with pytest.raises(UserError, match="podman is not installed"):
        find_tool("podman", ("docker",))


def test_an_engine_that_does_not_answer_is_passed_over_and_its_words_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    fake_tool(tmp_path, "docker", "echo 'Cannot connect to the Docker daemon.' >&2; exit 1")
    fake_tool(tmp_path, "podman", "exit 125")
    with pytest.raises(UserError, match=r"Cannot connect to the Docker daemon; podman is installed .* ended with 125"):
        find_tool("auto", ("docker",))
    fake_tool(tmp_path, "podman", "exit 0")
    assert find_tool("auto", ("docker",)) == "podman"


@pytest.fixture
def docker(monkeypatch, tmp_path):
    """A docker that answers and writes down how it was called; returns the file of its calls."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake_tool(tmp_path, "docker", f'[ "$1" = info ] || echo "$@" >> {calls}\n[ "$1" != run ] || exit 7')
    return calls


def test_make_image_shows_and_runs_the_command(docker, capsys):
    assert build_image(load(["engine=tensorrt_llm"]), CPU) == 0
    shown = capsys.readouterr().out
    assert "image flavour: gpu (engine=tensorrt_llm)" in shown
    assert f"image: {reference(ImageSettings(), 'gpu')}" in shown
    assert f"+ docker {docker.read_text().strip()}" in shown
    assert f"--build-arg=REVISION={checkout(ROOT).revision}" in shown


def test_make_image_says_why_auto_took_a_flavour(docker, capsys):
    build_image(load([]), CPU)
    assert "image flavour: cpu (engine=auto: no NVIDIA GPU, nvidia-smi is not installed)" in capsys.readouterr().out
    gpu = Machine(2, 2**34, (GpuFacts("H100", 9.0, 2**36),), "", has_tensorrt_llm=True, platform="test")
    build_image(load([]), gpu)
    assert "image flavour: gpu (engine=auto: H100 is here)" in capsys.readouterr().out


def test_the_token_reaches_the_shell_by_name_only_and_folders_exist_before(docker, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    settings = load([f"paths.store={tmp_path}/store", f"paths.runs={tmp_path}/runs"])
    assert open_shell(settings, CPU) == 7  # the exit code of the shell
    assert "hf_secret" not in docker.read_text() + capsys.readouterr().out
    assert "--env=HF_TOKEN" in docker.read_text()
    assert all((tmp_path / name).is_dir() for name in ("store", "runs", "hub"))


def test_outside_git_the_revision_is_unknown(tmp_path):
    (tmp_path / "docker").mkdir()
    assert checkout(tmp_path) == Checkout(tmp_path, "unknown", None)
    assert containers.checkout(ROOT).commit_time


def test_an_installed_package_cannot_build_images(tmp_path):
    with pytest.raises(UserError, match=rf"built from a checkout .* runs from {tmp_path}, which has no folder docker/"):
        checkout(tmp_path)


def test_a_package_inside_another_repository_has_no_commit(tmp_path):
    """A virtual environment often lies in the work tree of someone's own project."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", tmp_path, *author, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True)
    (tmp_path / "site-packages" / "docker").mkdir(parents=True)
    assert git(tmp_path, "rev-parse", "HEAD")
    assert checkout(tmp_path / "site-packages").revision == "unknown"
