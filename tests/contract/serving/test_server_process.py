"""A real tritonserver: it starts, says why it cannot, is watched, drains, and leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipelines.domain.errors import UserError
from pipelines.serving import logs as crashes
from pipelines.serving import process as process_module
from pipelines.serving.config import ServingSettings
from pipelines.serving.locate import why_no_server
from pipelines.serving.logs import ServerFailedError
from pipelines.serving.ports import answers_200
from pipelines.serving.process import TritonServer
from tests.contract.serving.echo_repository import CONFIG, write_echo, write_failing, write_model, write_stubborn
from tests.support.eventually import eventually, lives

pytestmark = pytest.mark.skipif(why_no_server(ServingSettings()) is not None, reason="needs a tritonserver")
SETTINGS = ServingSettings(drain_timeout_s=30, startup_timeout_s=60)
SHM = Path("/dev/shm")
ROOT = Path(__file__).parents[3]


def regions(owner: int) -> list[str]:
    return [path.name for path in SHM.glob(f"trtllm_pipelines_*_{owner}_*")]


def family(pid: int) -> list[psutil.Process]:
    """A process and everything below it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def gone(processes: list[psutil.Process]) -> bool:
    return not any(lives(found) for found in processes)


def generate(server: TritonServer, text: str, max_tokens: int) -> str:
    body = json.dumps({"text_input": text, "max_tokens": max_tokens, "exclude_input_in_output": True}).encode()
    with urllib.request.urlopen(f"{server.http_url}/v2/models/ensemble/generate", body, timeout=20) as answer:
        return str(json.loads(answer.read())["text_output"])


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[TritonServer]:
    """A server that the test may end, in a folder whose name means something to a shell and is not ASCII."""
    with TritonServer(
        write_echo(tmp_path / "it's (a) ü; exit 1 #"), SETTINGS, log_file=tmp_path / "logs" / "server.log"
    ) as found:
        yield found


def test_python_models_write_no_bytecode_into_the_repository(own_server: TritonServer) -> None:
    """It may be an artifact of the store, whose bytes must stay as they were made."""
    assert generate(own_server, "a b", 3) == " a b a"
    assert list(own_server.repository.path.rglob("__pycache__")) == []


def test_all_three_services_answer_on_loopback(echo_server: TritonServer) -> None:
    """HTTP generates, gRPC listens, metrics are Prometheus'; none of the ports is reachable from outside."""
    assert generate(echo_server, "a b", 3) == " a b a"
    with urllib.request.urlopen(echo_server.metrics_url, timeout=5) as answer:
        assert b"nv_inference_request_success" in answer.read()
    names = ("http_port", "grpc_port", "metrics_port")
    listening = [
        found for found in psutil.Process(echo_server._running.pid).net_connections() if found.status == "LISTEN"
    ]
    assert {found.laddr.port for found in listening} == {echo_server.ports[name] for name in names}
    assert {found.laddr.ip.removeprefix("::ffff:") for found in listening} == {"127.0.0.1"}


def test_a_drain_lets_running_requests_finish_and_leaves_nothing(own_server: TritonServer) -> None:
    """A request of 0.8 s that runs when the drain begins gets its whole text."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(generate(own_server, "sleep", 8)))
    thread.start()
    time.sleep(0.3)
    processes, started = family(own_server._running.pid), time.monotonic()
    assert len(processes) == 2  # the server and the stub of its one model
    own_server.stop()
    thread.join()
    assert answers == [" sleep" * 8]
    assert time.monotonic() - started < SETTINGS.drain_timeout_s
    assert own_server.poll() == 0
    assert gone(processes)
    assert regions(os.getpid()) == []


def test_a_killed_server_is_noticed_with_its_signal_and_log(own_server: TritonServer) -> None:
    """Its stub, which would live on for seconds, is gone at once."""
    processes = family(own_server._running.pid)
    own_server.check()
    os.kill(own_server._running.pid, signal.SIGKILL)
    assert own_server._running.wait(60) == -signal.SIGKILL
    assert gone(processes)
    with pytest.raises(ServerFailedError, match=r"killed by SIGKILL .*Log: .*logs/server\.log"):
        own_server.check()


def test_a_server_that_hangs_in_its_crash_handler_is_ended(
    own_server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other threads still say that it is ready; the handler's first words are in the log."""
    monkeypatch.setattr(crashes, "GRACE_S", 0.5)
    processes = family(own_server._running.pid)
    own_server.check()
    with own_server.log_file.open("a") as log:
        log.write("Signal (11) received.\n")
    own_server.check()  # it may still be writing its stack
    time.sleep(0.6)
    assert answers_200("127.0.0.1", own_server.ports["http_port"], "/v2/health/ready")
    with pytest.raises(ServerFailedError, match="in use: it crashed with SIGSEGV, hung while it wrote its"):
        own_server.check()
    assert gone(processes)


def test_a_server_on_which_nothing_runs_ends_at_once(own_server: TritonServer) -> None:
    begun = time.monotonic()
    own_server.stop()
    assert time.monotonic() - begun < SETTINGS.drain_timeout_s
    assert own_server.poll() == 0


PARENT = """
import os, sys, time
from pathlib import Path
from pipelines.serving.process import TritonServer
from pipelines.serving.config import ServingSettings
with TritonServer(Path(sys.argv[1]), ServingSettings()) as server:
    print(server._running.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_parent(echo_repository: Path, number: signal.Signals) -> None:
    """Not even after kill -9: no process within two seconds, no shared memory; Ctrl-C drains first."""
    command = [sys.executable, "-c", PARENT, str(echo_repository)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        processes = [*family(int(parent.stdout.readline())), *family(parent.pid)]
        count = len(set(processes))
        parent.send_signal(number)
        assert eventually(lambda: gone(processes), 6 if number == signal.SIGINT else 2)
        assert eventually(lambda: regions(parent.pid) == [])
        assert count == 6  # server, three stubs, supervisor, parent


@pytest.mark.parametrize("survivors", [{"triton_python_backend_stub"}, {"tritonserver"}, set()])
def test_nothing_outlives_a_parent_that_is_killed_with_its_supervisor(tmp_path: Path, survivors: set[str]) -> None:
    """Not even a process that hangs when it is asked to end, and no shared memory, whoever is left to remove it."""
    repository = write_stubborn(write_echo(tmp_path / "repository"))
    command = [sys.executable, "-c", PARENT, str(repository)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        processes = family(parent.pid)
        assert len(processes) == 5  # parent, supervisor, server, two stubs
        for process in processes:
            if process.name() not in survivors:
                process.kill()
        assert eventually(lambda: gone(processes))
        assert eventually(lambda: regions(parent.pid) == [])


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "raise FileNotFoundError('no engine in /x')",
            r"'broken' does not load: FileNotFoundError: no engine in /x \(model",
        ),
        ("import os; os._exit(3)", "'broken' does not load: Stub process 'broken_0_0' is not healthy"),
        pytest.param(
            "this is no python",
            "'broken' does not load: SyntaxError: invalid syntax",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_model_that_does_not_load_is_named_with_its_reason(tmp_path: Path, statement: str, said: str) -> None:
    """One line instead of a hundred, and the log is kept."""
    repository = write_failing(write_echo(tmp_path / "repository"), statement)
    log = tmp_path / "server.log"
    with pytest.raises(UserError, match=said) as caught, TritonServer(repository, SETTINGS, log_file=log):
        pass
    assert str(log) in str(caught.value)
    assert "broken" in log.read_text()
    assert len(str(caught.value)) < 300 + len(str(log))


LOST_RACE = """
        import os, pathlib
        tried = pathlib.Path({tried!r})
        tried.write_text(tried.read_text() + "x" if tried.exists() else "x")
        if len(tried.read_text()) < {good}:
            print("terminate called after throwing an instance of 'boost::interprocess::lock_exception'", flush=True)
            os.kill(os.getppid(), 6)
"""


@pytest.mark.parametrize(("good", "tries"), [(2, 2), (9, 3)])
def test_a_server_that_loses_its_race_with_a_stub_is_started_again(tmp_path: Path, good: int, tries: int) -> None:
    """Version 2.51 dies of it on busy machines; three times in a row is no chance."""
    tried = tmp_path / "tried"
    repository = write_failing(tmp_path / "repository", LOST_RACE.format(tried=str(tried), good=good).strip())
    server = TritonServer(repository, SETTINGS, log_file=tmp_path / "server.log")
    if good <= tries:
        with server:
            server.check()
    else:
        with pytest.raises(UserError, match=r"killed by SIGABRT.*lock_exception"):
            server.__enter__()
    assert len(tried.read_text()) == tries


def test_a_model_without_code_does_not_hang_the_start(tmp_path: Path) -> None:
    """The server itself would wait for ever."""
    repository = write_echo(tmp_path / "repository")
    (repository / "ensemble" / "1" / "model.py").unlink()
    with pytest.raises(UserError, match="'ensemble' does not load: Python model file not found"):
        TritonServer(repository, SETTINGS).__enter__()


def test_a_model_that_loads_too_long_is_named(tmp_path: Path) -> None:
    """And the server that still loads it is ended."""
    repository = write_failing(write_echo(tmp_path / "repository"), "import time; time.sleep(60)")
    server = TritonServer(repository, ServingSettings(startup_timeout_s=4))
    with pytest.raises(UserError, match=r"not ready after 4\.00 s; .*broken.*serving\.startup_timeout_s"):
        server.__enter__()
    assert server.poll() == -signal.SIGKILL


def test_a_port_in_use_is_named_with_its_setting(echo_repository: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"serving\.grpc_port={port} is in use: .*127\.0\.0\.1:{port}"):
            TritonServer(echo_repository, ServingSettings(grpc_port=port)).__enter__()


def test_a_port_lost_between_look_and_start_is_replaced(echo_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first choice is a port that somebody else took; the second start takes other ones."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        lost, real, calls = other.getsockname()[1], process_module.choose_ports, []

        def choose(settings: ServingSettings, *, usual: bool) -> dict[str, int]:
            calls.append(usual)
            return {**real(settings, usual=usual), **({"metrics_port": lost} if len(calls) == 1 else {})}

        monkeypatch.setattr(process_module, "choose_ports", choose)
        with TritonServer(echo_repository, SETTINGS) as server:
            assert generate(server, "a", 1) == " a"
            assert server.ports["metrics_port"] != lost
        assert len(calls) == 2


def test_strangers_cannot_touch_memory_models_or_logs(echo_repository: Path) -> None:
    """Off loopback, the endpoints that could break the server are closed; inference is not."""
    with TritonServer(echo_repository, SETTINGS.model_copy(update={"host": "0.0.0.0"})) as server:
        assert generate(server, "a", 1) == " a"
        for path in ("v2/repository/index", "v2/logging", "v2/systemsharedmemory/region/x/register"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{server.http_url}/{path}", b"{}", timeout=5)
            assert "restricted" in caught.value.read().decode()


CRASHING = """
import ctypes, os, signal, threading, time


class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=self.wait, daemon=True).start()

    def wait(self):
        while not os.path.exists({cue!r}):
            time.sleep(0.02)
        {crash}

    def execute(self, requests):
        return []
"""
BAD_ALLOC = "ctypes.CDLL('libstdc++.so.6')._ZSt17__throw_bad_allocv()"


@pytest.mark.parametrize(
    ("crash", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV."),
        pytest.param("os.kill(os.getpid(), signal.SIGABRT)", "killed by SIGABRT.", marks=pytest.mark.thorough),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"killed by SIGKILL \(by hand or by another program; memory did not"),
        (
            BAD_ALLOC,
            r"killed by SIGABRT\. It said: terminate called after throwing .*'std::bad_alloc' \| what",
        ),
        ("os._exit(3)", "exit code 3."),
    ],
)
def test_a_model_that_dies_ends_the_server_with_its_own_reason(tmp_path: Path, crash: str, said: str) -> None:
    """Without that, tritonserver says that it is ready, and never answers for this model again."""
    cue = tmp_path / "die"
    repository = write_echo(tmp_path / "repository")
    write_model(
        repository, "fragile", CONFIG.replace('"ensemble"', '"fragile"'), CRASHING.format(cue=str(cue), crash=crash)
    )
    with TritonServer(repository, SETTINGS, log_file=tmp_path / "server.log") as server:
        processes = family(server._running.pid)
        cue.touch()
        assert server._running.wait(60) is not None
        assert gone(processes)
        with pytest.raises(
            ServerFailedError, match=rf"ended while it was in use: its process for model 'fragile': {said}"
        ):
            server.check()


@pytest.mark.parametrize(
    "number", [signal.SIGSEGV, pytest.param(signal.SIGABRT, marks=pytest.mark.thorough), signal.SIGKILL]
)
def test_the_reason_of_a_death_is_not_what_every_start_logs(own_server: TritonServer, number: signal.Signals) -> None:
    """On a machine without GPU every start logs that the CUDA driver is insufficient."""
    os.kill(own_server._running.pid, number)
    own_server._running.wait(60)
    with pytest.raises(ServerFailedError, match=f"killed by {number.name}") as caught:
        own_server.check()
    assert "CUDA" not in str(caught.value).upper()
