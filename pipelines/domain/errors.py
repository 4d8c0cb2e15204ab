"""Errors a user can act on. Everything else is a crash and keeps its traceback."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Self


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with the user's input or machine.

    Attributes:
        message: what failed and what was given, as one sentence.
        allowed: what would be accepted, or empty.
        todo: the change that makes it work, or empty.
        command: words of a command that helps, or empty; shown last and never wrapped, so that it can be pasted.
    """

    message: str
    allowed: str = ""
    todo: str = ""
    command: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Everything but the command, as one paragraph."""
        return " ".join(part for part in (self.message, self.allowed, self.todo) if part)

    def __str__(self) -> str:
        return f"{self.text} {shlex.join(self.command)}" if self.command else self.text


class UserError(Exception):
    """A fault in the input or the machine; shown without traceback, exit code 2."""

    def __init__(self, message: str, *, allowed: str = "", todo: str = "", command: Sequence[str] = ()) -> None:
        self.faults: tuple[Fault, ...] = (Fault(message, allowed, todo, tuple(command)),)
        super().__init__(str(self.faults[0]))

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> Self:
        """Combine several faults in one error, so that all are reported at once."""
        error = cls(faults[0].message, allowed=faults[0].allowed, todo=faults[0].todo)
        error.faults = tuple(faults)
        error.args = ("\n".join(str(fault) for fault in faults),)
        return error


class ContinuableError(UserError):
    """A fault that came in the midst of work; what was done is kept, and the same command goes on from there."""


@contextmanager
def collecting(faults: list[Fault]) -> Iterator[None]:
    """Append the faults of a UserError to a list and continue, so that all can be reported at once."""
    try:
        yield
    except UserError as error:
        faults.extend(error.faults)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" for the nearest known word, or an empty string."""
    near = get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}'?" if near else ""


_IN_ADDRESS = re.compile(r"""(?<=://)(?:[^/\s'"<>]*|[^/\s:@'"<>]+:(?!\d+/)[^\s@'"<>]*)(?=@)""")
_SECRET = "token|key|password|passwd|pwd|secret|credential|signature|sig|auth"
_IN_QUERY = re.compile(rf"""([?&][\w.-]*(?:{_SECRET})[\w.-]*=)[^&\s'"<>#]+""", re.IGNORECASE)


def masked(text: str) -> str:
    """Hide user names, passwords and tokens in addresses: http://***@host/?token=***."""
    if "://" not in text:
        return text
    return _IN_QUERY.sub(r"\1***", _IN_ADDRESS.sub("***", text))
