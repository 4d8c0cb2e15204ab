"""`make serve`: a server in the foreground until Ctrl-C, restarted after a crash."""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from pipelines.domain.benchmark import NO_SLO, Slo
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.domain.units import show_seconds
from pipelines.host.lifetimes import repeated, signal_handlers
from pipelines.host.screen import complain, say
from pipelines.serving.command_lines import CLOSED_TO_STRANGERS
from pipelines.serving.config import API_KEY, ServingSettings
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.logs import ServerFailedError
from pipelines.serving.openai import nginx
from pipelines.serving.process import TritonServer
from pipelines.serving.repository import TEXT_MODEL
from pipelines.serving.trtllm_serve import PROGRAM, TrtllmServe

# Back-off of restarts after a crash.

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
STEADY_S = 600.0
"""A server that ran this long was healthy: the count of its restarts begins anew."""


class RestartBudget:
    """Counts restarts in a row.

    Attributes:
        used: restarts since the server last ran for `STEADY_S`.
    """

    def __init__(self, allowed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.allowed = allowed
        self.used = 0
        self._clock = clock
        self._ready = clock()

    def take(self) -> float | None:
        """Return how many seconds to wait before the next restart, or None when there is none left."""
        if self._clock() - self._ready >= STEADY_S:
            self.used = 0
        if self.used >= self.allowed:
            return None
        self.used += 1
        return min(FIRST_PAUSE_S * 2.0 ** (self.used - 1), LONGEST_PAUSE_S)

    def ready(self) -> None:
        """Note that the server is ready again."""
        self._ready = self._clock()


# Print the server's log as it is written, for containers, where standard output is collected.

POLL_S = 0.2


@contextmanager
def log_shown(log_file: Path) -> Iterator[None]:
    """Copy what is appended to a file in the block to standard output, in complete lines; it is made if missing."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.touch()
    with log_file.open("rb") as log:
        log.seek(0, 2)

        def copy() -> None:
            while line := log.readline():
                sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()

        with repeated(copy, POLL_S, "log"):
            yield


# Example commands that `make serve` prints, ready to paste.

TRITON_PYTHON = """\
{python} - <<'END'
import numpy as np, tritonclient.grpc as triton
client = triton.InferenceServerClient("{grpc_url}")
text = triton.InferInput("text_input", [1, 1], "BYTES")
text.set_data_from_numpy(np.array([[{prompt}]], dtype=object))
count = triton.InferInput("max_tokens", [1, 1], "INT32")
count.set_data_from_numpy(np.array([[16]], dtype=np.int32))
show = lambda result, error: print(error or result.as_numpy("text_output"))
client.start_stream(show)
client.async_stream_infer("{model}", [text, count])
client.stop_stream()
END"""


CHECK_S = 0.2
EXAMPLE_PROMPT = "The capital of"
OPENED = {
    "http_port": "HTTP: inference, statistics, configuration of the models",
    "grpc_port": "gRPC: the same",
    "metrics_port": "metrics",
    "openai_port": "OpenAI-compatible access, Triton's generate endpoints, health, metrics",
}


def serve(
    repository: Path,
    settings: ServingSettings,
    progress: Progress,
    *,
    log_file: Path | None = None,
    prompt: str = EXAMPLE_PROMPT,
    slo: Slo = NO_SLO,
) -> int:
    """Serve until Ctrl-C, SIGTERM or the end of the server.

    Args:
        repository: folder of the models.
        settings: address, ports, limits.
        progress: shows loading.
        log_file: the server's log; None means a temporary file.
        prompt: for the example lines.
        slo: limits that the metrics show exactly how many answers meet.

    Returns:
        exit code: 0 if drained, 1 if the server crashed more often than `serving.restarts` allows (the
        reasons are printed), 130 if interrupted before it was ready, or twice.

    Raises:
        UserError: it cannot start.
    """
    started = time.monotonic()
    server = TritonServer(repository, settings, progress=progress, log_file=log_file, usual_ports=True)

    def say_where() -> None:
        if not settings.loopback:
            _say_exposure(server)
        _say_where(server, time.monotonic() - started, prompt)

    return _run(server, OpenAiFrontend(server, slo) if settings.front else None, say_where)


def serve_llm_api(server: TrtllmServe, prompt: str) -> int:
    """Serve with trtllm-serve until Ctrl-C, SIGTERM or its end; see `serve`."""
    started = time.monotonic()

    def say_where() -> None:
        say(f"Serving with {PROGRAM}, ready after {show_seconds(time.monotonic() - started)}. Ctrl-C ends it.")
        say(f"  OpenAI   {server.url}\n  log      {server.log_file}")
        if not server.settings.loopback:
            say("There is no authentication, and its port takes POST /update_weights and /release_memory too.")
        _say_completion(server.url, server.model, prompt)

    return _run(server, None, say_where)


def _run(server: TritonServer | TrtllmServe, frontend: OpenAiFrontend | None, say_where: Callable[[], None]) -> int:
    """Run a server; SIGTERM acts like Ctrl-C, which ends it at once while it starts or drains."""
    shown = log_shown(server.log_file) if server.settings.show_log else nullcontext()
    with signal_handlers((signal.SIGINT, signal.SIGTERM), signal.default_int_handler):
        try:
            with shown, server, frontend or nullcontext():
                return _watch(server, frontend, say_where)
        except KeyboardInterrupt:
            say("Stopped immediately.")
            return 130


def _watch(server: TritonServer | TrtllmServe, frontend: OpenAiFrontend | None, say_where: Callable[[], None]) -> int:
    """Print the addresses and wait; the drain happens when the caller leaves its `with` block."""
    budget = RestartBudget(server.settings.restarts)
    try:
        say_where()
        while True:
            complain(str(_wait_for_failure(server, frontend)))
            if not _start_again(server, frontend, budget):
                return 1
    except KeyboardInterrupt:
        if server.poll() is not None:
            raise  # between two attempts to start it there is nothing to drain
        limit = show_seconds(server.settings.drain_timeout_s)
        say(f"\nDraining: running requests may take up to {limit}; Ctrl-C again ends them.")
        return 0


def _wait_for_failure(server: TritonServer | TrtllmServe, frontend: OpenAiFrontend | None) -> ServerFailedError:
    while True:
        try:
            server.check()
            if frontend is not None:
                frontend.check()
        except ServerFailedError as error:
            return error
        time.sleep(CHECK_S)


def _start_again(server: TritonServer | TrtllmServe, frontend: OpenAiFrontend | None, budget: RestartBudget) -> bool:
    """Restart the ended process, and return whether it serves again; False when no restart is left."""
    while (pause := budget.take()) is not None:
        say(f"Starting it again in {show_seconds(pause)} (restart {budget.used} of {budget.allowed} in a row).")
        time.sleep(pause)
        begun = time.monotonic()
        try:
            if server.poll() is not None:
                server.restart()
            if frontend is not None and frontend.poll() is not None:
                frontend.start()
        except UserError as error:
            complain(str(error))
            continue
        budget.ready()
        say(f"Serving again after {show_seconds(time.monotonic() - begun)}. Requests that were running have failed.")
        return True
    if budget.allowed:
        complain(f"It is not started again: serving.restarts={budget.allowed} is used up.")
    return False


def _say_where(server: TritonServer, seconds: float, prompt: str) -> None:
    say(f"Serving {server.repository.label}, ready after {show_seconds(seconds)}. Ctrl-C drains and ends it.")
    say(f"  HTTP     {server.http_url}")
    say(f"  gRPC     {server.grpc_url}")
    say(f"  metrics  {server.metrics_url}")
    if server.settings.front:
        say(f"  OpenAI   {server.openai_url}")
    say(f"  log      {server.log_file}")
    if TEXT_MODEL in server.repository.models:
        body = json.dumps({"text_input": prompt, "max_tokens": 16})
        say(f"\ncurl -s {server.http_url}/v2/models/{TEXT_MODEL}/generate \\\n  -d {shlex.quote(body)}")
        near = os.path.relpath(sys.executable)
        python = shlex.quote(sys.executable if near.startswith("..") else near)
        text = json.dumps(prompt)
        say(f"\n{TRITON_PYTHON.format(python=python, grpc_url=server.grpc_url, model=TEXT_MODEL, prompt=text)}")
    if server.settings.front:
        _say_completion(server.openai_url, server.repository.label, prompt, asks_key=server.settings.api_key)
    else:
        say()


def _say_completion(url: str, model: str, prompt: str, *, asks_key: bool = False) -> None:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0})
    header = "-H 'Content-Type: application/json'"
    header += f' -H "Authorization: Bearer ${API_KEY}"' if asks_key else ""
    say(f"\ncurl -s {url}/completions \\\n  {header} \\\n  -d {shlex.quote(body)}\n")


def _say_exposure(server: TritonServer) -> None:
    host = server.settings.host
    reach = "every network of this machine" if host == "0.0.0.0" else f"whoever reaches {host}"
    say(f"serving.host={host} opens these to {reach}.")
    say("Clients must send the API key, unencrypted:" if server.settings.api_key else "There is no authentication:")
    exposed = server.settings.expose_triton
    for name, port in server.ports.items():
        if exposed or name == "openai_port":
            say(f"  {port:5}  {OPENED[name]}")
    if exposed:
        say("A single request to tritonserver's own ports can end it.")
        say(f"Closed to all: {CLOSED_TO_STRANGERS.replace(',', ', ')}.")
    if nginx.find() is None:
        say("nginx is not installed: slow clients and bursts of connections are the service's own work.")
    protection = "TLS" if server.settings.api_key else "TLS and authentication"
    say(f"Put a proxy with {protection} in front of it, or keep 127.0.0.1.\n")
