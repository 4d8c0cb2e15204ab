"""Errors in OpenAI's format, and the translation of Triton's errors."""

import re
import reprlib
from functools import partial
from typing import Any

ENSEMBLE = re.compile(r"^in ensemble '[^']+', ")
QUEUE_FULL = re.compile(r"exceeds maximum queue size|maximum queue size of", re.IGNORECASE)
TOO_LONG = re.compile(
    r"max_(input_len|seq_len|num_tokens)|maximum (input|sequence) length|prompt length", re.IGNORECASE
)
ENDED = re.compile(r"socket closed|connection reset|broken pipe", re.IGNORECASE)
GONE = re.compile(r"not ready|unknown model|no available|failed to connect", re.IGNORECASE)
FAILED = re.compile(r"engine has failed|engine is stopping|stub process", re.IGNORECASE)
BROKEN = re.compile(r"internal|cuda|out of memory|executor|assert", re.IGNORECASE)
REPEATED = re.compile(r"guided_decoding_guide")
"""Begins a refusal that repeats the client's own words, which tell nothing of the server."""
LONGEST_MESSAGE = 2_000  # a client's own words are repeated in it, so it would be as long as the client likes
SHOWN_VALUE = reprlib.Repr()
SHOWN_VALUE.maxstring = SHOWN_VALUE.maxother = 100
CLIENT_CLOSED = 499
"""Status of a request whose client has left, as nginx has it."""
CLIENT_CODES = ("INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "UNIMPLEMENTED")


class ApiError(Exception):
    """An error response.

    Attributes:
        kind: OpenAI's `type`.
        code: OpenAI's machine-readable `code`, if it has one.
    """

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        message = shortened(message, LONGEST_MESSAGE).encode(errors="replace").decode()
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON that OpenAI's clients read."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def __reduce__(self) -> tuple[Any, ...]:
        # errors of the reading process are pickled
        return partial(ApiError, self.status, self.message, kind=self.kind, param=self.param, code=self.code), ()


def shortened(text: str, length: int = 100) -> str:
    """Return the beginning of a text, with three dots if there is more."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def unsupported(param: str, value: object, instead: str) -> ApiError:
    """Make the error for a parameter that this server does not support."""
    message = f"'{param}' = {SHOWN_VALUE.repr(value)} is not supported here. {instead}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unavailable(message: str) -> ApiError:
    """Make the error for a request that this server cannot answer now."""
    return ApiError(503, message, kind="server_error", code="unavailable")


def from_triton(message: str, grpc_code: str | None) -> ApiError:
    """Translate an error of tritonserver.

    Args:
        message: its text.
        grpc_code: name of its gRPC status ("INVALID_ARGUMENT", ...); None for errors inside a stream, which count as
            the client's fault unless the text says that something broke.
    """
    message = ENSEMBLE.sub("", message)
    if REPEATED.match(message):
        return ApiError(400, message)
    if QUEUE_FULL.search(message):
        return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")
    if TOO_LONG.search(message):
        return ApiError(400, message, code="context_length_exceeded")
    if grpc_code in CLIENT_CODES:
        return ApiError(400, message)
    if ENDED.search(message):
        return unavailable("The inference server ended while it answered this request; send it again.")
    if grpc_code in ("UNAVAILABLE", "NOT_FOUND", "CANCELLED") or GONE.search(message) or FAILED.search(message):
        return unavailable(f"The inference server does not respond: {message}")
    if grpc_code is None and not BROKEN.search(message):
        return ApiError(400, message)
    return ApiError(500, message, kind="server_error")
