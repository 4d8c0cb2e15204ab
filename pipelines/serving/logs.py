"""Parse tritonserver's log: which model loads, which failed and why, which port was taken."""

import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.progress import Advance, Progress
from pipelines.domain.units import show_seconds

LOADED = re.compile(r"successfully loaded '(?P<model>[^']+)'")
LOADING = re.compile(r'"loading: (?P<model>[^":]+):')
FAILED = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<text>.*?)\"?$")
BAD_CONFIG = re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<text>.*?)\"?$")
# The server waits forever for a stub that ended this way.
NO_STUB = re.compile(r"Failed to preinitialize Python stub: (?P<text>.*?)\"?$")
MODEL_FILE = re.compile(r"/(?P<model>[^/]+)/\d+/model\.py")
BAD_TEXT = re.compile(r"Error parsing text-format .*?: (?P<text>\d+:\d+: .*)")
PORT_TAKEN = re.compile(
    r"failed to start (?P<service>\w+) service: .*Socket '[^']*?:(?P<port>\d+)' already in use", re.IGNORECASE
)
METRICS_STARTED = re.compile(r"Started Metrics Service at")
FRONT_STARTED = "The OpenAI service has its port."
"""Line of our own service, without which whoever answers on its port may be another program."""
EXCEPTION = re.compile(
    r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (?P<text>.*)", re.DOTALL
)
PLACE = re.compile(r"^\s*(?P<file>\S+)\((?P<line>\d+)\): \w+", re.MULTILINE)
STATUS = re.compile(r"^(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown): ")
# Our own errors and Triton's are complete in their text; for others the class name matters too.
SELF_EXPLAINING = ("UserError", "TritonModelException")
# What a healthy server prints, tritonserver on a machine without GPU too; none of it is an error.
HARMLESS = re.compile(
    r"NVML|DCGM|[Pp]inned|CUDA memory pool|CudaDriverHelper|Non-graceful termination|failed to load all models"
    rf"|Timeout \d+: Found|^[+|]|^{re.escape(FRONT_STARTED)}$"
)
LEVEL = re.compile(r"[IWE]\d{4} ")
# Last words of a crash without an exception: C++, assert(), glibc's heap and stack checks, Python, OpenVINO.
CRASH = re.compile(
    r"^terminate called|[Aa]ssertion .*failed|^(?:malloc|free|realloc|corrupted|double free|munmap_chunk|mremap_chunk)"
    r"[^.]*$|stack smashing detected|^Fatal Python error|^(?:\w+\.)*MemoryError|std::bad_alloc|Exception from src/"
    r"|^Check '.*' failed"
)
# tritonserver 2.51 loses a race with the stubs of its python models now and then, on busy machines.
LOST_RACE = re.compile(r"boost::interprocess::lock_exception")
# The server's own handler prints the signal, which the exit code has too, and a stack.
STACK = re.compile(r"^\s*Signal \(\d+\) received|^\s*\d+# ")
ERROR_LINE = re.compile(r"^(?:E\d{4} [\d:.]+\s+\d+ [\w.]+:\d+\]|error:)\s*(?P<text>.*)")


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """One model that did not load.

    Attributes:
        reason: the innermost message.
        place: where it was raised, e.g. "model.py:6", or empty.
    """

    model: str
    reason: str
    place: str = ""

    def __str__(self) -> str:
        return f"model '{self.model}' does not load: {self.reason}" + (f" ({self.place})" if self.place else "")


def read_log(file: Path, start: int) -> list[str]:
    """Read the lines of a log from a byte on."""
    with file.open("rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace").splitlines()


def load_failures(lines: Iterable[str]) -> list[LoadFailure]:
    """List each model that failed, without models that only depend on one of them."""
    failures: dict[str, LoadFailure] = {}
    detail = ""
    for line in lines:
        if match := BAD_TEXT.search(line):  # logged one line before the model it belongs to
            detail = f": {match['text']}"
        elif match := FAILED.search(line) or BAD_CONFIG.search(line):
            model = match["model"].rstrip("/").rpartition("/")[2]
            failures.setdefault(model, _failure(model, match["text"] + detail))
            detail = ""
        elif match := NO_STUB.search(line):
            file = MODEL_FILE.search(match["text"])
            model = file["model"] if file else "?"
            failures.setdefault(model, LoadFailure(model, match["text"]))
    first = [failure for failure in failures.values() if "depends on" not in failure.reason]
    return first or list(failures.values())


def _failure(model: str, logged: str) -> LoadFailure:
    """Strip status, traceback and exception class from a logged text."""
    text = STATUS.sub("", logged.replace("\\n", "\n").replace('\\"', '"'))
    message, _, trace = text.partition("\n\nAt:\n")
    places = PLACE.findall(trace)
    match = EXCEPTION.match(message.strip())
    if match:
        kind = match["kind"].rpartition(".")[2]
        message = match["text"] if kind in SELF_EXPLAINING else f"{kind}: {match['text']}"
    reason = " ".join(message.split()).rstrip(".") or "no reason given"
    return LoadFailure(model, reason, f"{places[0][0].rpartition('/')[2]}:{places[0][1]}" if places else "")


def taken_port(lines: Iterable[str]) -> int | None:
    """Return the port that another program took between our check and the server's start, or None."""
    return next((int(match["port"]) for line in lines if (match := PORT_TAKEN.search(line))), None)


def finds_port_taken(lines: Iterable[str]) -> bool:
    """Return whether a server of Python's ended because another program took its port."""
    return any("address already in use" in line.lower() for line in lines)


def useful_lines(lines: Iterable[str], count: int = 3) -> list[str]:
    """Return the best explanation of an exit: the crash message, else the last errors, else lines without a level.

    A crash is what a process writes as it dies. The server's own errors are often older than the crash, or follow from
    it.
    """
    useful = [line.rstrip() for line in lines if line.strip() and not HARMLESS.search(line)]
    crash = _last_crash(useful)
    useful = [line for line in useful if not STACK.match(line)]
    errors = [match["text"].strip('"') for line in useful if (match := ERROR_LINE.match(line))]
    return crash[:count] or (errors or [line for line in useful if not LEVEL.match(line)])[-count:]


def _last_crash(lines: list[str]) -> list[str]:
    """Return the last crash, from the line that names it to the next line of a log or of a stack."""
    crash: list[str] = []
    inside = False
    for line in lines:
        if LEVEL.match(line) or STACK.match(line):
            inside = False
        elif inside:
            crash.append(line.strip())
        elif CRASH.search(line):
            crash, inside = [line.strip()], True
    return crash


# Notice a server that caught a fatal signal and did not end.

GRACE_S = 20.0
"""For a stack and a core dump. tritonserver's handler collects its stack with functions that take locks: a crash while
the crashing thread holds one of them never ends, and the other threads go on answering health checks."""
CAUGHT = re.compile(rb"^Signal \((?P<number>\d+)\) received", re.MULTILINE)
_LONGEST = len(b"\nSignal (11) received")


class CrashWatch:
    """Reads on in a server's log for the first words of its crash handler."""

    def __init__(self, log_file: Path, start: int) -> None:
        """Begin after `start` bytes, which were written before this server was ready."""
        self._caught: signal.Signals | None = None
        self._log_file = log_file
        self._read = start
        self._since = 0.0

    def hung(self) -> signal.Signals | None:
        """Return the signal that was caught more than `GRACE_S` ago; None if there was none."""
        if self._caught is None:
            with self._log_file.open("rb") as log:
                log.seek(max(self._read - _LONGEST, 0))  # the words may have arrived in two parts
                text = log.read()
                self._read = log.tell()
            if match := CAUGHT.search(text):
                self._caught = signal.Signals(int(match["number"]))
                self._since = time.monotonic()
        return self._caught if time.monotonic() - self._since >= GRACE_S else None


# Show the progress of loading models while a server starts.

STILL_LOADING_S = 15.0  # interval at which a silent wait reports that it continues


@dataclass(slots=True)
class LoadWatch:
    """Turns a growing log into progress."""

    advance: Advance
    progress: Progress
    limit_s: float
    _loaded: int = 0
    _told_s: float = 0.0

    def update(self, lines: Sequence[str], elapsed_s: float) -> None:
        """Update from the log as it is `elapsed_s` after the start."""
        loaded = {match["model"] for line in lines if (match := LOADED.search(line))}
        if len(loaded) > self._loaded:
            self.advance(len(loaded) - self._loaded)
            self._loaded, self._told_s = len(loaded), elapsed_s
        elif elapsed_s - self._told_s >= STILL_LOADING_S:
            self._told_s = elapsed_s
            waiting = ", ".join(loading_now(lines)) or "the server"
            self.progress.note(f"{waiting}: {show_seconds(elapsed_s)} of at most {show_seconds(self.limit_s)}")


def loading_now(lines: Sequence[str]) -> list[str]:
    """List the models that have begun loading and not finished."""
    begun = dict.fromkeys(match["model"] for line in lines if (match := LOADING.search(line)))
    ended = {match["model"] for line in lines if (match := LOADED.search(line))}
    return [model for model in begun if model not in ended]


# Explain why a server is not running, from its exit code and its log.


class ServerFailedError(UserError):
    """The server ended or never became ready; carries the useful part of its log."""


class PortTakenError(UserError):
    """Another program bound a port between our check and the server's start."""

    def __init__(self, setting: str, port: int) -> None:
        super().__init__(
            f"serving.{setting}={port} was taken by another program during startup.",
            todo=f"Use any free port: serving.{setting}=null",
        )
        self.setting = setting


class StartCrashError(ServerFailedError):
    """The server crashed as it started, in a way that another attempt does not meet again."""


def why_not_started(lines: Sequence[str], ended: str | None, log_file: Path) -> ServerFailedError:
    """Explain a failed start: the models that did not load, or the server's last messages.

    Args:
        lines: of its log.
        ended: how it ended; None if it is still running, which happens only when a model failed.
        log_file: the complete log.
    """
    failures = load_failures(lines)
    if ended is not None and not failures:
        return why_ended(lines, ended, log_file, "did not start")
    faults = [Fault(f"{str(failure)[:1].upper()}{str(failure)[1:]}.") for failure in failures]
    faults[-1] = Fault(faults[-1].message, todo=f"Log: {log_file}")
    return ServerFailedError.of(faults)


def why_ended(
    lines: Sequence[str],
    ended: str,
    log_file: Path,
    what: str = "ended while it was in use",
    program: str = "tritonserver",
) -> ServerFailedError:
    """Explain why a server ended.

    Args:
        lines: of its log; if it was ready, only those since then.
        ended: how it ended.
        log_file: the complete log.
        what: what happened to it.
        program: the server.
    """
    last = " | ".join(useful_lines(lines))
    last = f" It said: {last}" if last else ""
    return ServerFailedError(f"{program} {what}: {ended}.{last}", todo=f"Log: {log_file}")


def why_not_ready(lines: Sequence[str], limit_s: float, log_file: Path) -> ServerFailedError:
    """Explain a start that takes longer than allowed."""
    waiting = ", ".join(loading_now(lines)) or "none"
    return ServerFailedError(
        f"tritonserver was not ready after {show_seconds(limit_s)}; still loading: {waiting}.",
        todo=f"Allow more time with serving.startup_timeout_s, or check the log: {log_file}",
    )
