"""The command `simulate`: compose the settings, simulate, print and write."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelines.document.canvas import missing_packages
from pipelines.domain.errors import Fault, UserError, collecting, refuse
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.machine import Machine, gather
from pipelines.host.screen import say, wrapped
from pipelines.loadgen.config import OPEN_RATE, load_faults
from pipelines.loadgen.trace import read_trace
from pipelines.predict.performance.placement import Judge
from pipelines.predict.simulate.case import SimulationCase, asked, faults_of, in_ticks, make_case, outcome_table
from pipelines.predict.simulate.files import write_all
from pipelines.predict.simulate.loads import Simulated, make_levels, run_all
from pipelines.predict.simulate.outcome import SimulatedLevel
from pipelines.settings.compose import load
from pipelines.settings.root import Settings, as_yaml
from pipelines.store.run_folder import run_folder

CLASSIC, REQUESTS = "workload=classic", "benchmark.num_requests=100"
"""Simulated when nothing is specified: the short answers of the classic drawing."""
RATE = "benchmark.request_rate=0.22"
"""Between what 4 slots serve with static batching (178 requests per 1,000 ticks) and with in-flight batching (267):
with one the queue grows, with the other it comes and goes."""

GROUPS = ("workload", "simulator", "runtime", "experiment", "paths", "store", "hydra")
"""Groups that are read as a whole, whatever the unit of time."""
NOT_SPEED = (
    "benchmark", "sizing", "report", "calibration", "eval", "fidelity", "diagnose", "verify", "serving", "image",
    "manifests", "cluster", "nightly", "plan", "stage", "doctor", "migrate",
)  # fmt: skip
"""Groups that the performance model does not read as a whole; it reads all others."""
LOAD = ("benchmark", "benchmark.concurrency", "benchmark.request_rate", "benchmark.num_requests", "llm_api.file")
OF_TICKS = (*LOAD, "build.tokens_per_block", "triton.batch_scheduler_policy")
OF_FIT = (*LOAD, "benchmark.window", "sizing.fit", "sizing.requests", "kv_cache.enable_block_reuse", "reuse", "window")
OF_MODEL = (*LOAD, "benchmark.window", "sizing.model", "sizing.requests")
"""What is read of other groups: in ticks, with a fit (sizing.fit), and by the performance model of those above."""

_SEARCH = Fault(
    "benchmark.search=max_load only works with `make benchmark`.",
    todo="Leave it out; `make size` finds the largest load of a modelled deployment.",
)


def simulate(overrides: Sequence[str], judge_of: Callable[[Settings, Machine], Judge]) -> int:
    """Simulate the policies under the loads, print the table, write files and pictures into a run folder.

    `judge_of` makes the rules of a plan from settings.
    """
    refuse(missing_packages("The run's picture", ("matplotlib",)))
    simulation = prepared(overrides, judge_of)
    settings = simulation.settings
    check_folders({"paths.runs": settings.paths.runs})
    with run_folder("simulate", settings.paths.runs, as_yaml(settings), simulation.overrides) as folder:
        for line in simulation.heading():
            say(line)
        results = simulation.run()
        say(simulation.table(results) + "\n")
        for name, path in write_all(folder, settings, simulation.case, results):
            say(f"{name + ':':<9} {relative_to_cwd(path)}")
    return 0


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSimulation:
    """What is simulated. `overrides`: those given, preceded by the defaults for a run in ticks."""

    overrides: list[str]
    settings: Settings
    case: SimulationCase
    levels: list[SimulatedLevel]

    def heading(self) -> list[str]:
        """Return the unit of time and the notes, wrapped."""
        settings, case = self.settings, self.case
        traced = () if settings.workload.trace is None else read_trace(settings.workload).notes
        unit = f"time: {'seconds' if case.unit == 's' else case.unit} ({case.reason})"
        unread = [word for word in self.overrides if not _is_read(word, settings, case.unit)]
        by_default = case.unit != "s" and settings.simulator.time != "ticks"
        modelled = by_default and any(not word.startswith(("benchmark.", "workload.")) for word in unread)
        why = " (hardware=h100_sxm and the like simulate the model in seconds)" if modelled else ""
        said = [f"not read: {', '.join(unread)}{why}"] if unread else []
        return [wrapped(line) for line in (unit, *case.notes, *traced, *said)]

    def run(self) -> list[Simulated]:
        """Simulate each policy under each load."""
        return run_all(self.settings, self.case, self.levels)

    def table(self, results: Sequence[Simulated]) -> str:
        """Format the outcomes."""
        (load, *others) = self.levels
        one = not others and (load.concurrency is not None or load.request_rate is not None)
        title = asked(self.settings, self.case, load.title if one else None)
        return f"{wrapped(title)}\n\n{outcome_table([each.outcome for each in results], self.case.unit)}"


def prepared(overrides: Sequence[str], judge_of: Callable[[Settings, Machine], Judge]) -> PreparedSimulation:
    """Compose the settings and make the loads; nothing is run or written.

    Raises:
        UserError: everything that is wrong, at once.
    """
    completed, settings = with_defaults(overrides)
    return PreparedSimulation(completed, settings, *_judged(settings, judge_of))


def _is_read(override: str, settings: Settings, unit: str) -> bool:
    """Return whether an override changes what is simulated; a trace states all lengths itself."""
    key = override.lstrip("+~").partition("=")[0]
    group = key.partition(".")[0]
    if settings.workload.trace is not None and key.startswith(("workload.isl", "workload.osl")):
        return False
    if group in GROUPS:
        return True
    if unit == "ticks" or settings.sizing.fit is not None:
        return key in (OF_TICKS if unit == "ticks" else OF_FIT)
    return group not in NOT_SPEED or key in OF_MODEL


def with_defaults(overrides: Sequence[str]) -> tuple[list[str], Settings]:
    """Return the overrides, preceded by the defaults for a run in ticks, and the resulting settings.

    In ticks, answers are as short as in the classic drawing unless a workload is chosen, and requests arrive at random
    unless a load is given.
    """
    settings = load(overrides)
    completed = [*_beginning(settings, overrides), *overrides]
    return completed, load(completed) if len(completed) > len(overrides) else settings


def _beginning(settings: Settings, overrides: Sequence[str]) -> list[str]:
    plain = [text.lstrip("+") for text in overrides]
    if not in_ticks(settings) or settings.workload.name != "fixed" or any(w.startswith("workload=") for w in plain):
        return []
    set_here = {text.partition("=")[0] for text in plain}
    arrival = "closed" if "benchmark.concurrency" in set_here else "poisson"
    defaults = [CLASSIC, f"workload.arrival={arrival}"]
    arrival = settings.workload.arrival if "workload.arrival" in set_here else arrival
    if arrival in OPEN_RATE and "benchmark.request_rate" not in set_here:
        defaults += [RATE, REQUESTS]
    return [*defaults, REQUESTS] if arrival == "burst" else defaults


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
    refuse([fault for level in levels for fault in level.faults(case.engines[0])][:1])
    refuse([fault for level in levels for fault in level.cut(settings.simulator.until, case.unit)][:1])
    return case, levels
