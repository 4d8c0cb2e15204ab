"""Model a deployment and its benchmark loads: the "modelled" values shown beside the "measured" ones.

A fit to a benchmark of the same deployment on the same machine comes first; for GPUs the performance model is the
fallback; a CPU engine without a fit has no model, and nothing is shown.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.document.show import count
from pipelines.domain.errors import UserError, read_record, refuse
from pipelines.domain.formats import UNIFORM, KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.variant import Variant
from pipelines.engines.config import HardwareSettings
from pipelines.engines.registry import with_setting
from pipelines.engines.tuning import tuned
from pipelines.host.files import disk_faults, write_json
from pipelines.predict.config import fit_files
from pipelines.predict.performance.coverage import unmodelled
from pipelines.predict.performance.fit import GPU_KNOBS, FitResult, moved
from pipelines.predict.performance.gpus import GpuSpec, ranks
from pipelines.predict.performance.limits import ChosenLimits, known_lengths
from pipelines.predict.performance.measured import Measured
from pipelines.predict.performance.modelled import ModelledDeployment
from pipelines.predict.performance.models import engine_of, plain_name
from pipelines.predict.performance.performance import Costed, PerformanceModel, Provenance, Setup
from pipelines.predict.performance.placement import EngineTerms, place
from pipelines.predict.performance.read_measured import ELSEWHERE
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


@dataclass(frozen=True, slots=True)
class FittedModel:
    """Coefficients of one deployment on one kind of machine.

    Attributes:
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
    def name(self) -> str:
        """Model, format and GPU or engine: "llama_3_1_8b fp8 on h100_sxm"."""
        what = f"{self.model} {self.precision}" if self.precision else self.model
        engine = None if self.engine == ELSEWHERE else self.engine
        return f"{what} on {self.gpu or engine or 'a server elsewhere'}"

    @property
    def why(self) -> str:
        """Origin of the fit, in one line."""
        when = str(self.fitted_on.get("measured_at") or "")[:10]
        loads, day = count(len(self.levels), "load"), f" on {when}" if when else ""
        return f"fitted to {loads} measured with {self.fitted_on['tool']}{day}"

    def cost(self, setup: Setup, predicted: Costed) -> Costed:
        """Return the performance model's cost of a setup, adjusted by what was measured.

        For exactly the setup that was measured, this is the fit itself; other setups on the same GPU, also of other
        models, are scaled by the same factors, and `why` says so.

        Raises:
            UserError: the fit is for the CPU engine, or for another GPU.
        """
        if not self.multipliers or self.gpu != setup.gpu.name:
            raise UserError(
                f"sizing.fit is for {self.name}, not for {setup.gpu.gpu}.",
                todo="Fit on this GPU: make calibrate hardware=... model=... sizing.measured=...",
            )
        knobs = [knob for knob in GPU_KNOBS if knob.name in self.multipliers]
        theta = [math.log(self.multipliers[knob.name]) for knob in knobs]
        form, split = Variant.of(self.precision or ""), (setup.tp, setup.pp, setup.lanes)
        same = (self.tp, self.pp, self.deployment.lanes) == split and form.formats == (setup.qformat, setup.kv_format)
        same = same and (form.sparsity != "none") == setup.sparse
        same = same and plain_name(self.model) == plain_name(setup.model.name)
        known = {name: self.spread.get(name, other) for name, other in predicted.spread.items()}
        spread = known if same else {name: max(known[name], other) for name, other in predicted.spread.items()}
        why = self.why if same else f"{self.why} of {self.model} {self.precision} TP {self.tp} PP {self.pp}"
        provenance: Provenance = "fitted" if same else "transferred"
        return replace(moved(predicted, knobs, theta), provenance=provenance, why=why, spread=spread)

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            UserError: the file cannot be written.
        """
        with disk_faults(f"sizing.fit={path} cannot be written"):
            write_json(path, asdict(self), sort_keys=False)


def load_fit(path: Path) -> FittedModel:
    """Read a file that `save` wrote.

    Raises:
        UserError: the file is missing, of another version, or not a fit.
    """
    try:
        with disk_faults(
            f"sizing.fit={path} cannot be read", "Create one: make calibrate sizing.measured=benchmark.json"
        ):
            data = json.loads(path.expanduser().read_text())
    except ValueError as error:
        raise UserError(f"sizing.fit={path} is not JSON: {error}.") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise UserError(
            f"sizing.fit={path} has schema {schema!r}; this version reads {SCHEMA}.",
            todo="Fit again: make calibrate sizing.measured=benchmark.json",
        )
    return read_record(FittedModel, data, f"sizing.fit={path}", what="a fit of `make calibrate`", todo="")


def fitted_model(measured: Measured, result: FitResult, versions: Mapping[str, str]) -> FittedModel:
    """Collect the stored facts of a fit.

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
        deployment=result.deployment,
        intervals=result.intervals,
        at_bound=result.at_bound,
        undecided=result.undecided,
        spread=result.spread,
        multipliers={name: float(value) for name, value in result.multipliers.items()},
        levels=tuple(
            {
                "load": row.level.load,
                **{
                    name: {
                        "requests_per_s": figures.requests_per_s,
                        "ttft_s": asdict(figures.ttft_s),
                        "itl_s": asdict(figures.itl_s),
                    }
                    for name, figures in (("measured", row.level), ("modelled", row.modelled))
                },
            }
            for row in result.rows
        ),
        fitted_on={
            "tool": measured.tool,
            "sources": list(measured.sources),
            "measured_at": measured.about.get("measured_at"),
            "notes": list(measured.notes),
            "images": measured.about.get("images", 0),
        },
        versions=versions,
    )


def processor(machine: Mapping[str, Any]) -> str | None:
    """Describe the machine of the CPU engine in one line, for comparison; None if the benchmark does not name it."""
    if not machine.get("cpu_count"):
        return None
    return f"{machine['cpu_count']} CPU cores, {machine.get('platform', 'unknown system')}"


@dataclass(frozen=True, slots=True)
class PredictedDeployment:
    """A modelled deployment.

    Attributes:
        deployment: what is simulated.
        provenance: "fitted", "transferred" or "datasheet".
        why: the same in words.
        spread: log-deviation of modelled / measured by "ttft", "itl", "throughput".
        limits: of the engine, where some were chosen for the load.
    """

    deployment: ModelledDeployment
    provenance: Provenance
    why: str
    spread: Mapping[str, float]
    limits: ChosenLimits | None = None


def stored_fits(settings: Settings) -> list[FittedModel]:
    """Return the fits to search: the named one, or else those of the store that are of this version and of text.

    Raises:
        UserError: the named fit cannot be read.
    """
    if settings.sizing.fit is not None:
        return [load_fit(settings.sizing.fit)]
    fits = []
    for path in fit_files(settings.paths.store):
        with suppress(UserError):
            fits.append(load_fit(path))
    return [each for each in fits if not each.fitted_on.get("images")]


def fitted_deployment(
    fits: Sequence[FittedModel], *, model: str, precision: str, engine: str, tp: int, world: int,
    where: Collection[str],
) -> PredictedDeployment | None:  # fmt: skip
    """Find the fit to a benchmark of this deployment; `where` is the CPU engine's machine, or names of the GPU."""
    deployment = (model, precision, engine, tp, world)
    for each in fits:
        fitted = (each.model, each.precision, each.engine, each.tp, each.tp * each.pp)
        if fitted == deployment and (each.gpu or each.cpu) in where:
            return PredictedDeployment(each.deployment, "fitted", each.why, each.spread)
    return None


def gpu_model(
    settings: Settings, model: ModelShape, gpu: GpuSpec, cost: Callable[[Setup], Costed], *,
    form: Variant | None = None, tp: int | None = None, pp: int | None = None,
) -> PredictedDeployment:  # fmt: skip
    """Model the iterations of the deployment that the settings describe; `form`, `tp` and `pp` replace theirs.

    A `form` of another tool, or of a pruned model, is left out.

    Raises:
        UserError: the GPU does not support it, the model leaves no room for a KV cache, or a setting changes the speed
            in a way that is not modelled.
    """
    refuse(unmodelled(settings))
    setup = Setup.of(settings, model, gpu)
    setup = replace(setup, tp=tp or setup.tp, pp=pp or setup.pp)
    if form is not None and form.formats is not None:
        qformat, kv_format = form.formats
        setup = replace(setup, qformat=qformat, kv_format=kv_format, sparse=form.sparsity != "none")
    costed = cost(setup)
    placed = place(setup, costed.cost, EngineTerms.of(settings, model), known_lengths(settings))
    if not placed.engine.kv_blocks:
        raise UserError(
            f"{model.name} in {setup.qformat} leaves no KV cache on {gpu.name} (modelled).",
            todo=f"`make plan hardware={gpu.name} ...` shows what would fit.",
        )
    deployment = ModelledDeployment(
        placed.engine, costed.cost, costed.overhead_s, costed.client_gap_s, lanes=setup.lanes
    )
    return PredictedDeployment(deployment, costed.provenance, costed.why, costed.spread, placed.limits)


# Tune a configuration for the GPU that is sized or simulated, as the plan tunes it.


def tuned_for(settings: Settings, model: ModelShape, hardware: HardwareSettings) -> Settings:
    """Return the settings with the advice for their engine; engine=auto is the one that runs the model on a GPU."""
    named = with_setting(settings.engine.name)
    engine = engine_of(settings, model) if named is None or named.needs_gpu else named
    return tuned(settings, engine, model, hardware)


def tuned_kv_formats(settings: Settings, model: ModelShape, hardware: HardwareSettings) -> dict[QFormat, KvFormat]:
    """Return the KV-cache format that an engine of each weight format has."""
    formats = {}
    for qformat in UNIFORM:
        quant = settings.quant.model_copy(update={"qformat": qformat})
        formats[qformat] = tuned_for(settings.model_copy(update={"quant": quant}), model, hardware).kv_cache.dtype
    return formats
