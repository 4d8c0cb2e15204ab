"""Why a server is not there, said from its exit code and its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.units import show_seconds
from pipelines.host.kept import describe_exit
from pipelines.serving import logs
from pipelines.serving.loading import loading_now


class ServerFailedError(UserError):
    """The server ended, or never became ready; carries the useful part of its log."""


class PortTakenError(Exception):
    """Somebody bound a port between our look and the server's."""

    def __init__(self, setting: str, port: int) -> None:
        super().__init__(setting)
        self.setting = setting
        self.port = port

    def for_user(self) -> UserError:
        """When there is no other port to try."""
        return UserError(
            f"serving.{self.setting}={self.port} was taken by another program during the start.",
            todo=f"Take any free port: serving.{self.setting}=null",
        )


def why_not_started(lines: Sequence[str], code: int | None, log_file: Path) -> UserError:
    """The models that do not load, or what the server said last.

    Args:
        lines: of its log.
        code: how it ended; None when it still runs, which only a model that failed leads to.
        log_file: where everything stands.
    """
    failures = logs.load_failures(lines)
    if code is not None and not failures:
        return _death(lines, code, log_file, "did not start")
    faults = [Fault(f"{str(failure)[:1].upper()}{str(failure)[1:]}.") for failure in failures]
    faults[-1] = Fault(faults[-1].message, todo=f"Log: {log_file}")
    return ServerFailedError.of(faults)


def why_ended(lines: Sequence[str], code: int, log_file: Path) -> ServerFailedError:
    """A server that was ready and is gone."""
    return _death(lines, code, log_file, "ended while it was in use")


def why_not_ready(lines: Sequence[str], limit_s: float, log_file: Path) -> ServerFailedError:
    """A server that takes longer than it may."""
    waiting = ", ".join(loading_now(lines)) or "none"
    return ServerFailedError(
        f"tritonserver was not ready after {show_seconds(limit_s)}; still loading: {waiting}.",
        todo=f"Give it longer with serving.startup_timeout_s, or see what it does. Log: {log_file}",
    )


def _death(lines: Sequence[str], code: int, log_file: Path, what: str) -> ServerFailedError:
    said = " | ".join(logs.useful_lines(lines))
    said = f" It said: {said}" if said else ""
    return ServerFailedError(f"tritonserver {what}: {describe_exit(code)}.{said}", todo=f"Log: {log_file}")
