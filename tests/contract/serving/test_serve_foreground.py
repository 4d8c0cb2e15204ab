"""`serve` in a process of its own: what it prints works when pasted, and every way to end it."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from pipelines.serving.config import ServingSettings
from pipelines.serving.locate import why_no_server

pytestmark = pytest.mark.skipif(why_no_server(ServingSettings()) is not None, reason="needs a tritonserver")
ROOT = Path(__file__).parents[3]
DRAIN_S = 30
PROGRAM = """
import os, signal, sys
from pathlib import Path
from pipelines.serving import foreground
from pipelines.domain.progress import SilentProgress
from pipelines.serving.foreground import serve
from pipelines.serving.config import ServingSettings
restarts = next((int(word.removeprefix("restarts=")) for word in sys.argv if word.startswith("restarts=")), 5)
settings = ServingSettings(
    openai=True, drain_timeout_s=int(sys.argv[2]), show_log="show_log" in sys.argv, restarts=restarts
)
if "impatient" in sys.argv:
    def say(text=""):
        print(text)
        if text.startswith("Serving"):
            os.kill(os.getpid(), signal.SIGTERM)
    foreground.say = say
sys.exit(serve(Path(sys.argv[1]), settings, SilentProgress(), prompt="it's a fox"))
"""


@dataclass
class Running:
    """One `serve` and what it printed until it was ready."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read_until_ready(self) -> None:
        assert self.process.stdout is not None
        while not any("/v1/completions" in line for line in self.lines) or self.lines[-1].strip():
            line = self.process.stdout.readline()
            assert line, f"ended early: {self.lines}"
            self.lines.append(line)

    def read_until(self, text: str) -> None:
        """Read on to the line that has the text."""
        assert self.process.stdout is not None
        while text not in (self.lines[-1] if self.lines else ""):
            line = self.process.stdout.readline()
            assert line, f"ended early: {self.lines}"
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def server_pid(self) -> int:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(found.pid for found in children if found.name() == "tritonserver")


def start(repository: Path, drain_timeout_s: int = DRAIN_S, *words: str) -> Running:
    command = [sys.executable, "-u", "-c", PROGRAM, str(repository), str(drain_timeout_s), *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return Running(process)


@pytest.fixture
def running(echo_repository: Path) -> Iterator[Running]:
    found = start(echo_repository)
    try:
        found.read_until_ready()
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
        found.process.communicate()


def paste(text: str) -> str:
    """Run what stands there as a person would, in a shell in the same folder."""
    done = subprocess.run(["bash", "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def test_every_printed_line_works_when_pasted_and_sigterm_drains(running: Running) -> None:
    """Curl and Python against Triton, curl against the OpenAI service; then an orderly end."""
    blocks = re.split(r"\n\n+", running.text)
    curl, python, openai = (
        block for block in blocks if block.startswith(("curl", ".venv", "/", "'")) and "Serving" not in block
    )
    assert '"text_output":"it\'s a fox it\'s a fox' in paste(curl)
    assert "it's a fox it's a fox" in paste(python)
    assert '"finish_reason":"length"' in paste(openai)
    assert max(len(line.rstrip()) for line in running.lines) <= 100
    children = psutil.Process(running.process.pid).children(recursive=True)
    running.process.send_signal(signal.SIGTERM)
    said, _ = running.process.communicate(timeout=60)
    assert "Draining: running requests may take up to 30 s" in said
    assert running.process.returncode == 0
    assert not any(child.is_running() for child in children)


def test_in_a_container_the_servers_log_is_shown_to_its_last_line(echo_repository: Path) -> None:
    found = start(echo_repository, 5, "show_log")
    found.read_until_ready()
    found.process.send_signal(signal.SIGTERM)
    said, _ = found.process.communicate(timeout=60)
    assert "Started HTTPService at 127.0.0.1" in found.text
    assert re.search("All models are stopped, unloading models", said)
    assert found.process.returncode == 0


def test_a_server_is_drained_from_the_moment_it_says_that_it_serves(echo_repository: Path) -> None:
    """SIGTERM while the lines to paste are still being printed."""
    found = start(echo_repository, 5, "impatient")
    said, _ = found.process.communicate(timeout=60)
    assert "Draining" in said
    assert found.process.returncode == 0


def test_a_server_that_dies_ends_it_with_the_reason(echo_repository: Path) -> None:
    """Without restarts."""
    found = start(echo_repository, 5, "restarts=0")
    found.read_until_ready()
    os.kill(found.server_pid(), signal.SIGSEGV)
    said, _ = found.process.communicate(timeout=60)
    assert "tritonserver ended while it was in use: killed by SIGSEGV" in said
    assert "Starting it again" not in said
    assert found.process.returncode == 1


def complete(address: str) -> tuple[int, str]:
    """Ask the OpenAI service for words that take 3 s; return its status and the text, or the error."""
    body = json.dumps({"model": "echo", "prompt": "sleep", "max_tokens": 30}).encode()
    request = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


def test_a_server_that_dies_is_started_again_a_bounded_number_of_times(echo_repository: Path) -> None:
    """On the same ports; a request that ran gets a clear error, and the next one its answer."""
    found = start(echo_repository, 5, "restarts=1")
    found.read_until_ready()
    openai = re.search(r"OpenAI +(\S+)", found.text)
    assert openai is not None
    first = found.server_pid()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, openai[1])
        time.sleep(0.5)
        os.kill(first, signal.SIGSEGV)
        status, message = running.result()
    assert (status, message) == (503, "The inference server ended while it answered this request; send it again.")
    found.read_until("Serving again")
    assert "killed by SIGSEGV" in found.text
    assert "Starting it again in 1.00 s (restart 1 of 1 in a row)." in found.text
    assert complete(openai[1]) == (200, " sleep" * 30)
    os.kill(found.server_pid(), signal.SIGKILL)
    said, _ = found.process.communicate(timeout=60)
    assert "killed by SIGKILL" in said
    assert "It is not started again: serving.restarts=1 is used up." in said
    assert found.process.returncode == 1


def test_an_openai_service_that_dies_is_started_again_alone(echo_repository: Path) -> None:
    """The server goes on; Ctrl-C then drains as ever."""
    found = start(echo_repository)
    found.read_until_ready()
    server = found.server_pid()
    children = psutil.Process(found.process.pid).children(recursive=True)
    service = next(child for child in children if child.cmdline()[1:3] == ["-m", "pipelines.serving.openai"])
    service.kill()
    found.read_until("Serving again")
    assert "The OpenAI service on port" in found.text
    assert found.server_pid() == server
    found.process.send_signal(signal.SIGINT)
    said, _ = found.process.communicate(timeout=60)
    assert "Draining" in said
    assert found.process.returncode == 0


def test_ctrl_c_between_two_attempts_to_start_ends_it(echo_repository: Path) -> None:
    found = start(echo_repository)
    found.read_until_ready()
    os.kill(found.server_pid(), signal.SIGKILL)
    found.read_until("Starting it again")
    found.process.send_signal(signal.SIGINT)
    said, _ = found.process.communicate(timeout=60)
    assert "Stopped immediately." in said
    assert found.process.returncode == 130


def test_a_second_ctrl_c_does_not_wait(echo_repository: Path) -> None:
    """A request that would hold the drain for 20 s is given up."""
    found = start(echo_repository, drain_timeout_s=30)
    found.read_until_ready()
    url = re.search(r"HTTP +(\S+)", found.text)
    assert url is not None
    body = '{"text_input": "sleep", "max_tokens": 200}'
    asking = ["curl", "-s", f"{url[1]}/v2/models/ensemble/generate", "-d", body]
    with subprocess.Popen(asking, stdout=subprocess.DEVNULL) as request:
        time.sleep(0.3)
        found.process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert found.process.poll() is None
        found.process.send_signal(signal.SIGINT)
        said, _ = found.process.communicate(timeout=60)
        assert "Stopped immediately." in said
        assert found.process.returncode == 130
        assert request.wait(60) != 0  # curl's code for an answer that was cut off


def test_ctrl_c_with_nothing_running_does_not_wait_for_idle_clients(running: Running) -> None:
    """With a connection kept open to the OpenAI-compatible service; waiting for it takes the whole drain timeout."""
    address = re.search(r"OpenAI +http://([^/\s]+)", running.text)
    assert address is not None
    kept = http.client.HTTPConnection(address[1], timeout=5)
    kept.request("GET", "/health")
    assert kept.getresponse().read() == b""
    time.sleep(1)
    begun = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    running.process.communicate(timeout=60)
    assert time.monotonic() - begun < DRAIN_S
    assert running.process.returncode == 0
