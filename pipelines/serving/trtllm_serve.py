"""Run one trtllm-serve, TensorRT-LLM's own server of its LLM API: start it, wait for it, stop it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.progress import Progress
from pipelines.domain.units import show_seconds
from pipelines.host.lifetimes import SupervisedProcess
from pipelines.serving.config import ServingSettings
from pipelines.serving.logs import ServerFailedError, read_log, why_ended
from pipelines.serving.ports import answers_200, choose_ports, get

PROGRAM = "trtllm-serve"
POLL_S = 0.2


def why_no_trtllm_serve() -> Fault | None:
    """Return why trtllm-serve cannot be started here, or None if it can; for planning."""
    if shutil.which(PROGRAM):
        return None
    return Fault(
        f"serving.server=trtllm_serve needs {PROGRAM}, which is not on PATH.",
        "It comes with TensorRT-LLM 1.3 and later.",
        "Run the same command in NVIDIA's container (image.base_llm_api), or write scripts for it: make scripts",
    )


class TrtllmServe:
    """A trtllm-serve that runs as long as the `with` block does."""

    def __init__(
        self,
        repository: Path,
        checkpoint: str,
        options: Mapping[str, Any],
        settings: ServingSettings,
        *,
        progress: Progress,
        log_file: Path,
        usual_ports: bool = False,
    ) -> None:
        """Prepare; nothing is started before the `with` block. Paths of the options start in `repository`."""
        self.settings, self.log_file = settings, log_file.absolute()
        self._repository, self._checkpoint, self._options = repository.absolute(), checkpoint, options
        self._progress, self._usual_ports = progress, usual_ports
        self._process: SupervisedProcess | None = None
        self._port = self._log_start = 0

    @property
    def url(self) -> str:
        """http://127.0.0.1:9000/v1, the form OpenAI's clients take as base_url."""
        return f"http://{self.settings.front_host}:{self._port}/v1"

    @property
    def model(self) -> str:
        """The name under which it serves the model."""
        answer = get(self.settings.front_host, self._port, "/v1/models")
        return str(json.loads(answer[1])["data"][0]["id"]) if answer and answer[0] == 200 else self._checkpoint

    def __enter__(self) -> TrtllmServe:
        """Start it and wait until it is ready.

        Raises:
            UserError: it is not installed, the port is in use, or it ended, with its last lines.
        """
        if fault := why_no_trtllm_serve():
            raise UserError.of([fault])
        self._port = choose_ports(self.settings, usual=self._usual_ports)["openai_port"]
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it; a second Ctrl-C during it kills at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.stop(self.settings.drain_timeout_s)

    def restart(self) -> None:
        """Start it, also after it has ended, on the same port, and wait until it is ready.

        Raises:
            UserError: it cannot be started; nothing is left running.
        """
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        options = self.log_file.with_suffix(".yaml")
        options.write_text(yaml.safe_dump(dict(self._options), sort_keys=False), encoding="utf-8")
        command = [PROGRAM, self._checkpoint, "--host", self.settings.host, "--port", str(self._port)]
        self._process = SupervisedProcess(
            [*command, "--extra_llm_api_options", str(options)],
            env={**os.environ, "TRTLLM_NO_USAGE_STATS": "1"},
            cwd=self._repository,
            log_file=self.log_file,
        )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self._process.kill()
            raise

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None while it runs."""
        return self._process.poll() if self._process is not None else None

    def check(self, what: str = "ended while it was in use", wait_s: float = 0) -> None:
        """Raise an error if it has ended, or ends within so many seconds.

        Raises:
            ServerFailedError: with the exit code and the last lines of its log.
        """
        if self._process is not None and self._process.wait(wait_s) is not None:
            lines = read_log(self.log_file, self._log_start)
            raise why_ended(lines, self._process.describe_exit(), self.log_file, what, program=PROGRAM)

    def _wait_until_ready(self, process: SupervisedProcess) -> None:
        limit, begun = float(self.settings.startup_timeout_s), time.monotonic()
        with self._progress.task(f"waiting for {PROGRAM}", None):
            while time.monotonic() - begun < limit:
                if process.wait(POLL_S) is not None:
                    self.check("did not start")
                if answers_200(self.settings.front_host, self._port, "/health"):
                    return
        raise ServerFailedError(
            f"{PROGRAM} was not ready after {show_seconds(limit)}.",
            todo=f"Allow more time with serving.startup_timeout_s, or check the log: {self.log_file}",
        )
