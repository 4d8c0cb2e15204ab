"""Run our OpenAI-compatible service as a process beside tritonserver."""

import os
import sys
from typing import Self

from pipelines.domain.benchmark import NO_SLO, Slo
from pipelines.serving.command_lines import front_command
from pipelines.serving.logs import FRONT_STARTED, ServerFailedError, finds_port_taken
from pipelines.serving.ports import answers_200, free_port
from pipelines.serving.process import ServerProcess, TritonServer
from pipelines.settings.paths import PROJECT_ROOT

START_TIMEOUT_S = 60  # includes imports, on a busy machine


class OpenAiFrontend(ServerProcess):
    """Runs as long as the `with` block does; needs a started server with an openai_port."""

    ended_in_use = "ended"

    def __init__(self, server: TritonServer, slo: Slo = NO_SLO) -> None:
        """Take the server, and limits that the metrics show exactly how many answers meet."""
        super().__init__(server.log_file.with_suffix(".openai.log"))
        self._server, self._slo = server, slo
        self._settings = server.settings
        self._host = server.settings.front_host
        self._was_ready = False

    def __enter__(self) -> Self:
        """Start; see `start`."""
        self.start()
        return self

    @property
    def _port(self) -> int:
        return self._server.ports["openai_port"]

    def start(self) -> None:
        """Start it, or start it again after it ended, and wait until it responds.

        A default port was free before the models were loaded; if another program has it now, another one
        is taken, once.

        Raises:
            ServerFailedError: it ended instead, or took too long.
        """
        try:
            self._start()
        except ServerFailedError:
            open_choice = self._settings.openai_port is None and not self._was_ready
            if not open_choice or not finds_port_taken(self.log_lines()):
                raise
            self._server.ports["openai_port"] = free_port(self._host, self._server.ports)
            self._start()
        self._was_ready = True

    def _start(self) -> None:
        search = os.pathsep.join(part for part in (str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")) if part)
        self.program = f"The OpenAI service on port {self._port}"
        repository = self._server.repository.path
        command = front_command(sys.executable, self._settings, self._server.ports, repository, self._slo)
        self._launch(command, {"PYTHONPATH": search}, repository)
        if not self._becomes(self._answers, START_TIMEOUT_S):
            raise ServerFailedError(
                f"The OpenAI service was not ready after {START_TIMEOUT_S} s.", todo=f"Log: {self.log_file}"
            )

    def _answers(self) -> bool:
        return FRONT_STARTED in self.log_lines() and answers_200(self._host, self._port, "/health")

    def __exit__(self, *_error: object) -> None:
        """Let running responses finish, then stop it."""
        if self._process is not None:
            failed = self._process.poll() is not None
            self._process.stop(self._settings.drain_timeout_s + 1)
            if not failed and self._server.log_is_temporary:
                self.log_file.unlink(missing_ok=True)
