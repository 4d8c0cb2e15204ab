"""The command `simulate`: compose the settings, simulate, print and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipelines.domain.errors import Fault, UserError, collecting
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.machine import Machine, gather
from pipelines.host.screen import say, wrapped
from pipelines.loadgen.config import OPEN_RATE, load_faults
from pipelines.loadgen.trace import read_trace
from pipelines.predict.performance.placement import Judge
from pipelines.predict.simulate.case import SimulationCase, asked, faults_of, in_ticks, make_case, outcome_table
from pipelines.predict.simulate.files import write_all
from pipelines.predict.simulate.loads import SimulatedLevel, make_levels, run_all
from pipelines.settings.compose import load
from pipelines.settings.root import Settings, as_yaml
from pipelines.store.run_folder import run_folder

CLASSIC, REQUESTS = "workload=classic", "benchmark.num_requests=100"
"""Simulated when nothing is specified: the short answers of the classic drawing."""
RATE = "benchmark.request_rate=0.22"
"""Between what 4 slots serve with static batching (178 requests per 1,000 ticks) and with in-flight batching (267):
with one the queue grows, with the other it comes and goes."""


_SEARCH = Fault(
    "benchmark.search=max_load only works with `make benchmark`.",
    todo="Leave it out; `make size` finds the largest load of a modelled deployment.",
)


def simulate(overrides: Sequence[str], judge_of: Callable[[Settings, Machine], Judge]) -> int:
    """Simulate the policies under the loads, print the table, write files and pictures into a run folder.

    `judge_of` makes the rules of a plan from settings.
    """
    words, settings = with_defaults(overrides)
    check_folders({"paths.runs": settings.paths.runs})
    case, levels = _judged(settings, judge_of)
    with run_folder("simulate", settings.paths.runs, as_yaml(settings), words) as folder:
        say(wrapped(f"time: {'seconds' if case.unit == 's' else case.unit} ({case.reason})"))
        traced = () if settings.workload.trace is None else read_trace(settings.workload).notes
        for note in (*case.notes, *traced):
            say(wrapped(note))
        results = run_all(settings, case, levels)
        say(wrapped(asked(settings, case, _load(levels))) + "\n")
        say(outcome_table([each.outcome for each in results], case.unit) + "\n")
        for name, path in write_all(folder, settings, case, results):
            say(f"{name + ':':<9} {relative_to_cwd(path)}")
    return 0


def with_defaults(overrides: Sequence[str]) -> tuple[list[str], Settings]:
    """Return the overrides, preceded by the defaults for a run in ticks, and the resulting settings.

    In ticks, answers are as short as in the classic drawing unless a workload is chosen, and requests arrive at random
    unless a load is given.
    """
    settings = load(overrides)
    words = [*_beginning(settings, overrides), *overrides]
    return words, load(words) if len(words) > len(overrides) else settings


def _beginning(settings: Settings, overrides: Sequence[str]) -> list[str]:
    given = [text.lstrip("+") for text in overrides]
    if not in_ticks(settings) or settings.workload.name != "fixed" or any(w.startswith("workload=") for w in given):
        return []
    set_here = {text.partition("=")[0] for text in given}
    arrival = "closed" if "benchmark.concurrency" in set_here else "poisson"
    words = [CLASSIC, f"workload.arrival={arrival}"]
    arrival = settings.workload.arrival if "workload.arrival" in set_here else arrival
    if arrival in OPEN_RATE and "benchmark.request_rate" not in set_here:
        words += [RATE, REQUESTS]
    return [*words, REQUESTS] if arrival == "burst" else words


def _load(levels: Sequence[SimulatedLevel]) -> str | None:
    """Return the concurrency or rate if there is only one."""
    (load, *others) = (level.label for level in levels)
    one = not others and (load.concurrency is not None or load.request_rate is not None)
    return load.text if one else None


def _judged(
    settings: Settings, judge_of: Callable[[Settings, Machine], Judge]
) -> tuple[SimulationCase, list[SimulatedLevel]]:
    """Return the case and its loads, or raise one error with everything that is wrong."""
    faults: list[Fault] = [*load_faults(settings.workload, settings.benchmark), *faults_of(settings)]
    if settings.benchmark.search != "none":
        faults.append(_SEARCH)
    case = None
    with collecting(faults):
        machine = gather()
        case = make_case(settings, machine, judge_of(settings, machine))
    if faults or case is None:
        raise UserError.of(faults)
    levels = make_levels(settings, case)
    faults = [fault for level in levels for fault in level.faults(case.engines[0])]
    if faults:
        raise UserError.of(faults[:1])
    return case, levels
