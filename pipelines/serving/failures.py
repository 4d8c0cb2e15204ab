"""Explain why a server is not running, from its exit code and its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.units import show_seconds
from pipelines.serving import logs
from pipelines.serving.loading import loading_now


class ServerFailedError(UserError):
    """The server ended or never became ready; carries the useful part of its log."""


class PortTakenError(Exception):
    """Another program bound a port between our check and the server's start."""

    def __init__(self, setting: str, port: int) -> None:
        super().__init__(setting)
        self.setting = setting
        self.port = port

    def for_user(self) -> UserError:
        """Return the error for when there is no other port to try."""
        return UserError(
            f"serving.{self.setting}={self.port} was taken by another program during startup.",
            todo=f"Use any free port: serving.{self.setting}=null",
        )


class StartCrashError(Exception):
    """The server crashed as it started, in a way that another attempt does not meet again."""

    def __init__(self, reason: UserError) -> None:
        super().__init__(str(reason))
        self._reason = reason

    def for_user(self) -> UserError:
        """Return the error for when it happens again and again."""
        return self._reason


def why_not_started(lines: Sequence[str], ended: str | None, log_file: Path) -> UserError:
    """Explain a failed start: the models that did not load, or the server's last messages.

    Args:
        lines: of its log.
        ended: how it ended; None if it is still running, which happens only when a model failed.
        log_file: the complete log.
    """
    failures = logs.load_failures(lines)
    if ended is not None and not failures:
        return _death(lines, ended, log_file, "did not start")
    faults = [Fault(f"{str(failure)[:1].upper()}{str(failure)[1:]}.") for failure in failures]
    faults[-1] = Fault(faults[-1].message, todo=f"Log: {log_file}")
    return ServerFailedError.of(faults)


def why_ended(lines: Sequence[str], ended: str, log_file: Path) -> ServerFailedError:
    """Explain why a server that was ready ended.

    Args:
        lines: of its log, since it was ready: what it wrote before did not end it.
        ended: how it ended.
        log_file: the complete log.
    """
    return _death(lines, ended, log_file, "ended while it was in use")


def why_not_ready(lines: Sequence[str], limit_s: float, log_file: Path) -> ServerFailedError:
    """Explain a start that takes longer than allowed."""
    waiting = ", ".join(loading_now(lines)) or "none"
    return ServerFailedError(
        f"tritonserver was not ready after {show_seconds(limit_s)}; still loading: {waiting}.",
        todo=f"Allow more time with serving.startup_timeout_s, or check the log: {log_file}",
    )


def _death(lines: Sequence[str], ended: str, log_file: Path, what: str) -> ServerFailedError:
    said = " | ".join(logs.useful_lines(lines))
    said = f" It said: {said}" if said else ""
    return ServerFailedError(f"tritonserver {what}: {ended}.{said}", todo=f"Log: {log_file}")
