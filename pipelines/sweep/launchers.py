"""The launchers, and checks of what each needs before anything is written."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from pipelines.domain.errors import Fault, UserError, did_you_mean
from pipelines.plan.targets import MEASURED, Target
from pipelines.settings.groups import CONF

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
    if faults:
        raise UserError.of(faults)


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
