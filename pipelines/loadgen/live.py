"""Live view of a running level: an updating line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Protocol

from pipelines.document.show import count
from pipelines.loadgen.request_stream import ERRORS, ITL_N, ITL_US, OK, SENT, TTFT_N, TTFT_US, SharedCounters

_EVERY_S = 5.0
_RATE_OVER_S = 2.0


class View(Protocol):
    """Shows the progress of a level."""

    def __enter__(self) -> View:
        """Start showing."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""
        ...

    def show(self, state: State) -> None:
        """Show a state; called several times a second."""
        ...


@dataclass(frozen=True, slots=True)
class State:
    """Progress of a level.

    Attributes:
        title: the load, e.g. "concurrency 16".
        phase: "warm-up", "measuring" or "finishing".
        rate: finished requests per second, over the last seconds.
        in_flight: requests sent but not finished.
        ttft_s: mean so far, None without streaming.
        itl_s: mean so far.
        errors: so far.
        left_s: seconds to the end of the window, None if unknown.
    """

    title: str
    phase: str
    rate: float
    in_flight: int
    ttft_s: float | None
    itl_s: float | None
    errors: int
    left_s: float | None

    def line(self) -> str:
        """Render the state in at most 77 columns."""
        parts = [] if self.phase == "measuring" else [self.phase]
        parts += [f"{_short(self.rate)} req/s", f"{self.in_flight} in flight"]
        if self.ttft_s is not None:
            parts.append(f"TTFT {_short(self.ttft_s * 1e3)} ms")
        if self.itl_s is not None:
            parts.append(f"ITL {_short(self.itl_s * 1e3)} ms")
        if self.errors:
            parts.append(count(self.errors, "error"))
        if self.left_s is not None:
            parts.append(f"{self.left_s:.0f} s left")
        return "  ".join(parts)[:77]


class Meter:
    """Computes states from the shared counters."""

    def __init__(self, board: SharedCounters, title: str) -> None:
        self._board, self._title = board, title
        self._past: list[tuple[float, int]] = [(monotonic(), 0)]

    def state(self, phase: str, left_s: float | None) -> State:
        """Read the counters now."""
        total = self._board.total
        at, ok = monotonic(), total(OK)
        self._past.append((at, ok))
        while len(self._past) > 2 and self._past[1][0] < at - _RATE_OVER_S:
            self._past.pop(0)
        since, ok_then = self._past[0]
        seconds = max(at - since, 1e-9)
        errors = total(ERRORS)
        return State(
            title=self._title,
            phase=phase,
            rate=(ok - ok_then) / seconds,
            in_flight=max(total(SENT) - ok - errors, 0),
            ttft_s=_mean(total(TTFT_US), total(TTFT_N)),
            itl_s=_mean(total(ITL_US), total(ITL_N)),
            errors=errors,
            left_s=left_s,
        )


class PlainView:
    """Lines on standard error, for logs."""

    def __init__(self, write: Callable[[str], Any] = sys.stderr.write) -> None:
        self._write, self._next, self._title = write, monotonic() + _EVERY_S, ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, state: State) -> None:
        """See `View.show`."""
        if monotonic() >= self._next:
            self._next = monotonic() + _EVERY_S
            if state.title != self._title:
                self._title = state.title
                self._write(f"  {state.title}\n")
            self._write(f"  {state.line()}\n")


class TerminalView:
    """Two lines that change in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live("", console=Console(stderr=True), transient=True, auto_refresh=False)

    def __enter__(self) -> TerminalView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, state: State) -> None:
        """See `View.show`."""
        from rich.text import Text

        self._live.update(Text(f"  {state.title}\n  {state.line()}"), refresh=True)


def default_view() -> View:
    """Choose the view that suits standard error."""
    return TerminalView() if sys.stderr.isatty() else PlainView()


def _mean(total_us: int, count: int) -> float | None:
    return total_us / count / 1e6 if count else None


def _short(value: float) -> str:
    """Format with three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
