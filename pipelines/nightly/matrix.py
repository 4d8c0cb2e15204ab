"""Expand settings and the user's overrides into the cells of a run."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.domain.errors import UserError
from pipelines.nightly.config import NightlySettings
from pipelines.settings.by_hydra import parse_override
from pipelines.settings.groups import groups
from pipelines.store.store import fingerprint

FOLDER = "model.path"
OWN = ("nightly",)
"""Overrides that apply to the run itself."""
PLACES = ("paths", "report")
"""Overrides that apply to the run and to every cell."""
NOT_ASKED = (*PLACES, "workload", "benchmark", "eval")
"""Overrides that do not separate series: folders, and the questions, which are compared one by one."""


@dataclass(frozen=True, slots=True)
class NightlyCell:
    """One combination.

    Attributes:
        name: values of the axes, for display.
        overrides: complete, as on the command line.
        key: identifies what was requested; the same on every night, even if defaults change.
    """

    name: str
    overrides: tuple[str, ...]
    key: str


def own_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that concern the run: the matrix and the folders."""
    return [text for text in overrides if _key(text).split(".")[0] in (*OWN, *PLACES)]


def cells(settings: NightlySettings, overrides: Sequence[str]) -> list[NightlyCell]:
    """List all cells in the order they run; the last axis varies fastest.

    Args:
        settings: contain the matrix.
        overrides: from the command line. One that names an axis, or gives a list of values, replaces that axis; the
            others apply to every cell and take precedence over the matrix. A folder (model.path) is the only model.

    Raises:
        UserError: an override cannot be read, or there is no axis.
    """
    axes = {axis: list(values) for axis, values in settings.matrix.items()}
    for_all: list[str] = []
    for text in overrides:
        key = _key(text)
        if key.split(".")[0] in OWN:
            continue
        values = _values(text)
        if key == FOLDER:  # of a model of the user's own, which would be measured under the names of the others
            axes = {FOLDER if axis == "model" else axis: each for axis, each in axes.items()} | {FOLDER: values}
        elif key in axes or len(values) > 1:
            axes[key] = values
        else:
            for_all.append(text)
    if not axes:
        raise UserError("The nightly matrix has no axis.", todo="Set one: nightly.matrix={quant:[none,fp8]}")
    return [
        _cell(dict(zip(axes, combination, strict=True)), settings, for_all)
        for combination in itertools.product(*axes.values())
    ]


def _cell(axes: Mapping[str, str], settings: NightlySettings, for_all: Sequence[str]) -> NightlyCell:
    some = [
        text
        for cell in settings.cells
        if all(axes.get(axis) == value for axis, value in cell.when.items())
        for text in cell.set
    ]
    overrides = {_key(text): text for text in (*settings.set, *some, *for_all)}  # the last one wins
    decided = sorted(text for key, text in overrides.items() if key.split(".")[0] not in NOT_ASKED)
    chosen = [f"{axis}={value}" for axis, value in axes.items()]
    names = groups()
    name = " ".join(value if axis in names else f"{axis}={value}" for axis, value in axes.items())
    return NightlyCell(name, (*chosen, *overrides.values()), fingerprint([sorted(chosen), decided])[:16])


def _key(text: str) -> str:
    return str(parse_override(text).get_key_element().lstrip("+~"))


def _values(text: str) -> list[str]:
    """Return the values of `key=a,b`; a single value otherwise."""
    parsed = parse_override(text)
    if parsed.is_sweep_override():
        return [str(value) for value in parsed.sweep_string_iterator()]
    return [parsed.get_value_element_as_str()]
