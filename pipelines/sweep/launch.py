"""Run a sweep: expand the overrides into cells, skip finished ones, and hand the rest to a launcher.

Hydra's grammar defines the combinations and Hydra's launchers start them. Its application wrapper is not used, so that
finished cells need no job and errors are reported in our own words.
"""

import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as compose_by_hydra
from hydra._internal.callbacks import Callbacks  # a HydraContext takes it, and it has no public name
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from pipelines.domain.errors import Fault, UserError, collecting, did_you_mean, refuse
from pipelines.host.disk import check_folders
from pipelines.host.files import disk_faults, write_json
from pipelines.host.machine import Machine, gather
from pipelines.host.screen import say, tell
from pipelines.plan.plan import make_plan, with_questions
from pipelines.plan.targets import MEASURED, Goal, Target
from pipelines.settings.by_hydra import diagnose, hydra_on_conf, unexplained
from pipelines.settings.compose import compose
from pipelines.settings.groups import CONF, project_file
from pipelines.settings.project import project_content
from pipelines.settings.root import validate
from pipelines.store.store import Store, fingerprint
from pipelines.sweep.cells import RunCell, SweepCell, Watch, cells_of

BASIC = "basic"
"""Hydra's name of what runs one cell after another; its class is private to Hydra."""
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
WORDS = {BASIC: BASIC, "joblib": JOBLIB, "slurm": SLURM}
"""hydra/launcher=... -> its class; other installed launchers work as well."""
PACKAGES = {JOBLIB: "hydra-joblib-launcher", SLURM: "hydra-submitit-launcher"}
PROGRAMS = {SLURM: ("sbatch", "srun", "squeue", "scancel")}


@dataclass(frozen=True)
class Sweep:
    """A sweep as composed by Hydra."""

    config: Any
    combinations: tuple[tuple[str, ...], ...]

    @property
    def launcher(self) -> str:
        """Return the launcher's class, or `BASIC` for Hydra's own."""
        return BASIC if self.launcher_word == BASIC else str(self.config.hydra.launcher._target_)

    @property
    def runs_here(self) -> bool:
        """Whether the cells run on this machine."""
        return self.launcher in (BASIC, JOBLIB)

    @property
    def launcher_word(self) -> str:
        """Return the launcher's name on the command line."""
        return str(self.config.hydra.runtime.choices["hydra/launcher"])


def check_launcher(sweep: Sweep, target: Target) -> None:
    """Refuse a launcher that cannot work here.

    Raises:
        UserError: a package or program is missing, or measurements would disturb one another.
    """
    faults = []
    if (word := sweep.config.hydra.runtime.choices["hydra/sweeper"]) != "basic":
        faults.append(
            Fault(
                f"hydra/sweeper={word} cannot be used here: it chooses the next cell by a number, and a cell returns "
                "none.",
                todo="Leave it out and list the values: quant=fp8,int4_awq",
            )
        )
    faults += _package(sweep.launcher_word, sweep.launcher)
    if missing := [name for name in PROGRAMS.get(sweep.launcher, ()) if shutil.which(name) is None]:
        faults.append(
            Fault(
                f"hydra/launcher={sweep.launcher_word} needs Slurm's {', '.join(missing)}, not found on PATH.",
                todo="Run the command on a login node of the cluster, or leave out hydra/launcher to run here.",
            )
        )
    if sweep.launcher == JOBLIB and target in MEASURED and sweep.config.hydra.launcher.n_jobs != 1:
        faults.append(
            Fault(
                "hydra/launcher=joblib would run several benchmarks on this machine at once, and each would measure "
                "the others.",
                todo="Leave it out, or compare on a cluster with hydra/launcher=slurm.",
            )
        )
    refuse(faults)


def launcher_faults(overrides: Sequence[str]) -> list[Fault]:
    """Find faults in the launcher's settings after Hydra failed to compose."""
    values = dict(text.partition("=")[::2] for text in overrides)
    word = values.get("hydra/launcher", "basic")
    if word not in WORDS:
        near = did_you_mean(word, WORDS)
        return [Fault(f"hydra/launcher={word} is not known.", f"Choose one of {', '.join(WORDS)}.", near)]
    file = CONF / "hydra" / "launcher" / f"{word}.yaml"
    options = yaml.safe_load(file.read_text()).keys() if file.is_file() else ()
    keys = [key.removeprefix("hydra.launcher.") for key in values if key.startswith("hydra.launcher.")]
    unknown = [key for key in keys if options and key.split(".")[0] not in options]
    return _package(word, WORDS[word]) + [
        Fault(f"hydra.launcher.{key} is not an option of {word}.", did_you_mean(key, options), f"See {file}.")
        for key in unknown
    ]


def _package(word: str, launcher: str) -> list[Fault]:
    name = PACKAGES.get(launcher)
    if name is None or _is_installed(name):
        return []
    return [
        Fault(
            f"hydra/launcher={word} needs the Python package '{name}', which is not installed.",
            todo=f"Run: make setup (or: pip install {name})",
        )
    ]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"hydra_plugins.{name.replace('-', '_')}") is not None
    except ModuleNotFoundError:  # not a Hydra plugin
        return False


# Remember which kind of machine a launcher's jobs ran on, learned from their results.
#
# Whether a cell is finished depends on the machine it runs on (the GPU is part of an engine's key), which is not the
# login node. So the facts of the last node are kept per launcher configuration. While they are unknown, every cell is
# submitted and finds out by itself what is finished.

FILE = ".nodes.json"


def recall(store: Path, launcher: Any) -> Machine | None:
    """Return the machine that this launcher's jobs last ran on, or None."""
    try:
        return TypeAdapter(Machine).validate_python(_machines(store)[_key(launcher)])
    except (KeyError, ValidationError):  # never used, or written by another version
        return None


def remember(store: Path, launcher: Any, cells: Sequence[SweepCell]) -> None:
    """Record the machine of a cell that ran."""
    machines = [cell.machine for cell in cells if cell.machine]
    if machines and store.is_dir():
        write_json(store / FILE, {**_machines(store), _key(launcher): machines[-1]})


def _machines(store: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((store / FILE).read_text()))
    except (OSError, ValueError):  # only a cache: losing it costs some jobs that find everything finished
        return {}


def _key(launcher: Any) -> str:
    return fingerprint(OmegaConf.to_container(launcher, resolve=False))[:16]


TOGETHER = "eval.judged_together="


def run_cells(target: Target, overrides: Sequence[str]) -> tuple[Path, list[SweepCell]]:
    """Run every unfinished combination of the comma-separated lists.

    Returns:
        the sweep's folder, and all cells, done or failed.

    Raises:
        UserError: Hydra cannot compose the combinations, or the launcher cannot work here.
        KeyboardInterrupt: after the running cells were stopped.
    """
    runs = Path(compose([word for word in overrides if word.startswith("paths.")])["paths"]["runs"])
    folder = runs.absolute() / "sweeps" / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    sweep = expand(overrides, folder)
    paths = sweep.config.paths
    check_folders({"paths.runs": Path(paths.runs)}, read={"paths.store": Path(paths.store)})
    check_launcher(sweep, target)
    store = Store(Path(sweep.config.paths.store))
    here = sweep.runs_here
    machine = gather() if here else recall(store.root, sweep.config.hydra.launcher)
    cells = _without_finished(_together(cells_of(target, sweep.combinations), store), store, machine, here)
    waiting = [cell for cell in cells if not cell.ended]
    if len(cells) > 1 and {cell.state for cell in cells} == {"failed"} and len({cell.reason for cell in cells}) == 1:
        raise UserError(cells[0].reason)  # about all of it, such as a missing package
    _tell(cells, waiting, sweep)
    with disk_faults(
        f"paths.runs='{runs.absolute()}' cannot be written", "Give another folder: paths.runs=/some/folder"
    ):
        folder.mkdir(parents=True)
        for cell in cells:
            cell.write(folder)
    try:
        if waiting:
            _launch(sweep, folder, waiting)
    finally:
        cells = [_ended(cell.fresh(folder), folder) for cell in cells]
        remember(store.root, sweep.config.hydra.launcher, cells)
    return folder, cells


def _ended(cell: SweepCell, folder: Path) -> SweepCell:
    if cell.ended:
        return cell
    cell = cell.failed(
        "it was never started" if cell.state == "waiting" else f"it ended without a result on {cell.host}"
    )
    cell.write(folder)
    return cell


def expand(overrides: Sequence[str], folder: Path) -> Sweep:
    """Compose the single values, and expand the lists into combinations.

    Raises:
        UserError: Hydra refuses an override.
    """
    place = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    try:
        with hydra_on_conf():
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            words = parser.parse_overrides(list(overrides))
            plain = [str(word.input_line) for word in words if not word.is_sweep_override()]
            config = compose_by_hydra("config", [*plain, f"hydra.sweep.dir='{place}'"], return_hydra_config=True)
            listed = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
            own = (word for word in words if not str(word.key_or_group).startswith(("hydra.", "hydra/")))
            words = [*parser.parse_overrides(listed), *own]
            combinations = product(*{word.get_key_element(): _alternatives(word) for word in words}.values())
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: a number for a name
        faults = [*launcher_faults(overrides), *diagnose(overrides, sweeping=True)]
        if not faults and "hydra" in project_content():  # which other commands do not read
            faults = [Fault(f"'{project_file()}': Hydra refuses what stands there: {' '.join(str(error).split())}.")]
        raise UserError.of(faults or [unexplained(overrides)]) from None
    return Sweep(config, tuple(dict.fromkeys(combinations)))


def _alternatives(word: Any) -> list[str]:
    """The overrides that a parsed word stands for: one, or one for each value that it lists."""
    key = word.get_key_element()
    if not word.is_sweep_override():
        return [f"{key}={word.get_value_element_as_str()}"]
    if not word.is_discrete_sweep():
        raise UserError(
            f"'{word.input_line}' names no values: a sweep runs every combination of values, and does not support "
            f"sweep type {word.value_type.name}.",
            todo=f"List the values: {key}=1,2,3",
        )
    return [f"{key}={value}" for value in word.sweep_string_iterator()]


def _together(cells: Sequence[SweepCell], store: Store) -> list[SweepCell]:
    """Tell each cell that may stop asking early how many are judged with it, so that its verdict holds in the table."""
    goals: dict[int, Goal] = {}
    for cell in cells:
        with suppress(UserError):  # which is said when the cell is planned
            goals[cell.number] = with_questions(Goal(validate(compose(cell.overrides)), cell.target), store)[0]
    judged = Counter(goal.settings.model.label for goal in goals.values() if goal.has_baseline)
    adjusted = []
    for cell in cells:
        own = goals.get(cell.number)
        number = judged[own.settings.model.label] if own is not None and own.is_sequential else 1
        is_set = any(word.startswith(TOGETHER) for word in cell.overrides)
        more = (f"{TOGETHER}{number}",) if number > 1 and not is_set else ()
        adjusted.append(replace(cell, overrides=(*cell.overrides, *more)))
    return adjusted


def _without_finished(cells: Sequence[SweepCell], store: Store, machine: Machine | None, here: bool) -> list[SweepCell]:
    """Mark cells that are already finished, and cells that cannot be planned."""
    faults: list[Fault] = []
    judged = []
    for cell in cells:
        with collecting(faults):
            raw = compose(cell.overrides)
            judged.append(_judged(cell, raw, store, machine, here))
    refuse(dict.fromkeys(faults))
    return judged


def _judged(cell: SweepCell, raw: dict[str, Any], store: Store, machine: Machine | None, here: bool) -> SweepCell:
    """Plan a cell, and mark it done, failed, or waiting for a launcher.

    A cell for another machine is planned with that machine's facts, if they are known; whether it can run there is
    decided there.
    """
    try:
        settings = validate(raw)
    except UserError as error:
        return cell.failed(str(error))
    cell = replace(cell, model=settings.model.label, variant=settings.variant.label)
    if machine is None:
        return cell
    try:
        plan = make_plan(settings, cell.target, store, machine)
    except UserError as error:
        return cell.failed(str(error)) if here else cell
    cell = replace(cell, variant=plan.settings.variant.label)
    if here and plan.refusals:
        return cell.failed(str(UserError.of(plan.refusals)))
    if not plan.is_done:
        return cell
    artifacts = {step.node.id: str(step.artifact.path) for step in plan.steps if step.artifact}
    return replace(cell, state="done", artifacts=artifacts)


def _tell(cells: Sequence[SweepCell], waiting: Sequence[SweepCell], sweep: Sweep) -> None:
    finished = sum(cell.state == "done" for cell in cells)
    refused = [cell for cell in cells if cell.state == "failed"]
    parts = [f"{len(cells)} cell{'s' if len(cells) > 1 else ''}"]
    parts += [f"{finished} finished already"] if finished else []
    parts += [f"{len(refused)} refused"] if refused else []
    parts += [f"{len(waiting)} to run" + ("" if sweep.launcher == BASIC else f" with {sweep.launcher_word}")]
    say(", ".join(parts))
    for cell in refused:
        tell(f"[{cell.number}] {cell.words}\nfailed: {cell.reason}")


def _launch(sweep: Sweep, folder: Path, waiting: Sequence[SweepCell]) -> None:
    in_terminal = sweep.launcher == BASIC
    submitter = os.getpid() if sweep.launcher == JOBLIB else None
    task = RunCell(folder, tuple(cell.file(folder) for cell in waiting), in_terminal, submitter)
    watched = nullcontext() if in_terminal or sweep.launcher == SLURM else Watch(folder, waiting).meanwhile()
    with hydra_on_conf(), watched:
        HydraConfig.instance().set_config(sweep.config)
        try:
            context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks(sweep.config))
            if sweep.launcher == SLURM:
                from pipelines.sweep.slurm import SlurmLauncher  # imports submitit

                options: Any = OmegaConf.to_container(sweep.config.hydra.launcher, resolve=True)
                launcher: Any = SlurmLauncher(**{name: value for name, value in options.items() if name != "_target_"})
                launcher.setup(hydra_context=context, task_function=task, config=sweep.config)
            else:
                launcher = Plugins.instance().instantiate_launcher(context, task, sweep.config)
            launcher.launch([list(cell.overrides) for cell in waiting], 0)
        except BrokenExecutor as error:
            say(f"The launcher's workers were killed: {str(error).splitlines()[0]}")
