"""Run one trtllm-serve, TensorRT-LLM's own server of its LLM API: start it, wait for it, stop it."""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import yaml

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.progress import Progress
from pipelines.domain.units import show_seconds
from pipelines.serving.config import ServingSettings
from pipelines.serving.logs import ServerFailedError, finds_port_taken
from pipelines.serving.ports import answers_200, choose_ports, get
from pipelines.serving.process import ServerProcess

PROGRAM = "trtllm-serve"


def why_no_trtllm_serve() -> Fault | None:
    """Return why trtllm-serve cannot be started here, or None if it can; for planning."""
    if shutil.which(PROGRAM):
        return None
    return Fault(
        f"serving.server=trtllm_serve needs {PROGRAM}, which is not on PATH.",
        "It comes with TensorRT-LLM 1.3 and later.",
        "Run the same command in NVIDIA's container (image.base_llm_api), or write scripts for it: make scripts",
    )


class TrtllmServe(ServerProcess):
    """A trtllm-serve that runs as long as the `with` block does."""

    program = PROGRAM

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
        super().__init__(log_file)
        self.settings, self._port = settings, 0
        self._repository, self._checkpoint, self._options = repository.absolute(), checkpoint, options
        self._progress, self._usual_ports = progress, usual_ports

    @property
    def url(self) -> str:
        """http://127.0.0.1:9000/v1, the form OpenAI's clients take as base_url."""
        return f"http://{self.settings.front_host}:{self._port}/v1"

    @property
    def model(self) -> str:
        """The name under which it serves the model."""
        answer = get(self.settings.front_host, self._port, "/v1/models")
        return str(json.loads(answer[1])["data"][0]["id"]) if answer and answer[0] == 200 else self._checkpoint

    def __enter__(self) -> Self:
        """Start it and wait until it is ready; if another program takes a default port first, on another one, once.

        Raises:
            UserError: it is not installed, the port is in use, or it ended, with its last lines.
        """
        if fault := why_no_trtllm_serve():
            raise UserError.of([fault])
        self._port = choose_ports(self.settings, usual=self._usual_ports)["openai_port"]
        try:
            self.restart()
        except ServerFailedError:
            if self.settings.openai_port is not None or not finds_port_taken(self.log_lines()):
                raise
            self._port = choose_ports(self.settings, usual=False)["openai_port"]
            self.restart()
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop it; a second Ctrl-C during it kills at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.stop(self.settings.drain_timeout_s)

    def restart(self) -> None:
        """Start it, also after it has ended, on the same port, and wait until it is ready.

        Raises:
            UserError: it cannot be started; nothing is left running.
        """
        options = self.log_file.with_suffix(".yaml")
        options.parent.mkdir(parents=True, exist_ok=True)
        options.write_text(yaml.safe_dump(dict(self._options), sort_keys=False), encoding="utf-8")
        command = [PROGRAM, self._checkpoint, "--host", self.settings.host, "--port", str(self._port)]
        command += ["--extra_llm_api_options", str(options)]
        self._launch(command, {"TRTLLM_NO_USAGE_STATS": "1"}, self._repository)
        limit = float(self.settings.startup_timeout_s)
        with self._progress.task(f"waiting for {PROGRAM}", None):
            answers = partial(answers_200, self.settings.front_host, self._port, "/health")
            ready = self._becomes(answers, limit, "did not start")
        if not ready:
            raise ServerFailedError(
                f"{PROGRAM} was not ready after {show_seconds(limit)}.",
                todo=f"Allow more time with serving.startup_timeout_s, or check the log: {self.log_file}",
            )
