"""Run a server: start it, wait for it, watch it, drain it."""

import contextlib
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from pipelines.domain.progress import Progress, SilentProgress
from pipelines.host.lifetimes import SupervisedProcess
from pipelines.serving import logs
from pipelines.serving.command_lines import Ranks, server_command
from pipelines.serving.config import ServingSettings
from pipelines.serving.locate import backend_directory, locate
from pipelines.serving.logs import (
    CrashWatch,
    LoadWatch,
    PortTakenError,
    StartCrashError,
    read_log,
    why_ended,
    why_not_ready,
    why_not_started,
)
from pipelines.serving.ports import answers_200, choose_ports, get
from pipelines.serving.repository import ModelRepository, read_repository, refuse_elsewhere

ATTEMPTS = 3  # attempts, if a free port is taken before the server binds it, or the server crashes by chance
POLL_S = 0.05
FAILED_GRACE_S = 0.5  # after one model failed, how long to wait for other failures
EXIT_GRACE_S = 10.0  # for unloading models, on top of the drain
IDLE_S = 2.0  # without requests in the engine, for the last answers to leave
RESTARTS_VARIABLE = "TRTLLM_PIPELINES_RESTARTS"  # read by triton_repo/models/preprocessing/model.py
REQUESTS = re.compile(r'^nv_trt_llm_request_metrics\{[^}]*request_type="(?:active|waiting)"[^}]*\} (\S+)', re.M)
_number = itertools.count()


class ServerProcess:
    """A server in a supervised process, and its log."""

    program = "tritonserver"
    """Its name in messages."""
    ended_in_use = "ended while it was in use"

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file.absolute()
        self._process: SupervisedProcess | None = None
        self._log_start = self._checked_from = 0  # bytes of the log

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None while it runs."""
        return self._process.poll() if self._process is not None else None

    def kill(self) -> None:
        """Kill it, even with running requests."""
        if self._process is not None:
            self._process.kill()

    def check(self, what: str = "", wait_s: float = 0) -> None:
        """Raise an error if it has ended, or ends within so many seconds.

        Raises:
            ServerFailedError: with the exit code and the last lines of its log.
        """
        if self._process is not None:
            self._process.wait(wait_s)
            if self._process.poll() is not None:
                lines, ended = read_log(self.log_file, self._checked_from), self._process.describe_exit()
                raise why_ended(lines, ended, self.log_file, what or self.ended_in_use, self.program)

    def log_lines(self) -> list[str]:
        """Read the log of this start so far."""
        return read_log(self.log_file, self._log_start)

    def _launch(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, shm_prefix: str = "") -> None:
        """Start the process, with `env` beside this one's variables."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self._checked_from = self.log_file.stat().st_size if self.log_file.exists() else 0
        self._process = SupervisedProcess(
            command, env={**os.environ, **env}, cwd=cwd, log_file=self.log_file, shm_prefix=shm_prefix
        )

    def _becomes(self, ready: Callable[[], bool], limit_s: float, what: str = "") -> bool:
        """Wait until it is ready; return False after `limit_s`. It is killed unless it becomes ready."""
        until, is_ready = time.monotonic() + limit_s, False
        try:
            while not is_ready and time.monotonic() < until:
                self.check(what, POLL_S)
                is_ready = ready()
        finally:
            if not is_ready:
                self.kill()
        return is_ready


class TritonServer(ServerProcess):
    """A tritonserver that runs as long as the `with` block does.

    Attributes:
        host: address for clients on this machine.
        ports: http_port, grpc_port, metrics_port (and openai_port when a service runs in front).
        log_is_temporary: whether the log is removed if all went well.
        restarts: how often it was started again; models show it as a metric (`RESTARTS_VARIABLE`).
    """

    def __init__(
        self,
        repository: Path,
        settings: ServingSettings,
        *,
        progress: Progress | None = None,
        log_file: Path | None = None,
        usual_ports: bool = False,
    ) -> None:
        """Prepare; nothing is started before the `with` block.

        Args:
            repository: folder of the models.
            settings: address, ports, limits.
            progress: shows loading.
            log_file: path of the log; None means a temporary file, removed if all went well.
            usual_ports: prefer 8000, 8001 and 8002 where the settings leave a port open.
        """
        self.repository: ModelRepository = read_repository(repository)
        self.settings = settings
        self.host = settings.local_host
        self.ports: dict[str, int] = {}
        self.restarts = 0
        self._progress = progress or SilentProgress()
        self._usual_ports = usual_ports
        self.log_is_temporary = log_file is None
        if log_file is None:
            handle, name = tempfile.mkstemp(prefix="tritonserver-", suffix=".log")
            os.close(handle)
            log_file = Path(name)
        super().__init__(log_file)
        self._shm_prefix = ""

    @property
    def http_url(self) -> str:
        """http://127.0.0.1:8000."""
        return f"http://{self.host}:{self.ports['http_port']}"

    @property
    def grpc_url(self) -> str:
        """127.0.0.1:8001, the form tritonclient takes."""
        return f"{self.host}:{self.ports['grpc_port']}"

    @property
    def metrics_url(self) -> str:
        """http://127.0.0.1:8002/metrics."""
        return f"http://{self.host}:{self.ports['metrics_port']}/metrics"

    @property
    def openai_url(self) -> str:
        """http://127.0.0.1:9000/v1, the form OpenAI's clients take as base_url."""
        return f"http://{self.settings.front_host}:{self.ports['openai_port']}/v1"

    @property
    def _running(self) -> SupervisedProcess:
        if self._process is None:
            raise RuntimeError("the server is used outside its with block")
        return self._process

    def __enter__(self) -> Self:
        """Start the server and wait until it is ready.

        Raises:
            UserError: there is no server, a port is in use, or a model does not load (the message says which and why).
        """
        remove_leftovers()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.ports = choose_ports(self.settings, usual=self._usual_ports)
                self._start()
                self._wait_until_ready()
                return self
            except PortTakenError as error:
                self._abort()
                if attempt == ATTEMPTS or getattr(self.settings, error.setting) is not None:
                    raise
            except StartCrashError:
                self._abort()
                if attempt == ATTEMPTS:
                    raise
                self._progress.note("tritonserver crashed while it loaded the models; starting it again")
            except BaseException:
                self._abort()
                raise
        raise AssertionError("unreachable")

    def __exit__(self, *_error: object) -> None:
        """Drain; a second Ctrl-C during it kills at once."""
        failed = self._process is not None and self._process.poll() is not None
        self.stop()
        if self.log_is_temporary and not failed:
            self.log_file.unlink(missing_ok=True)

    def restart(self) -> None:
        """Start a server that has ended again, on the same ports, and wait until it is ready.

        Raises:
            UserError: it cannot be started; nothing is left running, and this may be tried again.
        """
        self._abort()
        self.restarts += 1
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self._abort()
            raise

    def stop(self) -> None:
        """Let running requests finish (drain_timeout_s), then stop the server; harmless if it has ended.

        On SIGTERM, tritonserver unloads the models of gRPC streams at once, so the signal is sent when the engine is
        idle. It then waits for open HTTP connections, which an idle engine does not need.
        """
        if self._process is not None and self._process.poll() is None:
            busy_at = time.monotonic()
            until = busy_at + self.settings.drain_timeout_s

            def has_been_idle() -> bool:
                """Return whether the engine has had no request for `IDLE_S`."""
                nonlocal busy_at
                if self._requests() != 0:
                    busy_at = time.monotonic()
                return time.monotonic() - busy_at >= IDLE_S

            self._process.stop(
                self.settings.drain_timeout_s + EXIT_GRACE_S,
                first=lambda: time.monotonic() < until and (self._requests() or 0) > 0,
                finished=has_been_idle,
            )
        remove_own(self._shm_prefix)

    def _requests(self) -> float | None:
        """Return how many requests the engine has, or None if it does not say."""
        answer = get(self.host, self.ports["metrics_port"], "/metrics")
        numbers = [float(number) for number in REQUESTS.findall(answer[1] if answer else "")]
        return sum(numbers) if numbers else None

    def check(self, what: str = "", wait_s: float = 0) -> None:
        """Raise an error if the server has ended, or crashed without ending, in which case it is killed.

        Raises:
            ServerFailedError: it has ended; with the exit code, the last useful lines and the path of the log.
        """
        super().check(what, wait_s)
        if caught := self._crash_watch.hung():
            self.kill()
            ended = f"it crashed with {caught.name}, hung while it wrote its stack, and was killed"
            raise why_ended(read_log(self.log_file, self._checked_from), ended, self.log_file)

    def _start(self) -> None:
        remove_bytecode(self.repository.path)
        located = locate(self.settings)
        refuse_elsewhere(self.repository, from_wheel=located.wheel is not None)
        self._shm_prefix = own_prefix(next(_number))
        launch = server_command(
            located.binary,
            self.settings,
            self.ports,
            shm_prefix=self._shm_prefix,
            backends=backend_directory(located.wheel) if located.wheel else None,
            ranks=Ranks(self.repository.world_size, self.settings.multi_gpu),
        )
        env = {**located.env, **launch.env, RESTARTS_VARIABLE: str(self.restarts)}
        self._launch(launch.command, env, self.repository.path, self._shm_prefix)

    def _wait_until_ready(self) -> None:
        limit, begin = float(self.settings.startup_timeout_s), time.monotonic()
        count = len(self.repository.models)
        with self._progress.task("loading models", count, "models") as advance:
            watch = LoadWatch(advance, self._progress, limit)
            while (elapsed := time.monotonic() - begin) < limit:
                lines = self.log_lines()
                watch.update(lines, elapsed)
                if self._answers(lines):
                    self._checked_from = self.log_file.stat().st_size
                    self._crash_watch = CrashWatch(self.log_file, self._checked_from)
                    self._running.watch_stubs()
                    remove_bytecode(self.repository.path)
                    return
                code = self._running.wait(POLL_S)
                if code is not None:
                    raise self._startup_failure(code)
                if logs.load_failures(lines) or logs.taken_port(lines):
                    # Otherwise the server first loads the other models, perhaps for minutes, and then unloads them.
                    self._running.wait(FAILED_GRACE_S)
                    raise self._startup_failure(code)
        raise why_not_ready(self.log_lines(), limit, self.log_file)

    def _answers(self, lines: list[str]) -> bool:
        """Return whether our server, not another one on the same port, reports that it is ready.

        The metrics service starts last, and a service whose port is taken ends the server a moment after it reported
        its start; hence the second check.
        """
        started = any(logs.METRICS_STARTED.search(line) for line in lines)
        if not (started and answers_200(self.host, self.ports["http_port"], "/v2/health/ready")):
            return False
        return self._running.wait(POLL_S) is None and logs.taken_port(self.log_lines()) is None

    def _startup_failure(self, code: int | None) -> Exception:
        """Return why the server ended, or must be ended, before it was ready."""
        lines = self.log_lines()
        port = logs.taken_port(lines)
        if port is not None:
            return PortTakenError(next(name for name, number in self.ports.items() if number == port), port)
        why = why_not_started(lines, None if code is None else self._running.describe_exit(), self.log_file)
        by_chance = code is not None and any(map(logs.LOST_RACE.search, lines))
        return StartCrashError.of(why.faults) if by_chance else why

    def _abort(self) -> None:
        if self._process is not None:
            self.kill()
            remove_own(self._shm_prefix)
            remove_bytecode(self.repository.path)


def remove_bytecode(repository: Path) -> None:
    """Remove what Python wrote beside the models while it loaded them; the repository may be an artifact.

    The interpreter inside Triton's python backend is isolated and ignores PYTHONDONTWRITEBYTECODE. Bytecode that was
    there before would be run in place of model.py, whatever bytes it has.
    """
    for folder in repository.glob("*/*/__pycache__"):
        shutil.rmtree(folder, ignore_errors=True)


# Name the Python backend's regions in /dev/shm, and remove those whose owner is dead.
#
# The supervisor removes a region's name once the server and its stub have it open, and all of them when the server
# ends. Only if it is killed while models load is something left: the starter removes it, and if that was killed too,
# the next start does, because the name tells the owner. Names include the PID namespace, since containers may share
# /dev/shm.

SHM = Path("/dev/shm")
NAME = re.compile(r"trtllm_pipelines_(?P<namespace>\d+)_(?P<owner>\d+)_\d+_")


def own_prefix(number: int) -> str:
    """Return the name prefix of the `number`-th server that this process starts."""
    return f"trtllm_pipelines_{_namespace()}_{os.getpid()}_{number}_"


def remove_own(prefix: str, folder: Path = SHM) -> None:
    """Remove the regions of a server of ours that has ended."""
    for region in folder.glob(f"{prefix}*") if prefix else ():
        with contextlib.suppress(OSError):
            region.unlink()


def remove_leftovers(folder: Path = SHM) -> list[str]:
    """Remove regions of dead owners, and return their names."""
    removed = []
    for region in folder.glob("trtllm_pipelines_*"):
        match = NAME.match(region.name)
        if match and int(match["namespace"]) == _namespace() and not _lives(int(match["owner"])):
            with contextlib.suppress(OSError):
                region.unlink()
                removed.append(region.name)
    return removed


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
