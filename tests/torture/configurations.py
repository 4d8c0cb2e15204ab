"""Plan a thousand bad configurations and five hundred good ones: no traceback, no wrong verdict, no long wait."""

import contextlib
import io
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.domain.errors import UserError
from pipelines.host.machine import Machine
from pipelines.host.screen import complain
from pipelines.plan.plan import make_plan
from pipelines.plan.targets import farthest
from pipelines.run.console import plan_text
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.support.configurations import Case, bad, good
from tests.torture.row import Row

BAD, GOOD = 1000, 500
SCREEN_LINES, SCREEN_COLUMNS = 24, 80
P95_S = 1.0
HERE = Machine(8, 2**37, (), "nvidia-smi is not installed", has_tensorrt_llm=False, platform="test")
"""A machine on which nothing is refused for want of memory."""


@dataclass
class Verdict:
    """Result of one configuration: what is wrong with the verdict, and the processor time that it took.

    On a machine with other work, a clock would tell more of that work.
    """

    case: Case
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def judge(case: Case, store: Path) -> Verdict:
    """Plan a configuration, and hold the result against what is known of it."""
    verdict, said = Verdict(case), ""
    begun = time.process_time()
    try:
        settings = load([*case.words, f"paths.store={store}"])
        plan_text(make_plan(settings, settings.plan.target or farthest(settings), Store(store), HERE), case.words)
    except UserError as error:
        said = _on_screen(error)
    except Exception:  # noqa: BLE001 - whatever a user would see as a traceback is a finding
        verdict.faults.append(traceback.format_exc(limit=-4))
        return verdict
    verdict.seconds = time.process_time() - begun
    if bool(said) != bool(case.named):
        verdict.faults.append(f"refused: {said}" if said else "accepted")
    elif said:
        verdict.faults += list(_unclear(case, said))
    return verdict


def _on_screen(error: UserError) -> str:
    """Return what a terminal of 80 columns shows."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), _columns(SCREEN_COLUMNS):
        for fault in error.faults:
            complain(fault.text, command=fault.command)
    return text.getvalue()


@contextlib.contextmanager
def _columns(count: int) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _unclear(case: Case, said: str) -> Iterator[str]:
    """Find what a refusal lacks: a key or a value of which it must speak, or an end."""
    words = " ".join(said.split())
    for key, forms in case.named:
        if key not in words:
            yield f"does not name the key {key}: {words}"
        if not any(form and form in words for form in forms):
            yield f"does not name the value {forms[0]}: {words}"
    if len(said.splitlines()) > SCREEN_LINES:
        yield f"has {len(said.splitlines())} lines: {words}"


def judged(cases: Iterator[Case], until: float) -> list[Verdict]:
    """Judge configurations, as many as there is time for."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            found.append(judge(case, Path(folder) / "store"))
            if time.monotonic() > until:
                break
    return found


def row(what: str, verdicts: list[Verdict]) -> Row:
    """Count the right verdicts, and show a wrong one."""
    wrong = [verdict for verdict in verdicts if verdict.faults]
    note = f"{' '.join(wrong[0].case.words)}: {wrong[0].faults[0]}" if wrong else ""
    return Row(what, len(verdicts), len(verdicts) - len(wrong), max(verdict.seconds for verdict in verdicts), note)


def p95_row(verdicts: list[Verdict]) -> Row:
    """Hold the 95th percentile of the processor time against what is promised."""
    p95 = sorted(verdict.seconds for verdict in verdicts)[int(0.95 * (len(verdicts) - 1))]
    return Row(f"configurations: p95 of the processor time below {P95_S:g} s", 1, int(p95 <= P95_S), p95)


def run(seed: int, seconds: float) -> list[Row]:
    """Judge bad configurations for two thirds of the time at most, then good ones."""
    begun = time.monotonic()
    refused = judged(bad(seed, BAD), begun + 2 / 3 * seconds)
    planned = judged(good(seed, GOOD), begun + seconds)
    return [
        row("bad configurations refused by name", refused),
        row("good configurations planned", planned),
        p95_row([*refused, *planned]),
    ]
