"""Files of fits: what was fitted to which benchmark, how accurate it is, and with which versions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.document.show import count
from pipelines.domain.errors import UserError, read_record
from pipelines.host.files import write_json
from pipelines.predict.performance.fit import GPU_KNOBS, FitResult, FittedLevel, moved
from pipelines.predict.performance.gpus import ranks
from pipelines.predict.performance.measured import Measured
from pipelines.predict.performance.modelled import ModelledDeployment
from pipelines.predict.performance.performance import Costed, PerformanceModel, Provenance, Setup
from pipelines.settings.root import Settings

# Cost of an iteration, as the settings choose it.


def costs(settings: Settings) -> Callable[[Setup], Costed]:
    """Return the cost function of a setup: the performance model, adjusted by the named fit.

    Raises:
        UserError: the fit cannot be read; also raised by the returned function for a setup that the fit does not cover.
    """
    model = PerformanceModel.load()
    if settings.sizing.fit is None:
        return model.cost

    fitted = load_fit(settings.sizing.fit)
    return lambda setup: fitted.cost(setup, model.cost(setup))


SCHEMA = 2
METRICS = ("rps", "ttft_p50", "ttft_p95", "itl_mean")
"""Metrics that a fit is judged by."""


@dataclass(frozen=True, slots=True)
class FittedModel:
    """Coefficients of one deployment on one kind of machine.

    Attributes:
        model: name of the model in the benchmark.
        precision: compression in one word, or None.
        engine: engine that executes it, or None.
        gpu: name of the GPU; None for the CPU engine.
        cpu: machine of the CPU engine, in one line.
        tp: tensor parallel ranks.
        pp: pipeline parallel ranks.
        deployment: the coefficients and the engine's limits.
        intervals: 95 % interval by coefficient.
        at_bound: coefficients fitted to the bound of the allowed range.
        undecided: coefficients that the benchmark hardly determines.
        spread: log-deviation of modelled / measured by "ttft", "itl", "throughput".
        multipliers: factors on the performance model's coefficients, by knob; none for an engine it does not cover.
        levels: measured and modelled, per load of the fit.
        fitted_on: tool, files, dates and notes.
        versions: versions of the software that made it.
        schema: version of this file's format.
    """

    model: str
    precision: str | None
    engine: str | None
    gpu: str | None
    cpu: str | None
    tp: int
    pp: int
    deployment: ModelledDeployment
    intervals: Mapping[str, tuple[float, float]]
    at_bound: tuple[str, ...]
    undecided: tuple[str, ...]
    spread: Mapping[str, float]
    multipliers: Mapping[str, float]
    levels: tuple[Mapping[str, Any], ...]
    fitted_on: Mapping[str, Any]
    versions: Mapping[str, str]
    schema: int = field(default=SCHEMA)

    @property
    def why(self) -> str:
        """Origin of the fit, in one line."""
        when = str(self.fitted_on.get("measured_at") or "")[:10]
        loads, day = count(len(self.levels), "load"), f" on {when}" if when else ""
        return f"fitted to {loads} measured with {self.fitted_on['tool']}{day}"

    def is_of(self, *, model: str, precision: str, engine: str, tp: int, world: int, where: Collection[str]) -> bool:
        """Return whether the fit is for this deployment; `where` is the CPU engine's machine, or names of the GPU."""
        mine = (self.model, self.precision, self.engine, self.tp, self.tp * self.pp)
        return mine == (model, precision, engine, tp, world) and (self.gpu or self.cpu) in where

    def cost(self, setup: Setup, said: Costed) -> Costed:
        """Return the performance model's cost of a setup, adjusted by what was measured.

        For exactly the setup that was measured, this is the fit itself; other setups on the same GPU are scaled by the
        same factors, and `why` says so.

        Raises:
            UserError: the fit is for the CPU engine, or for another GPU.
        """
        if not self.multipliers or self.gpu != setup.gpu.name:
            raise UserError(
                f"sizing.fit is for {self.model} on {self.gpu or self.cpu}, not for {setup.gpu.gpu}.",
                todo="Fit on this GPU: make calibrate hardware=... model=... sizing.measured=...",
            )
        knobs = [knob for knob in GPU_KNOBS if knob.name in self.multipliers]
        theta = [math.log(self.multipliers[knob.name]) for knob in knobs]
        before = ModelledDeployment(self.deployment.engine, said.cost, said.overhead_s, said.client_delay)
        after = moved(before, knobs, theta)
        same = (self.tp, self.pp) == (setup.tp, setup.pp) and (self.precision or "").split("-kv_")[0] == setup.qformat
        spread = {
            name: self.spread[name] if same else max(self.spread[name], other) for name, other in said.spread.items()
        }
        why = self.why if same else f"{self.why} of {self.precision} TP {self.tp} PP {self.pp}"
        provenance: Provenance = "fitted" if same else "transferred"
        return replace(
            said, cost=after.cost, overhead_s=after.overhead_s, client_delay=after.client_gap_s, provenance=provenance,
            why=why, spread=spread,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            write_json(path, asdict(self), sort_keys=False)
        except OSError as error:
            raise UserError(f"sizing.fit={path} cannot be written: {error.strerror}.") from None


def load_fit(path: Path) -> FittedModel:
    """Read a file that `save` wrote.

    Raises:
        UserError: the file is missing, of another version, or not a fit.
    """
    try:
        data = json.loads(path.expanduser().read_text())
    except OSError as error:
        raise UserError(
            f"sizing.fit={path} cannot be read: {error.strerror}.",
            todo="Create one: make calibrate sizing.measured=benchmark.json",
        ) from None
    except ValueError as error:
        raise UserError(f"sizing.fit={path} is not JSON: {error}.") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        given = data.get("schema") if isinstance(data, dict) else None
        raise UserError(
            f"sizing.fit={path} has schema {given!r}; this version reads {SCHEMA}.",
            todo="Fit again: make calibrate sizing.measured=benchmark.json",
        )
    return read_record(FittedModel, data, f"sizing.fit={path}", what="a fit of `make calibrate`", todo="")


def fitted_model(measured: Measured, found: FitResult, versions: Mapping[str, str]) -> FittedModel:
    """Collect what to keep of a fit.

    Raises:
        UserError: the ranks of what was measured are not known.
    """
    tp, pp = ranks(measured)
    machine = measured.about.get("machine") or {}
    return FittedModel(
        model=measured.model,
        precision=measured.precision,
        engine=measured.engine,
        gpu=measured.gpu,
        cpu=processor(machine) if measured.gpu is None else None,
        tp=tp,
        pp=pp,
        deployment=found.deployment,
        intervals=found.intervals,
        at_bound=found.at_bound,
        undecided=found.undecided,
        spread=found.spread,
        multipliers={name: float(value) for name, value in found.multipliers.items()},
        levels=tuple(_kept(row) for row in found.rows),
        fitted_on={
            "tool": measured.tool,
            "sources": list(measured.sources),
            "measured_at": measured.about.get("measured_at"),
            "notes": list(measured.notes),
        },
        versions=versions,
    )


def processor(machine: Mapping[str, Any]) -> str | None:
    """Describe the machine of the CPU engine in one line, for comparison; None if the benchmark does not name it."""
    if not machine.get("cpu_count"):
        return None
    return f"{machine['cpu_count']} CPU cores, {machine.get('platform', 'unknown system')}"


def _kept(row: FittedLevel) -> dict[str, Any]:
    level, modelled = row.level, row.modelled
    return {
        "load": level.load,
        "measured": {
            "requests_per_s": level.requests_per_s,
            "ttft_s": asdict(level.ttft_s),
            "itl_s": asdict(level.itl_s),
        },
        "modelled": {
            "requests_per_s": modelled.requests_per_s,
            "ttft_s": asdict(modelled.ttft_s),
            "itl_s": asdict(modelled.itl_s),
        },
    }


TITLES = {"rps": "requests/s", "ttft_p50": "TTFT p50 ms", "ttft_p95": "TTFT p95 ms", "itl_mean": "ITL ms"}


def comparison(rows: Sequence[FittedLevel]) -> list[tuple[str, ...]]:
    """Build table rows: load, then measured, modelled and error in percent per metric; header first, medians last."""
    table = [("load", *(cell for name in METRICS for cell in (TITLES[name], "modelled", "%")))]
    for row in rows:
        found, cells = row.errors(), [row.level.load]
        for name in METRICS:
            if name not in found:
                cells += ["–", "–", "–"]
                continue
            real = measured_value(row, name)
            cells += [_shown(real), _shown(real * (1 + found[name])), f"{100 * found[name]:+.0f}"]
        table.append(tuple(cells))
    medians = ["median error"]
    for name in METRICS:
        values = sorted(abs(row.errors()[name]) for row in rows if name in row.errors())
        medians += ["", "", f"{100 * _median(values):.1f}" if values else "–"]
    return [*table, tuple(medians)]


def measured_value(row: FittedLevel, name: str) -> float:
    """Return a metric as it is shown: requests/s or ms."""
    if name == "rps":
        return row.level.requests_per_s
    what, part = name.split("_")
    return 1e3 * float(getattr(getattr(row.level, f"{what}_s"), part))


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
