"""Settings, ports, the search for a server, the backend directory, leftovers."""

import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.serving import locate as locate_module
from pipelines.serving.config import USUAL_PORTS, ServingSettings
from pipelines.serving.locate import PYTHON, Wheel, backend_directory, locate, why_no_server
from pipelines.serving.ports import FREE_RANGE, choose_ports, port_faults, privileged_ports
from pipelines.serving.process import own_prefix, remove_leftovers
from pipelines.serving.repository import read_repository, refuse_elsewhere
from pipelines.settings.compose import load
from pipelines.stages.benchmark import logged_server


@pytest.mark.parametrize("host", ["example.com", "::1", "300.1.1.1", ""])
def test_a_host_is_an_ipv4_address(host: str) -> None:
    with pytest.raises(ValidationError, match=rf"'{host}' is not an IPv4 address"):
        ServingSettings(host=host)


def test_only_loopback_is_loopback() -> None:
    assert ServingSettings(host="localhost").host == "127.0.0.1"
    assert ServingSettings().loopback
    assert not ServingSettings(host="0.0.0.0").loopback
    assert ServingSettings(host="0.0.0.0").local_host == "127.0.0.1"


def test_free_ports_differ_and_stay_below_those_of_connections() -> None:
    ports = choose_ports(ServingSettings(openai=True))
    assert list(ports) == ["http_port", "grpc_port", "metrics_port", "openai_port"]
    assert len(set(ports.values())) == 4
    assert all(FREE_RANGE[0] <= port <= FREE_RANGE[1] for port in ports.values())


def test_processes_that_seeded_alike_choose_different_ports() -> None:
    """Libraries do that: lm-eval, and whatever else wants the same numbers again."""
    before = random.getstate()
    found = []
    for _ in range(3):
        random.seed(0)
        found.append(choose_ports(ServingSettings())["http_port"])
    random.setstate(before)
    assert len(set(found)) > 1


def test_a_port_given_twice_is_refused() -> None:
    """While planning, before anything is built; ports that are left open avoid the given ones everywhere."""
    for one, other in itertools.combinations(USUAL_PORTS, 2):
        with pytest.raises(UserError, match=rf"serving\.{one}=21234 and serving\.{other}=21234: give every service"):
            load([f"serving.{one}=21234", f"serving.{other}=21234"])
    ports = ServingSettings(http_port=9000, openai_port=8001).ports
    assert ports == {"http_port": 9000, "grpc_port": 8002, "metrics_port": 8003, "openai_port": 8001}


def test_a_port_of_root_is_refused_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    (fault,) = privileged_ports(ServingSettings(http_port=80, grpc_port=65535))
    assert fault.message == "serving.http_port=80 needs the rights of root."
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert privileged_ports(ServingSettings(http_port=80)) == []


def test_a_usual_port_in_use_gives_way_a_given_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setitem(__import__("pipelines.serving.ports").serving.ports.USUAL_PORTS, "http_port", taken)
        assert choose_ports(ServingSettings(), usual=True)["http_port"] != taken
        with pytest.raises(UserError, match=rf"http_port={taken} is in use: .+ \(process {os.getpid()}\) listens"):
            choose_ports(ServingSettings(http_port=taken), usual=True)


def test_only_ports_that_are_opened_must_be_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert not port_faults(ServingSettings(openai_port=taken))  # nothing is in front
        assert port_faults(ServingSettings(openai_port=taken, openai=True))
        assert not port_faults(ServingSettings(http_port=taken, server="trtllm_serve"))
        assert port_faults(ServingSettings(openai_port=taken, server="trtllm_serve"))
    assert not port_faults(ServingSettings(openai_port=taken, openai=True))


def test_a_server_that_is_only_measured_takes_free_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that a benchmark runs beside a server whose ports `pipelines.yaml` gives."""
    started = []

    @contextmanager
    def server(_repository: Path, settings: ServingSettings, **_rest: object) -> Iterator[None]:
        started.append(settings)
        yield

    monkeypatch.setattr("pipelines.serving.process.TritonServer", server)
    given = ServingSettings(http_port=8000, openai_port=9000, openai=True)
    with logged_server(tmp_path, given, tmp_path, SilentProgress()):
        pass
    assert started == [ServingSettings(openai=True)]


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"serving\.host='192\.0\.2\.1' is not an address of this machine"):
        choose_ports(ServingSettings(host="192.0.2.1"))  # a documentation address, RFC 5737


def test_a_given_server_is_taken_or_refused_never_replaced(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"serving\.tritonserver='/no/such' is not an executable program"):
        locate(ServingSettings(tritonserver=Path("/no/such")))
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\n")
    assert "is not an executable program" in str(why_no_server(ServingSettings(tritonserver=program)))
    program.chmod(0o755)
    found = locate(ServingSettings(tritonserver=program))
    assert (found.binary, found.wheel) == (program, None)


def test_a_server_on_path_comes_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert locate(ServingSettings()).binary == program


@pytest.fixture
def no_system_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(locate_module, "CONTAINER_BINARY", tmp_path / "none")


def test_without_any_server_it_says_what_to_install(no_system_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate_module, "find_wheel", lambda: None)
    fault = why_no_server(ServingSettings())
    assert fault is not None
    assert "'nvidia-pytriton' is missing" in fault.message
    assert "make setup" in fault.todo


def make_wheel(folder: Path, python: str = PYTHON) -> Wheel:
    """The wheel's layout with empty programs."""
    wheel = Wheel(folder / "pytriton" / "tritonserver", folder / "libs", "0.7.0")
    for file in (
        wheel.binary,
        wheel.root / "backends" / "python" / "libtriton_python.so",
        wheel.root / "backends" / "python" / "triton_python_backend_utils.py",
        wheel.root / "python_backend_stubs" / python / "triton_python_backend_stub",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
        file.chmod(0o755)
    return wheel


def test_numpy_2_is_refused_with_the_reason(
    no_system_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate_module, "find_wheel", lambda: make_wheel(tmp_path))
    monkeypatch.setattr(locate_module.metadata, "version", lambda _name: "2.1.3")
    assert "numpy 2.1.3 is installed, but the Python backend of nvidia-pytriton 0.7.0 crashes" in str(
        why_no_server(ServingSettings())
    )


def test_a_python_without_stub_is_refused(
    no_system_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate_module, "find_wheel", lambda: make_wheel(tmp_path, python="3.7"))
    assert f"no Python backend for Python {PYTHON}. It supports Python 3.7." in str(why_no_server(ServingSettings()))


def test_the_backend_directory_is_made_once_by_however_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight at once; site-packages stays as it is; no half-made folder remains."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel = make_wheel(tmp_path)
    before = sorted(wheel.root.rglob("*"))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(backend_directory(wheel))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert sorted(path.name for path in (found[0] / "python").iterdir()) == [
        "libtriton_python.so", "triton_python_backend_stub", "triton_python_backend_utils.py",
    ]  # fmt: skip
    assert [path.name for path in found[0].parent.iterdir()] == [found[0].name]
    assert sorted(wheel.root.rglob("*")) == before


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    assert backend_directory(make_wheel(tmp_path)).is_relative_to(tmp_path / "tmp")


def test_a_cache_whose_path_a_shell_would_cut_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts its stub by a line for bash, with this path in it as it is: it hung until it timed out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    assert backend_directory(make_wheel(tmp_path)).is_relative_to(tmp_path / "tmp")
    assert not (tmp_path / "my cache").exists()


def test_only_regions_of_dead_owners_are_removed(tmp_path: Path) -> None:
    """A process that has ended, one that lives, one of another container, somebody else's."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    while Path(f"/proc/{dead.pid}").exists():
        time.sleep(0.01)
    own = own_prefix(0)
    namespace = own.split("_")[2]
    names = {
        "dead": f"trtllm_pipelines_{namespace}_{dead.pid}_0_x",
        "alive": f"{own}x",
        "other container": f"trtllm_pipelines_1_{dead.pid}_0_x",
        "stranger": "triton_python_backend_shm_region_x",
    }
    for name in names.values():
        (tmp_path / name).write_text("")
    assert remove_leftovers(tmp_path) == [names["dead"]]
    assert {path.name for path in tmp_path.iterdir()} == set(names.values()) - {names["dead"]}
    assert str(os.getpid()) in own


def test_a_folder_without_models_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a model repository"):
        read_repository(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        read_repository(tmp_path / "none")


def test_a_repository_tells_its_backend_ranks_and_limits(tmp_path: Path) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "config.pbtxt").write_text('name: "tensorrt_llm"\nbackend: "tensorrtllm"\n')
    described = (
        '{"label": "gemma", "world_size": 2, "limits": {"max_seq_len": 99}, "settings": {"add_special_tokens": false}}'
    )
    assert read_repository(tmp_path).label == tmp_path.name
    (tmp_path / "repository.json").write_text(described)
    found = read_repository(tmp_path)
    assert (found.label, found.gpu, found.world_size, found.max_seq_len, found.adds_special_tokens) == (
        "gemma", True, 2, 99, False,
    )  # fmt: skip
    (tmp_path / "repository.json").write_text("{")
    with pytest.raises(UserError, match=r"repository\.json is not valid JSON"):
        read_repository(tmp_path)


def test_a_repository_for_gpus_or_several_machines_is_refused_before_the_start(tmp_path: Path) -> None:
    """The wheel's server has no TensorRT-LLM; one command cannot start ranks elsewhere."""
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "config.pbtxt").write_text('backend: "tensorrtllm"\n')
    found = read_repository(tmp_path)
    refuse_elsewhere(found, from_wheel=False)
    with pytest.raises(UserError, match=r"only the Python backend.*engine=openvino"):
        refuse_elsewhere(found, from_wheel=True)
    (tmp_path / "repository.json").write_text('{"settings": {"num_nodes": 2}}')
    with pytest.raises(UserError, match=r"several machines.*'start' in .*repository\.json"):
        refuse_elsewhere(read_repository(tmp_path), from_wheel=False)
