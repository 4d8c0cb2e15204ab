"""Bounds on what one client can make the service do."""

from __future__ import annotations

from dataclasses import dataclass

REFUSAL_PAUSE_S = 0.03
"""A refusal waits so long, so that whoever sends bad requests in a loop leaves most of the time to the others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may be.

    Attributes:
        body_bytes: size of its body.
        prompts: answers it may ask for: prompts times n.
        request_timeout_s: time from its arrival to its last token.
    """

    body_bytes: int = 4_000_000
    prompts: int = 128
    request_timeout_s: float = 600
