"""SIGKILL to random subsets of a server's processes: what is left ends by itself, and says truly why.

The server is a real tritonserver with an OpenAI service in front of it and two models; the process of one of them
hangs when it is asked to end. `serving.restarts` is 0, so that what is left has to end rather than to start again.
"""

import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import ROOT
from tests.contract.serving.echo_repository import write_served_echo, write_stubborn
from tests.support.eventually import lives
from tests.torture.row import Row

LIMIT_S = 2.0
SHM = Path("/dev/shm")
HELPER = "helper"
PROGRAM = """
import sys
from pathlib import Path
from pipelines.domain.progress import SilentProgress
from pipelines.serving.foreground import serve
from pipelines.serving.config import ServingSettings
settings = ServingSettings(openai=True, restarts=0, drain_timeout_s=5)
sys.exit(serve(Path(sys.argv[1]), settings, SilentProgress(), log_file=Path(sys.argv[2])))
"""


@dataclass(frozen=True)
class Kill:
    """One subset, killed.

    Attributes:
        gone_s: seconds until no process and no shared memory was left.
        true: whether what `serve` printed names one of them; None if it was killed itself.
        whom: the processes killed, and what was printed.
    """

    gone_s: float
    true: bool | None
    whom: str


def run(seed: int, seconds: float) -> list[Row]:
    """Kill subsets until `seconds` are over, at least until `make serve` itself was left alive once."""
    rng, until = random.Random(seed), time.monotonic() + seconds
    kills: list[Kill] = []
    longest = 0.0
    with tempfile.TemporaryDirectory(prefix="torture-kills-") as folder:
        repository = write_stubborn(write_served_echo(Path(folder, "repository")))
        while all(kill.true is None for kill in kills) or time.monotonic() + longest < until:
            begun = time.monotonic()
            kills.append(_kill_some(repository, Path(folder, f"{len(kills)}.log"), rng))
            longest = max(longest, time.monotonic() - begun)
    told = [kill for kill in kills if kill.true is not None]
    late = [kill.whom for kill in kills if kill.gone_s > LIMIT_S]
    untrue = [kill.whom for kill in told if not kill.true]
    worst = max(kill.gone_s for kill in kills)
    return [
        Row(
            "SIGKILL to a random subset of a server's processes: the rest and its shared memory are gone within 2 s",
            len(kills), len(kills) - len(late), worst, "; ".join(late),
        ),
        Row(
            "the same, where `make serve` itself was not killed: the reason it prints is the real one",
            len(told), len(told) - len(untrue), 0.0, "; ".join(untrue),
        ),
    ]  # fmt: skip


def _kill_some(repository: Path, log: Path, rng: random.Random) -> Kill:
    """Start a server, kill a random subset of its processes, and see what becomes of the rest."""
    command = [sys.executable, "-u", "-c", PROGRAM, str(repository), str(log)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as serve:
        main = psutil.Process(serve.pid)
        everyone = [main]
        try:
            _wait_until_ready(serve)
            everyone += main.children(recursive=True)
            names = {process: "serve" if process == main else _name(process) for process in everyone}
            helpers = [process for process in everyone if names[process] == HELPER]  # replaced when they die alone
            needed = [process for process in everyone if names[process] != HELPER]
            chosen = rng.sample(needed, rng.randint(1, len(needed)))
            chosen += rng.sample(helpers, rng.randint(0, len(helpers)))
            rng.shuffle(chosen)
            for process in chosen:
                with suppress(psutil.NoSuchProcess):
                    process.kill()  # psutil makes sure that the number is still this process's
                time.sleep(rng.choice([0, 0, rng.uniform(0, 0.3)]))
            gone_s = _seconds_until_gone(everyone)
        finally:
            _end(everyone)
        said = serve.stdout.read() if serve.stdout else ""
    killed = sorted(names[process] for process in chosen)
    true = None if main in chosen else any(_blames(said, name) for name in killed)
    return Kill(gone_s, true, f"{', '.join(killed)}: {' '.join(said.split())[-300:]}")


def _wait_until_ready(serve: subprocess.Popen[str]) -> None:
    assert serve.stdout is not None
    for line in serve.stdout:
        if "/v1/completions" in line:
            return
    raise RuntimeError("the server did not start")


def _name(process: psutil.Process) -> str:
    """Return "supervisor PID", "tritonserver", "openai", "model M", or what the OpenAI service starts as a helper."""
    words = process.cmdline()
    if any(word.endswith("supervisor.py") for word in words):
        return f"supervisor {process.pid}"
    if "pipelines.serving.openai" in words:
        return "openai"
    if "stub" in process.name():
        return f"model {next(Path(word).parts[-3] for word in words if word.endswith('/model.py'))}"
    return "tritonserver" if process.name() == "tritonserver" else HELPER


def _blames(said: str, name: str) -> bool:
    """Return whether the reason printed is that this process was killed."""
    said = " ".join(said.split())
    kind, _, which = name.partition(" ")
    return {
        HELPER: False,
        "supervisor": f"its supervisor (process {which}) was killed by SIGKILL" in said,
        "tritonserver": "tritonserver ended while it was in use: killed by SIGKILL (by hand" in said,
        "openai": "The OpenAI service on port" in said and "ended: killed by SIGKILL (by hand" in said,
        "model": f"its process for model '{which}': killed by SIGKILL (by hand" in said,
    }[kind]


def _seconds_until_gone(processes: list[psutil.Process]) -> float:
    """Return when no process and no region was left, or ten times the limit."""
    begun = time.monotonic()
    while time.monotonic() - begun < 10 * LIMIT_S:
        if not any(lives(process) for process in processes) and not _regions(processes[0].pid):
            break
        time.sleep(0.01)
    return time.monotonic() - begun


def _regions(owner: int) -> list[Path]:
    return list(SHM.glob(f"trtllm_pipelines_*_{owner}_*"))


def _end(processes: list[psutil.Process]) -> None:
    """End what the product left: nothing outlives the campaign."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for region in _regions(processes[0].pid):
        region.unlink(missing_ok=True)
